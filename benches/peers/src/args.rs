//! The command line.

use crate::elements::Elements;
use crate::failure::Result;
use crate::neighbour::Neighbour;
use crate::peer::Entry;
use crate::support::{self, LENGTHS, Workload};
use crate::workloads;
use std::path::PathBuf;

pub(crate) const HELP: &str = "\
Times sdpa and its peers alternately, and holds each one's answer against f64.

Usage: peers [OPTIONS]             attention, on named workloads
       peers sweep [OPTIONS]       attention against length, as a table and a picture
       peers backward [OPTIONS]    attention and its gradients: forward and backward together
       peers embed [OPTIONS]       all-MiniLM-L6-v2: texts to embeddings

  --workload NAME,…  attention: those whose names contain one of these (default: all but odd); mla-4k is a step
                     of multi-head latent attention
  --peer NAME,…      these only, and sdpa (default: all there are)
  --threads N,…      on so many threads (default: on one, and on all)
  --seconds S        time to spend on each peer and workload (default: 1)
  --check            do not time: compute once and hold the answer against f64
  --beside NAME,…    what the other cores do while a peer is timed: nothing, or memory, which reads more of it than
                     caches hold, a thread for each core that the peer leaves (default: nothing)
  --markdown         one line a workload, to be read in a README, in place of one a peer
  --json FILE        write everything to a file too
  --record FILE      write each task to a file as soon as it is measured; a run with a file that is there goes on
                     where that one ended
  --elements NAME,…  attention: elements of tensors, f32 or bf16, or of keys and values, f16 or int8
                     (prompts and steps over int8 caches, beside ours in f32);
                     backward: of tensors and gradients, f32 or bf16 (default: f32)
  --pictures DIR     sweep: folder of the picture (default: target/pictures)
  --python FILE      the interpreter that has the Python peers but zentorch (default: what python/setup.py installs)
  --model DIR        embed: model.safetensors, config.json and tokenizer.json (default: what .ci/fetch-minilm fetches)
  --help             this

Exit status: 0 if every answer is right, 1 if one is not or a peer failed, 2 if an argument is wrong.
";

/// What to compare, and how.
#[derive(Debug)]
pub(crate) struct Args {
    pub(crate) workloads: Vec<Workload>,
    pub(crate) peers: Option<Vec<String>>,
    pub(crate) threads: Vec<usize>,
    /// 0 if nothing is to be timed.
    pub(crate) seconds: f64,
    pub(crate) markdown: bool,
    pub(crate) json: Option<PathBuf>,
    pub(crate) record: Option<PathBuf>,
    pub(crate) beside: Vec<Neighbour>,
    pub(crate) pictures: PathBuf,
    pub(crate) python: PathBuf,
    pub(crate) model: PathBuf,
    pub(crate) elements: Vec<Elements>,
}

/// What the program was asked to do.
#[derive(Debug)]
pub(crate) enum Command {
    Help,
    Attention(Args),
    Sweep(Args),
    Backward(Args),
    Embed(Args),
    /// To be a worker, by the peer's name.
    Worker {
        of: Part,
        name: String,
    },
}

/// Results that a worker computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Attention,
    Gradients,
    Embeddings,
}

impl Part {
    /// The word that makes this program, or worker.py, a worker of it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Attention => "worker",
            Self::Gradients => "backward-worker",
            Self::Embeddings => "embed-worker",
        }
    }
}

/// Reads the words after the program's name.
pub(crate) fn parse(words: impl IntoIterator<Item = String>) -> Result<Command> {
    let mut words = words.into_iter().peekable();
    let first = words.next_if(|word| !word.starts_with('-'));
    let named = || workloads::named().collect();
    let (command, workloads): (fn(Args) -> Command, Vec<_>) = match first.as_deref() {
        Some(word) if let Some(of) = PARTS.into_iter().find(|part| part.word() == word) => {
            let name = words.next().ok_or("which worker?")?;
            return Ok(Command::Worker { of, name });
        }
        Some("embed") => (Command::Embed, named()),
        Some("backward") => (Command::Backward, named()),
        Some("sweep") => (Command::Sweep, LENGTHS.to_vec()),
        Some(unknown) => return Err(format!("{unknown}: unknown; --help lists what there is").into()),
        None => (Command::Attention, named()),
    };
    let usual = |workload: &Workload| match first.as_deref() {
        Some("backward") => TRAINED.contains(&workload.name),
        _ => workload.name != "odd",
    };
    let mut args = Args {
        workloads: workloads.into_iter().filter(usual).collect(),
        peers: None,
        threads: support::thread_counts(),
        seconds: 1.0,
        markdown: false,
        json: None,
        record: None,
        beside: vec![Neighbour::Nothing],
        pictures: "target/pictures".into(),
        python: concat!(env!("CARGO_MANIFEST_DIR"), "/target/python/bin/python").into(),
        model: concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/models/all-MiniLM-L6-v2").into(),
        elements: vec![Elements::F32],
    };
    while let Some(flag) = words.next() {
        match flag.as_str() {
            "--help" | "-h" => return Ok(Command::Help),
            "--check" => args.seconds = 0.0,
            "--markdown" => args.markdown = true,
            _ => {
                if !VALUED.contains(&flag.as_str()) {
                    return Err(format!("{flag}: unknown; --help lists what there is").into());
                }
                let value = words.next().ok_or_else(|| format!("{flag}: needs a value"))?;
                args.set(&flag, value).map_err(|e| format!("{flag}: {e}"))?;
            }
        }
    }
    let known = known_elements(first.as_deref());
    match args.elements.iter().find(|elements| !known.contains(elements)) {
        Some(other) => Err(format!("--elements: not {} here", other.name()).into()),
        None => Ok(command(args)),
    }
}

/// Elements that a command computes on.
fn known_elements(command: Option<&str>) -> &'static [Elements] {
    match command {
        Some("embed") => &[Elements::F32],
        Some("backward") => &[Elements::F32, Elements::Bf16],
        _ => &Elements::ALL,
    }
}

const PARTS: [Part; 3] = [Part::Attention, Part::Gradients, Part::Embeddings];

/// Workloads of `backward`, unless others are named.
const TRAINED: [&str; 4] = ["bert-512", "gpt2-1024-causal", "long-4096", "llama-2048-gqa"];

const VALUED: [&str; 11] = [
    "--workload",
    "--peer",
    "--threads",
    "--seconds",
    "--json",
    "--record",
    "--beside",
    "--pictures",
    "--python",
    "--model",
    "--elements",
];

impl Args {
    fn set(&mut self, flag: &str, value: String) -> Result<()> {
        let parts: Vec<&str> = value.split(',').collect();
        match flag {
            "--workload" => {
                let meant = |workload: &Workload| parts.iter().any(|part| workload.name.contains(part));
                self.workloads = workloads::all().filter(meant).collect();
                if self.workloads.is_empty() {
                    let all: Vec<_> = workloads::named().map(|workload| workload.name).collect();
                    return Err(format!("none is called {value}, only {}", all.join(", ")).into());
                }
            }
            "--peer" => self.peers = Some(parts.iter().map(|&part| part.to_owned()).collect()),
            "--threads" => {
                let count = |part: &&str| part.parse().ok().filter(|&n: &usize| n > 0 && n <= 1024);
                let counts: Option<_> = parts.iter().map(count).collect();
                self.threads = counts.ok_or("expected numbers from 1")?;
            }
            "--seconds" => {
                let seconds = value.parse().ok().filter(|s: &f64| s.is_finite() && *s > 0.0);
                self.seconds = seconds.ok_or("expected a positive number")?;
            }
            "--json" => self.json = Some(value.into()),
            "--record" => self.record = Some(value.into()),
            "--beside" => {
                let named = |part: &&str| Neighbour::ALL.into_iter().find(|neighbour| neighbour.name() == *part);
                let neighbours: Option<_> = parts.iter().map(named).collect();
                self.beside = neighbours.ok_or("expected some of nothing, memory")?;
            }
            "--pictures" => self.pictures = value.into(),
            "--python" => self.python = value.into(),
            "--elements" => {
                let named = |part: &&str| Elements::ALL.into_iter().find(|elements| elements.name() == *part);
                let elements: Option<_> = parts.iter().map(named).collect();
                self.elements = elements.ok_or("expected some of f32, bf16, f16, int8")?;
            }
            _ => self.model = value.into(),
        }
        Ok(())
    }

    /// Those of some peers that are wanted; the first, ours, always is.
    pub(crate) fn choose(&self, all: &[Entry]) -> Result<Vec<Entry>> {
        let Some(names) = &self.peers else { return Ok(all.to_vec()) };
        if let Some(unknown) = names.iter().find(|name| all.iter().all(|entry| entry.name != **name)) {
            let known: Vec<_> = all.iter().map(|entry| entry.name).collect();
            return Err(format!("--peer: none is called {unknown}, only {}", known.join(", ")).into());
        }
        let wanted = |(n, entry): &(usize, &Entry)| *n == 0 || names.iter().any(|name| name == entry.name);
        Ok(all.iter().enumerate().filter(wanted).map(|(_, entry)| *entry).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::PEERS;

    fn attention(line: &str) -> Result<Args> {
        match parse(line.split_whitespace().map(str::to_owned))? {
            Command::Attention(args) | Command::Sweep(args) | Command::Embed(args) | Command::Backward(args) => {
                Ok(args)
            }
            other => Err(format!("{other:?}").into()),
        }
    }

    #[test]
    fn words() {
        let args = attention("--workload bert,decode --threads 1,2 --seconds 0.5 --peer unfused").unwrap();
        let names: Vec<_> = args.workloads.iter().map(|workload| workload.name).collect();
        assert_eq!(names, ["bert-512", "bert-b8-128", "decode-4k", "decode-16k"]);
        let latent = attention("--workload mla").unwrap().workloads;
        assert_eq!(latent.iter().map(|workload| workload.name).collect::<Vec<_>>(), ["mla-4k"]);
        assert_eq!((args.threads.as_slice(), args.seconds), ([1, 2].as_slice(), 0.5));
        let peers: Vec<_> = args.choose(PEERS).unwrap().iter().map(|entry| entry.name).collect();
        assert_eq!(peers, ["sdpa", "unfused"]);
        assert!(attention("").unwrap().workloads.iter().all(|workload| workload.name != "odd"));
        assert!(matches!(parse(["embed".to_owned()]).unwrap(), Command::Embed(_)));
        assert!(attention("sweep").unwrap().workloads.iter().all(|workload| workload.name.starts_with("length-")));
        let args = attention("backward --elements bf16").unwrap();
        assert_eq!((args.workloads.len(), args.elements), (4, vec![Elements::Bf16]));
        assert_eq!(attention("--elements f32,bf16,f16,int8").unwrap().elements, Elements::ALL);
        assert_eq!(attention("").unwrap().beside, [Neighbour::Nothing]);
        assert_eq!(attention("--beside nothing,memory").unwrap().beside, Neighbour::ALL);
        for bad in [
            "--beside disk",
            "backward --elements f8",
            "backward --elements f16",
            "embed --elements bf16",
            "--workload nobody",
            "--threads 0",
            "--seconds -1",
            "--what",
            "--json",
            "embed --threads x",
        ] {
            assert!(attention(bad).is_err(), "{bad}");
        }
        assert!(attention("--peer nobody").unwrap().choose(PEERS).is_err());
    }
}
