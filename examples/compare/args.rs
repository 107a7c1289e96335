//! The command line.

// The fuzzer compiles this file from elsewhere.
#[path = "args/values.rs"]
mod values;

pub(crate) use values::wrong;

use crate::failure::{Refused, Result};
use crate::settings::{Groups, Settings};
use crate::sweep::{self, Sweep};
use sdpa::{Causality, Dtype, Isa, Point, Shape};
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use values::{alignment, dtype, groups, isa, number, only, point, precision, shape, threads, window};

/// What the program was asked to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Command {
    Help,
    Compare(Box<Args>),
    Backward(Box<Args>),
    Sweep(Box<Args>, Sweep),
}

/// How to compare, and what.
#[derive(Debug, PartialEq)]
pub(crate) struct Args {
    pub(crate) source: Source,
    pub(crate) settings: Settings,
    /// Meaning of the lists of selected keys of the file.
    pub(crate) selected: Option<Groups>,
    /// Element type of queries, keys and values; otherwise that of the file, or f32.
    pub(crate) dtype: Option<Dtype>,
    pub(crate) only: Option<Only>,
    pub(crate) isa: Option<Isa>,
    pub(crate) threads: Option<NonZeroUsize>,
    pub(crate) repeat: Option<NonZeroUsize>,
    pub(crate) output: Option<PathBuf>,
    /// What to write besides the output and its log-sum-exp.
    pub(crate) points: Vec<Point>,
    pub(crate) explain: bool,
    pub(crate) format: Format,
}

/// Where the tensors come from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Source {
    /// The paragraph in the repository.
    Paragraph,
    /// The user's file.
    File(PathBuf),
    /// Random data.
    Random(Shape),
}

/// The one path to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Only {
    Fused,
    Naive,
    Unfused,
}

/// What goes to standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Table,
    Json,
}

/// Reads the arguments after the program's name.
pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Command> {
    let mut given = Given::default();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        // Only file names may be something else than UTF-8.
        let Some(text) = word.to_str().filter(|text| text.starts_with('-') && text.len() > 1) else {
            given.file(PathBuf::from(word))?;
            continue;
        };
        let (flag, attached) = match text.split_once('=') {
            Some((flag, value)) => (flag, Some(OsString::from(value))),
            None => (text, None),
        };
        match flag {
            "--help" | "-h" => return Ok(Command::Help),
            "--causal" | "--weights" | "--backward" | "--explain" | "--json" if attached.is_some() => {
                return Err(Refused::new(format_args!(
                    "{flag}: takes no value, but got {}",
                    text[flag.len()..].trim_start_matches('=')
                )));
            }
            "--sweep" => {
                given.sweep = true;
                attached.map_or(Ok(()), |folder| given.file(PathBuf::from(folder)))?;
            }
            "--causal" => given.settings.causality = Causality::Causal,
            "--weights" => given.weights = true,
            "--backward" => given.backward = true,
            "--explain" => given.explain = true,
            "--json" => given.json = true,
            _ => {
                let Some(&flag) = VALUED.iter().find(|&&known| known == flag) else {
                    return Err(Refused::new(format_args!("{flag}: unknown flag; --help lists them")));
                };
                let value = attached
                    .or_else(|| words.next())
                    .ok_or_else(|| Refused::new(format_args!("{flag}: needs a value, but is the last word")))?;
                given.set(flag, value)?;
            }
        }
    }
    given.finish()
}

/// Flags that take a value.
const VALUED: [&str; 16] = [
    "--shape",
    "--scale",
    "--align",
    "--window",
    "--softcap",
    "--selected",
    "--dtype",
    "--precision",
    "--isa",
    "--threads",
    "--only",
    "--repeat",
    "--output",
    "--scores",
    "--lengths",
    "--dims",
];

/// What has been read so far.
#[derive(Debug, Default)]
struct Given {
    file: Option<PathBuf>,
    shape: Option<Shape>,
    settings: Settings,
    selected: Option<Groups>,
    dtype: Option<Dtype>,
    only: Option<Only>,
    isa: Option<Isa>,
    threads: Option<NonZeroUsize>,
    repeat: Option<NonZeroUsize>,
    output: Option<PathBuf>,
    scores: Vec<Point>,
    weights: bool,
    backward: bool,
    explain: bool,
    json: bool,
    sweep: bool,
    lengths: Option<Vec<usize>>,
    dims: Option<Vec<usize>>,
    seen: Vec<&'static str>,
}

impl Given {
    fn file(&mut self, path: PathBuf) -> Result<()> {
        match &self.file {
            Some(first) => {
                let (first, second) = (first.display(), path.display());
                Err(Refused::new(format_args!("one file at a time, but got {first} and {second}")))
            }
            None => {
                self.file = Some(path);
                Ok(())
            }
        }
    }

    fn set(&mut self, flag: &'static str, value: OsString) -> Result<()> {
        // There are several points to write scores at.
        if self.seen.contains(&flag) && flag != "--scores" {
            return Err(Refused::new(format_args!("{flag}: given twice, the second time as {}", value.display())));
        }
        self.seen.push(flag);
        if flag == "--output" {
            self.output = Some(PathBuf::from(value));
            return Ok(());
        }
        let text = value.to_str().ok_or_else(|| wrong(flag, value.display(), "UTF-8"))?;
        if text.starts_with("--") {
            return Err(Refused::new(format_args!("{flag}: needs a value, but got the flag {text}")));
        }
        match flag {
            "--shape" => self.shape = Some(shape(text)?),
            "--scale" => self.settings.scale = Some(number(flag, text, "a number")?),
            "--window" => self.settings.window = Some(window(text)?),
            "--softcap" => self.settings.softcap = Some(number(flag, text, "a number")?),
            "--align" => self.settings.alignment = Some(alignment(text)?),
            "--selected" => self.selected = Some(groups(text)?),
            "--dtype" => self.dtype = Some(dtype(text)?),
            "--precision" => self.settings.precision = precision(text)?,
            "--isa" => self.isa = Some(isa(text)?),
            "--threads" => self.threads = Some(threads(text)?),
            "--scores" => match point(text)? {
                point if self.scores.contains(&point) => {
                    return Err(Refused::new(format_args!("--scores: {text} is given twice")));
                }
                point => self.scores.push(point),
            },
            "--lengths" => self.lengths = Some(sweep::sizes(flag, text, sweep::LONGEST)?),
            "--dims" => self.dims = Some(sweep::sizes(flag, text, sweep::WIDEST)?),
            "--repeat" => self.repeat = Some(number(flag, text, "a whole number of at least 1")?),
            _ => self.only = Some(only(text)?),
        }
        Ok(())
    }

    /// Whether a flag was given that [`Self::set`] keeps or that takes no value.
    fn has(&self, flag: &str) -> bool {
        match flag {
            "--causal" => self.settings.causality == Causality::Causal,
            "--weights" => self.weights,
            "--backward" => self.backward,
            "--explain" => self.explain,
            "--json" => self.json,
            _ => self.seen.contains(&flag),
        }
    }

    /// Refuses flags that do not go with `--backward`.
    fn check_backward(&self) -> Result<()> {
        let forward = ["--weights", "--scores", "--explain", "--precision", "--selected"];
        match forward.into_iter().find(|flag| self.backward && self.has(flag)) {
            Some(flag) => Err(Refused::new(format_args!("{flag}: is about the forward pass, but got --backward too"))),
            None => Ok(()),
        }
    }

    /// The sweep, if one is asked for; a file is then its folder.
    fn take_sweep(&mut self) -> Result<Option<Sweep>> {
        match self.sweep {
            true => {
                if let Some(flag) = sweep::OF_ONE_CALL.into_iter().find(|flag| self.has(flag)) {
                    return Err(Refused::new(format_args!("{flag}: is about one call, but --sweep makes many")));
                }
                Ok(Some(Sweep::new(self.file.take(), self.lengths.take(), self.dims.take())))
            }
            false => match ["--lengths", "--dims"].into_iter().find(|flag| self.has(flag)) {
                Some(flag) => Err(Refused::new(format_args!("{flag}: needs --sweep, but there is none"))),
                None => Ok(None),
            },
        }
    }

    fn take_source(&mut self) -> Result<Source> {
        match (self.file.take(), self.shape.take()) {
            (None, None) => Ok(Source::Paragraph),
            (Some(path), None) => Ok(Source::File(path)),
            (None, Some(shape)) => Ok(Source::Random(shape)),
            (Some(path), Some(_)) => {
                let path = path.display();
                Err(Refused::new(format_args!("a file or a shape, but got both: {path} and --shape")))
            }
        }
    }

    fn finish(mut self) -> Result<Command> {
        let sweep = self.take_sweep()?;
        let source = self.take_source()?;
        if let Some(only @ (Only::Naive | Only::Unfused)) = self.only {
            let path = only.name();
            let fused = ["--isa", "--precision", "--output", "--explain"];
            if let Some(flag) = fused.into_iter().find(|flag| self.has(flag)) {
                return Err(Refused::new(format_args!("{flag}: is about the fused path, but --only is {path}")));
            }
        }
        if self.json && self.explain {
            return Err(Refused::new("--explain: goes with the table, but got --json too"));
        }
        self.check_backward()?;
        let mut points = self.scores;
        if self.weights {
            points.push(Point::Weights);
        }
        if let (Some(&point), None) = (points.first(), &self.output) {
            let flag = if point == Point::Weights { "--weights" } else { "--scores" };
            return Err(Refused::new(format_args!(
                "{flag}: needs --output, where they are written, but there is none"
            )));
        }
        let args = Box::new(Args {
            source,
            settings: self.settings,
            selected: self.selected,
            dtype: self.dtype,
            only: self.only,
            isa: self.isa,
            threads: self.threads,
            repeat: self.repeat,
            output: self.output,
            points,
            explain: self.explain,
            format: if self.json { Format::Json } else { Format::Table },
        });
        Ok(match sweep {
            Some(sweep) => Command::Sweep(args, sweep),
            None if self.backward => Command::Backward(args),
            None => Command::Compare(args),
        })
    }
}

impl Only {
    fn name(self) -> &'static str {
        match self {
            Self::Fused => "fused",
            Self::Naive => "naive",
            Self::Unfused => "unfused",
        }
    }
}

#[cfg(test)]
#[path = "args_tests.rs"]
mod tests;
