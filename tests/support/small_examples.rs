//! The small examples as their users meet them: what is wrong with a command line is said before any work, in one line,
//! with exit status 2.
#![allow(dead_code, reason = "compiled into the tests of two packages; one has no pictures")]

use crate::temporary_folder::TemporaryFolder;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output};

/// Runs a program elsewhere than here: what it leaves behind is found there.
pub(crate) fn run(program: &Path, from: &TemporaryFolder, args: &[&OsStr]) -> Output {
    Command::new(program).args(args).current_dir(from.file("")).output().expect("the program runs")
}

/// What is said by a program that refuses, without its name.
pub(crate) fn refusal(name: &str, from: &TemporaryFolder, args: &[&OsStr]) -> String {
    let refused = run(&crate::program::build(name), from, args);
    let said = String::from_utf8(refused.stderr).expect("UTF-8");
    assert_eq!((refused.status.code(), said.lines().count()), (Some(2), 1), "{name} {args:?}: {said}");
    assert!(refused.stdout.is_empty(), "{name} {args:?}: {}", String::from_utf8_lossy(&refused.stdout));
    said.strip_prefix(&format!("{name}: ")).expect("the program's name").trim_end().to_owned()
}

/// Unknown words are refused by programs that draw, and by those that print alone.
pub(crate) fn refuse_unknown_words(drawing: &[&str], printing: &[&str]) {
    let folder = TemporaryFolder::new("small-words");
    for name in drawing.iter().chain(printing) {
        for flag in ["--quik", "-q", "--quick=1"] {
            let said = refusal(name, &folder, &[flag.as_ref()]);
            assert_eq!(said, format!("{flag}: unknown flag; --help lists them"));
        }
    }
    for name in drawing {
        let said = refusal(name, &folder, &["a", "b"].map(OsStr::new));
        assert_eq!(said, "one folder at a time, but got a and b");
    }
    for name in printing {
        assert_eq!(refusal(name, &folder, &["a".as_ref()]), "a: there is nothing to name; see --help");
    }
    let left: Vec<_> = std::fs::read_dir(folder.file("")).expect("the folder").collect();
    assert!(left.is_empty(), "{left:?}");
}

/// `--help` is printed, whatever else is said.
pub(crate) fn print_help(drawing: &[&str], printing: &[&str]) {
    let folder = TemporaryFolder::new("small-help");
    for name in drawing.iter().chain(printing) {
        let program = crate::program::build(name);
        for args in [&["--help"][..], &["-h"], &["--nonsense", "--help"]] {
            let args: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
            let help = run(&program, &folder, &args);
            let text = String::from_utf8(help.stdout).expect("UTF-8");
            assert_eq!((help.status.code(), help.stderr), (Some(0), Vec::new()), "{name} {args:?}");
            let pictures = if drawing.contains(name) { " [FOLDER]\n" } else { "\n" };
            assert!(text.contains(&format!("\nUsage: {name} [OPTIONS]{pictures}")), "{text}");
            assert_eq!(text.contains("--quick"), *name == "generate", "{text}");
        }
    }
}
