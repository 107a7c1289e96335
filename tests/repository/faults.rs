//! Lists of `.ci/mutations`, which runs at night: what they name is there.

use std::path::Path;

fn text(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// What a fault takes the place of stands once in its file.
#[test]
fn faults_have_a_place() {
    let list = text("mutations/list.txt");
    let entries: Vec<&str> = list.split("\n= ").skip(1).collect();
    assert!(entries.len() > 100, "only {} faults", entries.len());
    for entry in entries {
        let line = |mark: &str| entry.lines().find_map(|line| line.strip_prefix(mark)).expect("a place");
        let (file, there) = (line("@ "), line("- "));
        assert_eq!(text(file).matches(there).count(), 1, "{entry}");
    }
}

/// Each line that excuses small faults is about a line of its file.
#[test]
fn excuses_are_of_something() {
    for line in text("mutations/harmless.txt").lines().filter(|line| line.contains(" | ")) {
        let (file, rest) = line.split_once(" | ").expect("a file");
        let there = rest.split(" | ").next().unwrap_or_default();
        assert!(text(file).contains(there), "{line}");
    }
}
