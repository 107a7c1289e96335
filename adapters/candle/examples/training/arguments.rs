//! Command line of both examples.

use super::{Attend, Result};
use std::path::PathBuf;

/// Settings of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Arguments {
    pub(crate) extent: Extent,
    pub(crate) attend: Attend,
    /// Steps after which this run stops, to go on later.
    pub(crate) at_most: usize,
}

/// Length of a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// A few steps, to see that it works.
    Trial,
    /// From nothing to the end.
    Train,
    /// From the checkpoint to the end.
    Continue,
}

const HELP: &str = "\
  --train                   from nothing to the end, in place of the last checkpoint; without it a few steps, to see that it works
  --continue                from the checkpoint to the end
  --steps N                 stop after so many steps, to go on later with --continue
  --attention sdpa|candle   this crate's operation (the default), or matmul, softmax, matmul
  --help                    this

Checkpoints and pictures go to target/learned.";

impl Arguments {
    /// Folder of checkpoints and pictures. A few steps leave those of a whole training alone, and so does candle's attention.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        let part = match (self.extent, self.attend) {
            (Extent::Trial, _) => "trial",
            (_, Attend::Candle) => "candle",
            (_, Attend::Sdpa) => "",
        };
        PathBuf::from("target/learned").join(name).join(part)
    }

    /// Reads the command line; `None` if it asked for help, which has then been printed.
    pub(crate) fn read(about: &str) -> Result<Option<Self>> {
        let mut words = std::env::args().skip(1);
        let mut arguments = Self { extent: Extent::Trial, attend: Attend::Sdpa, at_most: usize::MAX };
        while let Some(word) = words.next() {
            match word.as_str() {
                "--help" | "-h" => {
                    println!("{about}\n\n{HELP}");
                    return Ok(None);
                }
                "--train" => arguments.extent = Extent::Train,
                "--continue" => arguments.extent = Extent::Continue,
                "--steps" => {
                    let number = words.next().unwrap_or_default();
                    let steps = number.parse().map_err(|_| format!("--steps: must be a number, but got {number:?}"))?;
                    arguments.at_most = steps;
                }
                "--attention" => match words.next().as_deref() {
                    Some("sdpa") => arguments.attend = Attend::Sdpa,
                    Some("candle") => arguments.attend = Attend::Candle,
                    other => {
                        let got = other.unwrap_or_default();
                        return Err(format!("--attention: must be sdpa or candle, but got {got:?}").into());
                    }
                },
                other => return Err(format!("{other}: unknown flag; --help lists them").into()),
            }
        }
        Ok(Some(arguments))
    }
}
