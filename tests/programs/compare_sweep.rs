//! What a sweep of the `compare` program leaves behind: a picture that opens and says what it shows, and every number.

use crate::program::run;
use crate::temporary_folder::TemporaryFolder;
use std::ffi::OsStr;

/// The least there is to time: two lengths, one head size, one run each.
const TINY: [&str; 8] = ["--sweep", "--lengths", "16,40", "--dims", "32", "--repeat", "1", "--isa=portable"];

#[test]
fn a_tiny_sweep_writes_its_files() {
    let folder = TemporaryFolder::new("sweep");
    let into = folder.file("new");
    let ran = run(TINY.map(OsStr::new).into_iter().chain([into.as_os_str()]));
    assert_eq!((ran.status.code(), ran.stderr), (Some(0), Vec::new()));
    let said = String::from_utf8(ran.stdout).expect("UTF-8");
    let read = |name: &str| {
        assert!(said.contains(&into.join(name).display().to_string()), "{said}");
        std::fs::read(into.join(name)).expect("the program has written it")
    };
    assert_eq!(read("sweep.png")[..8], *b"\x89PNG\r\n\x1a\n");
    let svg = String::from_utf8(read("sweep.svg")).expect("UTF-8");
    let svg = roxmltree::Document::parse(&svg).expect("a document");
    let texts: Vec<_> = svg.descendants().filter_map(|node| node.text()).collect();
    for label in ["head_dim 32, 1 thread", "naive", "unfused", "fused portable", "peak portable", "GFLOP/s", "16"] {
        assert!(texts.contains(&label), "{label}: {texts:?}");
    }
    let csv = String::from_utf8(read("sweep.csv")).expect("UTF-8");
    let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let heading = lines.next().expect("a heading");
    assert_eq!(heading[..6], ["head_dim", "length", "heads", "path", "isa", "threads"]);
    let rate = heading.iter().position(|name| *name == "gflops").expect("rates");
    let (mut lengths, mut paths) = (Vec::new(), Vec::new());
    for line in lines {
        assert_eq!(line.len(), heading.len(), "{line:?}");
        assert!(line[rate].parse::<f64>().expect("a number") > 0.0, "{line:?}");
        lengths.push(line[1].to_owned());
        paths.push(line[3].to_owned());
    }
    for (all, expected) in [(lengths, vec!["16", "40"]), (paths, vec!["fused", "naive", "unfused"])] {
        let distinct: std::collections::BTreeSet<_> = all.iter().map(String::as_str).collect();
        assert_eq!(distinct.into_iter().collect::<Vec<_>>(), expected);
    }
}

/// The element type and the precision of fused paths stand in the picture and in the last columns.
#[test]
fn sweeps_of_16_bits_say_so() {
    let folder = TemporaryFolder::new("sweep-types");
    let into = folder.file("new");
    let flags = ["--dtype", "bf16", "--precision", "native"].map(OsStr::new);
    let ran = run(TINY.map(OsStr::new).into_iter().chain(flags).chain([into.as_os_str()]));
    assert_eq!((ran.status.code(), ran.stderr), (Some(0), Vec::new()));
    let read = |name: &str| std::fs::read_to_string(into.join(name)).expect("the program has written it");
    assert!(read("sweep.svg").contains("fused paths in bf16, precision native"));
    let csv = read("sweep.csv");
    let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    assert!(lines.next().expect("a heading").ends_with(&["dtype", "precision"]));
    for line in lines {
        let numbers: &[&str] = if line[3] == "fused" { &["bf16", "native"] } else { &["f32", ""] };
        assert!(line.ends_with(numbers), "{line:?}");
    }
}

#[test]
fn a_folder_that_cannot_be_is_refused() {
    let folder = TemporaryFolder::new("sweep-refused");
    let file = folder.file("file");
    std::fs::write(&file, "").expect("a file");
    let ran = run(TINY.map(OsStr::new).into_iter().chain([file.as_os_str()]));
    let said = String::from_utf8(ran.stderr).expect("UTF-8");
    assert_eq!((ran.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.starts_with(&format!("compare: --sweep: {}: ", file.display())), "{said}");
}
