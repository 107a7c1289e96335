//! The command line of the small programs: flags, `--help`, and where pictures go. What is wrong with it is said before
//! any work: a line on standard error, exit status 2.
#![allow(dead_code, reason = "every program compiles this module and uses its part of it")]

#[path = "../compare/failure.rs"]
mod failure;
mod folder;

pub(crate) use failure::Refused;

use failure::Result;
use folder::try_writing;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit status if an argument or the folder is wrong.
const REFUSED: u8 = 2;
/// Folder of pictures unless the command line names one.
const FOLDER: &str = "target/pictures";

/// A program and what its command line may say.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    /// Description of the program, in a line.
    pub(crate) about: &'static str,
    /// Flags, each with what it does; `--help` aside.
    pub(crate) flags: &'static [(&'static str, &'static str)],
    pub(crate) output: Output,
}

/// Files that a program writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// To standard output alone: there is no folder to name.
    Text,
    /// Pictures too.
    Pictures,
    /// Pictures too, to the usual folder: words that are no flags are a text.
    PicturesOfText,
}

/// Words of the command line.
pub(crate) struct Given {
    folder: PathBuf,
    flags: Vec<OsString>,
    text: Vec<OsString>,
}

impl Given {
    /// Returns the folder of the pictures.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the words that are no flags, with spaces between them.
    pub(crate) fn text(&self) -> String {
        self.text.join(OsStr::new(" ")).to_string_lossy().into_owned()
    }

    /// Returns true if this flag was given.
    pub(crate) fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|given| given == flag)
    }
}

impl Program {
    /// Reads the command line, makes the folder, and works.
    pub(crate) fn run(&self, work: impl FnOnce(&Given) -> std::result::Result<(), Box<dyn Error>>) -> ExitCode {
        let words: Vec<OsString> = std::env::args_os().skip(1).collect();
        if words.iter().any(|word| word == "--help" || word == "-h") {
            // A reader that has seen enough and hung up is no failure.
            let _ = std::io::stdout().write_all(self.help().as_bytes());
            return ExitCode::SUCCESS;
        }
        match self.read(words) {
            Ok(given) => match work(&given) {
                Ok(()) => ExitCode::SUCCESS,
                Err(e) if e.is::<Refused>() => self.complain(ExitCode::from(REFUSED), &e),
                Err(e) => self.complain(ExitCode::FAILURE, &e),
            },
            Err(refused) => self.complain(ExitCode::from(REFUSED), &refused),
        }
    }

    fn read(&self, words: Vec<OsString>) -> Result<Given> {
        let (mut folders, mut flags, mut text) = (Vec::new(), Vec::new(), Vec::new());
        for word in words {
            let is_flag = word.len() > 1 && word.as_encoded_bytes().starts_with(b"-");
            let known = self.flags.iter().any(|&(flag, _)| word == flag);
            match (is_flag, self.output) {
                (true, _) if known => flags.push(word),
                (true, _) => {
                    return Err(Refused::new(format_args!("{}: unknown flag; --help lists them", word.display())));
                }
                (false, Output::PicturesOfText) => text.push(word),
                (false, Output::Pictures) => folders.push(PathBuf::from(word)),
                (false, Output::Text) => {
                    return Err(Refused::new(format_args!("{}: there is nothing to name; see --help", word.display())));
                }
            }
        }
        if let [first, second, ..] = &folders[..] {
            let (first, second) = (first.display(), second.display());
            return Err(Refused::new(format_args!("one folder at a time, but got {first} and {second}")));
        }
        let folder = folders.pop().unwrap_or_else(|| PathBuf::from(FOLDER));
        if self.output != Output::Text {
            std::fs::create_dir_all(&folder).and_then(|()| try_writing(&folder)).map_err(|e| {
                Refused::new(format_args!("{}: not a folder that can be written to: {e}", folder.display()))
            })?;
        }
        Ok(Given { folder, flags, text })
    }

    fn help(&self) -> String {
        let folder = format!("where pictures go (default: {FOLDER})");
        let (usage, folder) = match self.output {
            Output::Pictures => (" [FOLDER]", Some(("FOLDER", folder.as_str()))),
            Output::PicturesOfText => (" [TEXT]...", Some(("TEXT", "to translate; - for lines of standard input"))),
            Output::Text => ("", None),
        };
        let mut text = format!("{}\n\nUsage: {} [OPTIONS]{usage}\n\n", self.about, self.name);
        for (word, what) in folder.into_iter().chain(self.flags.iter().copied()).chain([("--help", "this")]) {
            let _ = writeln!(text, "  {word:<9} {what}");
        }
        text + "\nExit status: 0 if all went well, 2 if an argument or the folder is wrong.\n"
    }

    fn complain(&self, status: ExitCode, why: &dyn fmt::Display) -> ExitCode {
        eprintln!("{}: {why}", self.name);
        status
    }
}
