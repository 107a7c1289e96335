//! What the kernels' doc comments say is read in this crate's documentation, by people who have no kernels.

use std::path::{Path, PathBuf};

/// Every file of the kernels, with its text.
fn kernels() -> Vec<(PathBuf, String)> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/src")];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the kernels' sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let text = std::fs::read_to_string(&path).expect("a source");
                files.push((path, text));
            }
        }
    }
    assert!(files.len() > 50, "only {} files", files.len());
    files
}

/// Their examples would not compile for whoever copies them; those of this crate stand beside its `pub use`.
#[test]
fn the_kernels_have_no_examples_of_their_own() {
    for (path, text) in kernels() {
        let mut open = false;
        for (n, line) in text.lines().enumerate().map(|(n, line)| (n + 1, line.trim_start())) {
            let Some(words) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else { continue };
            assert!(!words.contains("sdpa_kernels"), "{}:{n}: {line}", path.display());
            if let Some(language) = words.trim_start().strip_prefix("```") {
                assert!(open || language == "text", "{}:{n}: {line}", path.display());
                open = !open;
            }
        }
    }
}

/// What this crate shows of the kernels.
fn shown() -> Vec<String> {
    let mut names = Vec::new();
    for file in ["src/kernels.rs", "src/layers.rs", "src/lib.rs"] {
        let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect("a source");
        for part in text.split("pub use sdpa_kernels::").skip(1) {
            let part = part.split(';').next().unwrap_or_default();
            let words = part.split(|c: char| !c.is_alphanumeric() && c != '_');
            names.extend(words.filter(|word| !word.is_empty() && *word != "probe").map(str::to_owned));
        }
    }
    assert!(names.len() > 20 && names.iter().any(|name| name == "View"), "{names:?}");
    names
}

/// Those of the kernels' files that hold it, without their tests.
fn files_shown() -> Vec<(PathBuf, String)> {
    let kinds = ["struct", "enum", "trait", "fn"];
    let items: Vec<_> = shown().iter().flat_map(|name| kinds.map(|kind| format!("pub {kind} {name}"))).collect();
    let mut files = kernels();
    files.iter_mut().for_each(|(_, text)| text.truncate(text.find("#[cfg(test)]").unwrap_or(text.len())));
    files.retain(|(_, text)| items.iter().any(|item| text.contains(item)));
    assert!(files.len() > 5, "only {} files", files.len());
    files
}

/// The functions of a file that are seen from outside, from their names on.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    // A block ends at the margin.
    text.split("\n}\n").flat_map(|block| {
        let of_trait = |line: &str| line.starts_with("pub trait") || line.starts_with("impl") && line.contains(" for ");
        let mark = if block.lines().any(of_trait) { "\n    fn " } else { "pub fn " };
        block.split(mark).skip(1)
    })
}

/// In another crate's documentation an argument that is taken apart where it is declared, or not used, has no name.
#[test]
fn arguments_have_names() {
    let mut seen = 0;
    for (path, text) in files_shown() {
        for function in functions(&text) {
            let signature = function.split('{').next().and_then(|text| text.split(";\n").next()).unwrap_or_default();
            let (name, arguments) = signature.split_once('(').expect("arguments");
            // What is before a colon, other than a path's, is a name or the end of a pattern.
            let arguments = arguments.replace("::", "");
            let mut parts: Vec<_> = arguments.split(": ").collect();
            parts.pop();
            for part in parts {
                let word = part.rsplit([' ', '(']).next().unwrap_or_default();
                let is_name = word != "_" && word.chars().all(|c| c.is_alphanumeric() || c == '_');
                assert!(is_name, "{}: {name}: {word}", path.display());
            }
            seen += 1;
        }
    }
    assert!(seen > 50, "only {seen} functions");
}

/// A link to what this crate does not show is no link.
#[test]
fn links_are_to_what_is_shown() {
    let (names, mut links) = (shown(), 0);
    for (path, text) in files_shown() {
        let mut comment = String::new();
        for line in text.lines().map(str::trim_start) {
            if let Some(words) = line.strip_prefix("///") {
                comment += words;
                continue;
            }
            if line.starts_with("#[") {
                continue;
            }
            let comment = std::mem::take(&mut comment);
            if !line.starts_with("pub ") {
                continue;
            }
            for link in comment.split("[`").skip(1) {
                let (link, after) = link.split_once("`]").expect("the end of a link");
                let path_given = after.strip_prefix('(').and_then(|after| after.split(')').next());
                let target = path_given.unwrap_or(link).trim_start_matches("crate::");
                let first = target.split("::").next().unwrap_or_default();
                let known = first == "Self" || names.iter().any(|name| name == first);
                assert!(known, "{}: [`{link}`] of {line}", path.display());
                links += 1;
            }
        }
    }
    assert!(links > 10, "only {links} links");
}
