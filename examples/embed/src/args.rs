//! The command line.

use crate::encoder::MODEL;
use crate::failure::{Refused, Result};
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

/// More threads than any machine this is meant for has, and few enough to start.
const MAX_THREADS: usize = 1024;

pub(crate) const HELP: &str = "\
Embeds texts with a sentence encoder of the BERT family and shows how similar they are.

Usage: embed [OPTIONS] [TEXT]...

  --model DIR      folder with config.json, tokenizer.json and model.safetensors; the pooling is that of
                   1_Pooling/config.json, else the mean (default: target/models/all-MiniLM-L6-v2)
  --file FILE      one text a line, after those given as arguments
                   (with no text and no file: a few sentences)
  --max-tokens N   cut texts to N tokens, [CLS] and [SEP] included (default: the model's positions)
  --threads N      on N threads (default: all)
  --json           one JSON object a line for each text, with its embedding, instead of similarities
  --help           this

Up to twelve texts are compared with each other, by the cosine of their embeddings; of more, those nearest to the first
are shown.

Exit status: 0 if all went well, 2 if an argument, a file or the model is wrong.
";

/// What the program was asked to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Command {
    Help,
    Embed(Args),
}

/// What to embed, and how.
#[derive(Debug, PartialEq)]
pub(crate) struct Args {
    pub(crate) model: PathBuf,
    pub(crate) texts: Vec<String>,
    pub(crate) file: Option<PathBuf>,
    pub(crate) max_tokens: Option<NonZeroUsize>,
    pub(crate) threads: Option<NonZeroUsize>,
    pub(crate) format: Format,
}

/// What goes to standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Format {
    #[default]
    Similarities,
    Json,
}

/// Reads the arguments after the program's name.
pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Command> {
    let (mut model, mut file, mut max_tokens, mut threads) = (None, None, None, None);
    let (mut texts, mut format) = (Vec::new(), Format::default());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let text = utf8("a text", word)?;
        let (flag, attached) = match text.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (flag, Some(OsString::from(value))),
            _ => (text.as_str(), None),
        };
        match flag {
            "--help" | "-h" => return Ok(Command::Help),
            "--json" if attached.is_some() => return Err(Refused::new("--json: takes no value")),
            "--json" => format = Format::Json,
            "--model" | "--file" | "--max-tokens" | "--threads" => {
                let value = attached.or_else(|| words.next());
                let value =
                    value.ok_or_else(|| Refused::new(format_args!("{flag}: needs a value, but is the last word")))?;
                match flag {
                    "--model" => once(flag, &mut model, PathBuf::from(value))?,
                    "--file" => once(flag, &mut file, PathBuf::from(value))?,
                    "--max-tokens" => once(flag, &mut max_tokens, number(flag, value, usize::MAX)?)?,
                    _ => once(flag, &mut threads, number(flag, value, MAX_THREADS)?)?,
                }
            }
            // After it, texts may begin with dashes.
            "--" if attached.is_none() => {
                for word in words.by_ref() {
                    texts.push(utf8("a text", word)?);
                }
            }
            _ if flag.starts_with("--") => {
                return Err(Refused::new(format_args!("{flag}: unknown flag; --help lists them, -- ends them")));
            }
            _ => texts.push(text),
        }
    }
    let model = model.unwrap_or_else(|| PathBuf::from(MODEL));
    Ok(Command::Embed(Args { model, texts, file, max_tokens, threads, format }))
}

fn once<T>(flag: &str, slot: &mut Option<T>, value: T) -> Result<()> {
    if slot.replace(value).is_some() {
        return Err(Refused::new(format_args!("{flag}: given twice")));
    }
    Ok(())
}

fn utf8(what: &str, word: OsString) -> Result<String> {
    word.into_string().map_err(|word| Refused::new(format_args!("{what}: {} is not UTF-8", word.display())))
}

fn number(flag: &str, value: OsString, most: usize) -> Result<NonZeroUsize> {
    let text = utf8(flag, value)?;
    let number = NonZeroUsize::from_str(&text).ok().filter(|n| n.get() <= most);
    number.ok_or_else(|| {
        let range = if most == usize::MAX { "of at least 1".to_owned() } else { format!("from 1 to {most}") };
        Refused::new(format_args!("{flag}: {text}, but must be a whole number {range}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> Result<Args> {
        match parse(words.iter().map(OsString::from))? {
            Command::Embed(args) => Ok(args),
            Command::Help => panic!("help"),
        }
    }

    #[test]
    fn arguments_are_read() {
        let none = Args {
            model: MODEL.into(),
            texts: vec![],
            file: None,
            max_tokens: None,
            threads: None,
            format: Format::Similarities,
        };
        assert_eq!(args(&[]).unwrap(), none);
        let all = args(&[
            "a",
            "--model",
            "m",
            "--file=f",
            "--max-tokens=9",
            "--threads",
            "2",
            "b = c",
            "--json",
            "--",
            "--x",
        ]);
        assert_eq!(
            all.unwrap(),
            Args {
                model: "m".into(),
                texts: ["a", "b = c", "--x"].map(str::to_owned).to_vec(),
                file: Some("f".into()),
                max_tokens: NonZeroUsize::new(9),
                threads: NonZeroUsize::new(2),
                format: Format::Json,
            }
        );
        assert_eq!(args(&["", "-"]).unwrap().texts, ["", "-"]);
        assert_eq!(parse(["--help".into()]).unwrap(), Command::Help);
    }

    #[test]
    fn wrong_ones_are_named() {
        for (words, message) in [
            (&["--modle", "x"][..], "--modle: unknown flag; --help lists them, -- ends them"),
            (&["--file"], "--file: needs a value, but is the last word"),
            (&["--file", "a", "--file", "b"], "--file: given twice"),
            (&["--threads", "0"], "--threads: 0, but must be a whole number from 1 to 1024"),
            (&["--max-tokens=x"], "--max-tokens: x, but must be a whole number of at least 1"),
            (&["--json=1"], "--json: takes no value"),
        ] {
            assert_eq!(args(words).unwrap_err().to_string(), message);
        }
    }
}
