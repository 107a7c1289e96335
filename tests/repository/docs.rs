//! The documentation: what is public has an example that whoever copies it can compile. What the kernels' doc comments
//! say is read in the documentation of `sdpa` and `sdpa-layers`, by people who have no kernels.

use std::path::{Path, PathBuf};

/// Every file of a folder of the repository that has this extension, with its text.
pub(crate) fn sources(folder: &str, extension: &str) -> Vec<(PathBuf, String)> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                // What cargo builds, and what git keeps.
                if name != "target" && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|found| found == extension) {
                let text = std::fs::read_to_string(&path).expect("a source");
                files.push((path, text));
            }
        }
    }
    files
}

/// Every file of the kernels, with its text.
fn kernels() -> Vec<(PathBuf, String)> {
    let files = sources("kernels/src", "rs");
    assert!(files.len() > 50, "only {} files", files.len());
    files
}

/// Where the sources of the crates are that users see.
const CRATES: [&str; 2] = ["src", "layers/src"];

/// A file of a crate.
fn source(sources: &str, path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(sources).join(path)).expect("a source")
}

/// The files of a crate that say what is public: its root, what that shows of the kernels, and its public modules.
fn public_files(sources: &str) -> Vec<String> {
    let root = source(sources, "lib.rs");
    let modules = root.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    let kernels = if root.contains("\npub use kernels::*;") { source(sources, "kernels.rs") } else { String::new() };
    let parts = kernels.lines().filter_map(|line| line.strip_prefix("pub use ")?.strip_suffix("::*;"));
    let parts = parts.map(|name| format!("kernels/{name}"));
    let names = ["lib"].into_iter().chain(modules).map(str::to_owned).chain(parts);
    let files: Vec<_> = names.map(|name| format!("{name}.rs")).collect();
    let there = |file: &str| files.iter().any(|found| found == file);
    assert!(sources != "src" || files.len() > 5 && there("masks.rs") && there("kernels/calls.rs"), "{files:?}");
    files
}

/// Each of these files of all crates, with where the crate's sources are.
fn all_public_files() -> impl Iterator<Item = (&'static str, String)> {
    CRATES.into_iter().flat_map(|sources| public_files(sources).into_iter().map(move |file| (sources, file)))
}

/// The text of a doc comment just above a line, attributes between them left out.
fn comment_above(lines: &[&str], at: usize) -> String {
    let above = lines[..at].iter().rev().skip_while(|line| line.starts_with(['#', ' ', ')']));
    let mut comment: Vec<_> = above.take_while(|line| line.starts_with("///")).map(|line| &line[3..]).collect();
    comment.reverse();
    comment.join("\n")
}

/// True if a doc comment has a snippet that is compiled and run.
fn has_example(comment: &str) -> bool {
    let mut fences = comment.lines().filter_map(|line| line.trim_start().strip_prefix("```"));
    // Every other one opens a snippet, in the language that it names.
    std::iter::from_fn(|| Some((fences.next()?, fences.next()?))).any(|(language, _)| language.is_empty())
}

/// The names that a file shows of its modules: where their definitions are, relative to its crate's sources, without an
/// extension.
fn shown_of_modules(sources: &str, file: &str) -> Vec<(String, String)> {
    let (text, folder) = (source(sources, file), file.strip_suffix(".rs").expect("a source"));
    let mut names = Vec::new();
    for part in text.split("\npub use ").skip(1) {
        let path = part.split(';').next().expect("a first part");
        let (module, list) = path.split_once("::{").or_else(|| path.rsplit_once("::")).expect("a module");
        let module = &*module.replace("::", "/");
        if ["kernels", "sdpa_kernels"].contains(&module) {
            continue; // Each of these has its own `pub use`.
        }
        let module = if folder == "lib" { module.to_owned() } else { format!("{folder}/{module}") };
        let words = list.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
        names.extend(words.map(|word| (module.clone(), word.to_owned())));
    }
    names
}

const KINDS: [&str; 4] = ["struct", "enum", "trait", "fn"];

/// Finds the line that defines an item for users.
fn defines(line: &str, name: &str) -> bool {
    let rest = KINDS.iter().find_map(|kind| line.strip_prefix(&format!("pub {kind} "))).unwrap_or_default();
    rest.strip_prefix(name).is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
}

/// Doc comments of the definitions of a name, in a module of a crate or below it.
fn definitions(folder: &str, module: &str, name: &str) -> Vec<String> {
    let inside = |path: &Path| {
        let path = path.with_extension("");
        path.ends_with(Path::new("src").join(module)) || path.parent().is_some_and(|up| up.ends_with(module))
    };
    let mut comments = Vec::new();
    for (_, text) in sources(folder, "rs").iter().filter(|(path, _)| inside(path)) {
        let lines: Vec<_> = text.lines().collect();
        let at = (0..lines.len()).filter(|&at| defines(lines[at], name));
        comments.extend(at.map(|at| comment_above(&lines, at)));
    }
    comments
}

/// Doc comments of what users see: the path of each item, and what is said of it.
fn documented() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (folder, file) in all_public_files() {
        for (module, name) in shown_of_modules(folder, &file) {
            let comments = definitions(folder, &module, &name);
            let [comment] = &comments[..] else { panic!("{module}: {} definitions of {name}", comments.len()) };
            found.push((format!("{module}: {name}"), comment.clone()));
        }
        // What it defines itself, and what it shows of the kernels.
        let text = source(folder, &file);
        let lines: Vec<_> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let own = KINDS.iter().any(|kind| line.starts_with(&format!("pub {kind} ")));
            if own || line.starts_with("pub use sdpa_kernels::") && !line.ends_with("::probe;") {
                assert!(own || !line.contains('{'), "{file}: one `pub use` for each, with its example: {line}");
                found.push((format!("{folder}/{file}: {line}"), comment_above(&lines, at)));
            }
        }
    }
    assert!(found.len() > 80, "only {} items", found.len());
    found
}

#[test]
fn everything_public_has_an_example() {
    let without: Vec<_> = documented().into_iter().filter(|(_, comment)| !has_example(comment)).collect();
    assert!(without.is_empty(), "no example: {:#?}", without.iter().map(|(item, _)| item).collect::<Vec<_>>());
}

#[test]
fn examples_name_no_kernels() {
    let of_crates = CRATES.into_iter().flat_map(|folder| sources(folder, "rs"));
    for (path, text) in of_crates.chain(sources("docs/guide", "md")) {
        for (n, line) in text.lines().enumerate().map(|(n, line)| (n + 1, line.trim_start())) {
            let read = path.extension().is_some_and(|extension| extension == "md") || line.starts_with("//");
            assert!(!read || !line.contains("sdpa_kernels::"), "{}:{n}: {line}", path.display());
        }
    }
}

/// The snippets of every page are tests, and the index leads to it.
#[test]
fn pages_of_the_guide_are_tested() {
    let (tested, pages) = (source("docs", "lib.rs"), sources("docs/guide", "md"));
    let index = pages.iter().find(|(path, _)| path.ends_with("README.md")).expect("an index").1.clone();
    assert!(pages.len() > 10, "only {} pages", pages.len());
    for (path, _) in pages.iter().filter(|(path, _)| !path.ends_with("README.md")) {
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        assert_eq!(tested.matches(&format!("(\"guide/{name}\")")).count(), 1, "docs/lib.rs: {name}");
        assert!(index.contains(&format!("({name})")), "docs/guide/README.md: {name}");
    }
}

/// Lines of code, without their indentation and without those that a page hides.
fn lines_of(code: &str) -> Vec<&str> {
    code.lines().map(str::trim).filter(|line| *line != "#" && !line.starts_with("# ")).collect()
}

/// What needs another framework is `rust,ignore` on a page of the guide: the same lines are compiled with that framework.
#[test]
fn snippets_for_other_frameworks_are_compiled_there() {
    let compiled = [
        source("adapters/candle", "README.md"),
        source("adapters/burn", "README.md"),
        source("examples/router/src", "lib.rs"),
    ];
    let compiled = compiled.each_ref().map(|text| lines_of(text));
    let mut snippets = 0;
    for (path, text) in sources("docs/guide", "md") {
        for snippet in text.split("```rust,ignore\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            let lines = lines_of(snippet);
            let there = compiled.iter().any(|file| file.windows(lines.len()).any(|part| part == lines));
            assert!(there, "{}: compiled nowhere:\n{snippet}", path.display());
            snippets += 1;
        }
    }
    assert!(snippets > 2, "only {snippets} snippets");
}

/// A snippet that nothing compiles goes stale. Those of an adapter's page are compiled with the adapter; those in Python are run by
/// its tests.
#[test]
fn every_snippet_of_every_document_is_compiled() {
    let (root, mut snippets) = (Path::new(env!("CARGO_MANIFEST_DIR")), 0);
    for (path, text) in sources("", "md") {
        let name = path.strip_prefix(root).expect("a file of the repository").display().to_string();
        let fences = text.lines().filter_map(|line| line.trim_start().strip_prefix("```"));
        let languages: Vec<_> = fences.step_by(2).collect();
        let of_guide = name.starts_with("docs/guide/");
        let known = |language: &&str| {
            ["python", "rust", "sh", "text", "toml"].contains(language) || of_guide && *language == "rust,ignore"
        };
        assert!(languages.iter().all(known), "{name}: {languages:?}");
        let run = !languages.contains(&"python") || path.with_file_name("tests").join("test_readme.py").exists();
        assert!(run, "{name}: snippets in Python that no test runs");
        let rust = languages.iter().filter(|language| **language == "rust").count();
        let included = |file: &str, path: &str| {
            let source = std::fs::read_to_string(root.join(file)).expect("a source");
            source.contains(&format!("include_str!(\"{path}\")"))
        };
        let compiled = || match (name.strip_suffix("README.md"), name.strip_prefix("docs/")) {
            (_, Some(page)) => included("docs/lib.rs", page),
            (Some(folder), _) => included(&format!("{folder}src/lib.rs"), "../README.md"),
            _ => false,
        };
        assert!(rust == 0 || compiled(), "{name}: no test compiles it");
        snippets += rust;
    }
    assert!(snippets > 40, "only {snippets} snippets");
}

/// Address of the repository's files.
const ADDRESS: &str = "https://github.com/sdpa-rs/sdpa/blob/HEAD/";

/// Links of documents to files of the repository, pictures among them. Those of pages that are docs of a crate, or of a wheel, or
/// of a package elsewhere, have the repository's address: whoever shows these does not know where they lie.
#[test]
fn documents_link_to_what_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let of_root =
        ["CHANGELOG", "CONTRIBUTING", "DESIGN", "README", "SAFETY"].map(|name| root.join(name).with_extension("md"));
    let of_root = of_root.map(|path| (path.clone(), std::fs::read_to_string(path).expect("a document")));
    let folders = ["docs", "layers", "adapters", "distributed"].map(|folder| sources(folder, "md"));
    let mut links = 0;
    for (path, text) in of_root.into_iter().chain(folders.into_iter().flatten()) {
        let elsewhere = ["adapters", "distributed"].iter().any(|folder| path.starts_with(root.join(folder)));
        for target in text.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next()) {
            let file = target.split('#').next().unwrap_or_default();
            let there = match file.strip_prefix(ADDRESS) {
                Some(file) => root.join(file).exists(),
                None if file.is_empty() || file.contains("://") => continue,
                None => !elsewhere && path.with_file_name(file).exists(),
            };
            assert!(there, "{}: {target}", path.display());
            links += 1;
        }
    }
    assert!(links > 50, "only {links} links");
}

/// Their examples would not compile for whoever copies them; those of the crates stand beside their `pub use`.
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

/// What the crates show of the kernels.
fn shown() -> Vec<String> {
    let mut names = Vec::new();
    for (folder, file) in all_public_files() {
        let text = source(folder, &file);
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

/// A link to what the crates do not show is no link.
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
