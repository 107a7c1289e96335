//! The small examples on layers; most draw.

use crate::small::{self, refusal, run};
use crate::temporary_folder::TemporaryFolder;
use std::path::PathBuf;

const DRAWING: [&str; 5] = ["generate", "heatmap", "alignment", "decoder_step", "guide"];
const PRINTING: [&str; 2] = ["steps", "dictionary"];

#[test]
fn unknown_words_are_refused() {
    small::refuse_unknown_words(&DRAWING, &PRINTING);
}

#[test]
fn help_is_printed() {
    small::print_help(&DRAWING, &PRINTING);
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
