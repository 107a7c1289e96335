//! Command line.

use crate::Result;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

pub(crate) const HELP: &str = "\
Asks a server on this machine at random times and measures its answers.

Usage: load [OPTIONS] [FOLDER]

  FOLDER             where the picture goes (default: target/pictures)
  --url URL          the server (default: http://127.0.0.1:8087)
  --seconds N        length of a run (default: 20)
  --loads A,B,...    loads, as fractions of the measured capacity (default: 0.2,0.4,0.6,0.8,1,1.5,3)
  --minutes N        one run of N minutes instead, which is judged
  --rate X           its load, as a fraction of the capacity (default: 0.8)
  --embeddings X     share of requests that are embeddings (default: 0.2)
  --words A,B,...    words of texts to embed (default: those of a grammar)
  --prefix FILE      text that every prompt begins with
  --seed N           of arrivals and texts (default: 1)
  --help             this

Exit status: 0; 1 if the server cannot be asked, or a long run fails its bars; 2 if an argument is wrong.
";

/// Longest of a long run, in minutes, and of another, in seconds.
const MOST_MINUTES: u64 = 60;
const MOST_SECONDS: u64 = 600;

pub(crate) struct Arguments {
    pub(crate) url: String,
    pub(crate) length: Duration,
    pub(crate) loads: Vec<f64>,
    pub(crate) minutes: Option<u64>,
    pub(crate) rate: f64,
    pub(crate) embeddings: f64,
    pub(crate) words: Option<Vec<String>>,
    pub(crate) prefix: String,
    pub(crate) seed: u64,
    pub(crate) folder: PathBuf,
}

impl Arguments {
    /// Reads the command line; `None` if it asks for help.
    pub(crate) fn read(mut words: impl Iterator<Item = String>) -> Result<Option<Self>> {
        let mut arguments = Self {
            url: "http://127.0.0.1:8087".to_owned(),
            length: Duration::from_secs(20),
            loads: vec![0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 3.0],
            minutes: None,
            rate: 0.8,
            embeddings: 0.2,
            words: None,
            prefix: String::new(),
            seed: 1,
            folder: "target/pictures".into(),
        };
        while let Some(flag) = words.next() {
            if flag == "--help" || flag == "-h" {
                return Ok(None);
            }
            if !flag.starts_with("--") {
                arguments.folder = flag.into();
                continue;
            }
            let value = words.next().ok_or_else(|| format!("{flag}: needs a value, but is the last word"))?;
            arguments.set(&flag, value)?;
        }
        Ok(Some(arguments))
    }

    fn set(&mut self, flag: &str, value: String) -> Result<()> {
        match flag {
            "--url" => self.url = local(value)?,
            "--seconds" => self.length = Duration::from_secs(at_most(flag, &value, MOST_SECONDS)?),
            "--loads" => self.loads = value.split(',').map(|load| positive(flag, load)).collect::<Result<_>>()?,
            "--minutes" => self.minutes = Some(at_most(flag, &value, MOST_MINUTES)?),
            "--rate" => self.rate = positive(flag, &value)?,
            "--embeddings" => {
                self.embeddings = value
                    .parse()
                    .ok()
                    .filter(|share| (0.0..=1.0).contains(share))
                    .ok_or_else(|| format!("{flag}: {value}, but must be from 0 to 1"))?;
            }
            "--words" => self.words = Some(value.split(',').map(str::to_owned).collect()),
            "--prefix" => {
                let text = std::fs::read_to_string(&value).map_err(|e| format!("{value}: {e}"))?;
                self.prefix = text.strip_suffix('\n').unwrap_or(&text).to_owned();
            }
            "--seed" => self.seed = at_most(flag, &value, u64::MAX)?,
            _ => return Err(format!("{flag}: unknown flag; --help lists them").into()),
        }
        Ok(())
    }
}

/// An address on this machine: nothing else is to be flooded.
fn local(url: String) -> Result<String> {
    let host = url.strip_prefix("http://").and_then(|rest| rest.rsplit_once(':')).map(|(host, _)| host);
    let loopback = |host: &str| IpAddr::from_str(host.trim_matches(['[', ']'])).is_ok_and(|ip| ip.is_loopback());
    match host {
        Some(host) if loopback(host) => Ok(url),
        _ => Err(format!("--url: {url}, but must be on this machine, as in http://127.0.0.1:8087").into()),
    }
}

fn positive(flag: &str, word: &str) -> Result<f64> {
    let number = word.parse().ok().filter(|x: &f64| *x > 0.0 && x.is_finite());
    number.ok_or_else(|| format!("{flag}: {word}, but must be a positive number").into())
}

fn at_most(flag: &str, word: &str, most: u64) -> Result<u64> {
    let number: u64 = word.parse().map_err(|_| format!("{flag}: {word}, but must be a whole number"))?;
    if number > most { Err(format!("{flag}: {number}, but must be at most {most}").into()) } else { Ok(number) }
}
