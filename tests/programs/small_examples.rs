//! The small examples as their users meet them: what is wrong with a command line is said before any work, in one line,
//! with exit status 2.

use crate::temporary_folder::TemporaryFolder;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const DRAWING: [&str; 5] = ["generate", "heatmap", "alignment", "decoder_step", "guide"];
const PRINTING: [&str; 4] = ["steps", "dictionary", "functions", "ndarray_heads"];

/// Runs a program elsewhere than here: what it leaves behind is found there.
fn run(program: &Path, from: &TemporaryFolder, args: &[&OsStr]) -> Output {
    Command::new(program).args(args).current_dir(from.file("")).output().expect("the program runs")
}

/// What is said by a program that refuses, without its name.
fn refusal(name: &str, from: &TemporaryFolder, args: &[&OsStr]) -> String {
    let refused = run(&crate::program::build(name), from, args);
    let said = String::from_utf8(refused.stderr).expect("UTF-8");
    assert_eq!((refused.status.code(), said.lines().count()), (Some(2), 1), "{name} {args:?}: {said}");
    assert!(refused.stdout.is_empty(), "{name} {args:?}: {}", String::from_utf8_lossy(&refused.stdout));
    said.strip_prefix(&format!("{name}: ")).expect("the program's name").trim_end().to_owned()
}

#[test]
fn unknown_words_are_refused() {
    let folder = TemporaryFolder::new("small-words");
    for name in DRAWING.iter().chain(&PRINTING) {
        for flag in ["--quik", "-q", "--quick=1"] {
            let said = refusal(name, &folder, &[flag.as_ref()]);
            assert_eq!(said, format!("{flag}: unknown flag; --help lists them"));
        }
    }
    for name in DRAWING {
        let said = refusal(name, &folder, &["a", "b"].map(OsStr::new));
        assert_eq!(said, "one folder at a time, but got a and b");
    }
    for name in PRINTING {
        assert_eq!(refusal(name, &folder, &["a".as_ref()]), "a: there is nothing to name; see --help");
    }
    let left: Vec<_> = std::fs::read_dir(folder.file("")).expect("the folder").collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn folders_that_cannot_be_written_to_are_refused() {
    let folder = TemporaryFolder::new("small-folders");
    let file = folder.file("file");
    std::fs::write(&file, "").expect("a file");
    let mut places = vec![file.clone(), file.join("below")];
    if cfg!(target_os = "linux") {
        // A folder that is there and takes no files, whoever asks.
        places.push(PathBuf::from("/proc"));
    }
    for name in DRAWING {
        for place in &places {
            let said = refusal(name, &folder, &[place.as_os_str()]);
            let start = format!("{}: not a folder that can be written to: ", place.display());
            assert!(said.starts_with(&start), "{name}: {said}");
        }
    }
}

#[test]
fn help_is_printed() {
    let folder = TemporaryFolder::new("small-help");
    for name in DRAWING.iter().chain(&PRINTING) {
        let program = crate::program::build(name);
        for args in [&["--help"][..], &["-h"], &["--nonsense", "--help"]] {
            let args: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
            let help = run(&program, &folder, &args);
            let text = String::from_utf8(help.stdout).expect("UTF-8");
            assert_eq!((help.status.code(), help.stderr), (Some(0), Vec::new()), "{name} {args:?}");
            let pictures = if DRAWING.contains(name) { " [FOLDER]\n" } else { "\n" };
            assert!(text.contains(&format!("\nUsage: {name} [OPTIONS]{pictures}")), "{text}");
            assert_eq!(text.contains("--quick"), *name == "generate", "{text}");
        }
    }
}

/// Pictures go where they are told to, and nothing else is left there.
#[test]
fn a_new_folder_is_made() {
    let folder = TemporaryFolder::new("small-new");
    let ran = run(&crate::program::build("heatmap"), &folder, &["some/new".as_ref()]);
    assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
    let written = std::fs::read_dir(folder.file("some/new")).expect("the folder");
    let mut names: Vec<_> = written.map(|entry| entry.expect("a file").file_name().into_string().unwrap()).collect();
    names.sort();
    let drawn = ["causal-heads", "causal", "cross-heads", "cross", "self-heads", "self"];
    let expected: Vec<_> =
        drawn.iter().flat_map(|what| ["png", "svg"].map(|e| format!("heatmap-{what}.{e}"))).collect();
    assert_eq!(names, expected);
}
