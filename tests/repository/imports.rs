//! The house: imports go down only, and neither files nor folders import each other in a circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The rooms of a package, ground floor first: a file imports from its own room and those before it.
type Rooms = &'static [&'static str];

const KERNELS: Rooms = &[
    "sync",
    "thread_pool",
    "work_queue",
    "elementary",
    "simd",
    "tensor",
    "matmul",
    "machine",
    "kv",
    "nn",
    "attention::scratch",
    "attention::call",
    "attention::steps",
    "attention::products",
    "attention::blocks",
    "attention::forward",
    "attention::backward",
    "attention::schedule",
    "probe",
];

const ROOT: Rooms = &[
    "kernels",
    "masks",
    "error",
    "tensor_file",
    "shape",
    "threads",
    "plan",
    "cache",
    "page_pool",
    "layer_caches",
    "inputs",
    "attention",
    "choosing",
    "backward",
    "state",
    "parts",
    "naive",
];

const LAYERS: Rooms = &[
    "error",
    "cache_file",
    "share",
    "compute",
    "sequences",
    "next_rows",
    "steps",
    "linear",
    "dictionary",
    "linear_attention",
    "hybrid_caches",
    "pool",
    "norm",
    "embedding",
    "positions",
    "feed_forward",
    "model",
    "multi_head",
    "layer_input",
    "transformer",
    "decoder",
    "bert",
];

/// The files that each file imports, as module paths: `attention::products::qk`.
type Imports = BTreeMap<String, BTreeSet<String>>;

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The module path of a file.
fn module(root: &Path, file: &Path) -> String {
    let path = file.strip_prefix(root).unwrap().with_extension("");
    let parts: Vec<_> = path.iter().map(|part| part.to_str().unwrap()).collect();
    parts.join("::").trim_end_matches("::mod").to_owned()
}

/// Paths below `crate` that a line of a module names by `crate::…` or `super::…`.
fn paths(module: &str, line: &str) -> Vec<String> {
    let above = module.rsplit_once("::").map_or(String::new(), |(above, _)| format!("{above}::"));
    let from = |word: &str, above: &str| -> Vec<String> {
        line.match_indices(word).map(|(at, _)| format!("{above}{}", &line[at + word.len()..])).collect()
    };
    [from("crate::", ""), from("super::", &above)].concat()
}

/// Reads `use crate::…` and paths that begin with `crate::` or `super::`, tests left out. What the crate's face hands on is
/// named by its room.
fn imports(root: &str) -> Imports {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(root);
    let mut found = Vec::new();
    files(&root, &mut found);
    let modules: BTreeSet<String> = found.iter().map(|file| module(&root, file)).collect();
    let mut imports = Imports::new();
    for file in found.iter().filter(|file| !file.to_str().unwrap().contains("tests")) {
        let (name, text) = (module(&root, file), fs::read_to_string(file).unwrap());
        let code = text.split("\nmod tests {").next().unwrap();
        let lines = code.lines().map(|line| line.split("//").next().unwrap());
        let imported = lines.flat_map(|line| paths(&name, line)).filter_map(|path| {
            // The longest part of the path that is a file.
            let words: Vec<_> =
                path.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').next()?.split("::").collect();
            let is_of_room = path.starts_with(char::is_lowercase) || name == "lib";
            assert!(is_of_room, "{}: what room is {path} of?", file.display());
            (1..=words.len()).rev().map(|n| words[..n].join("::")).find(|path| modules.contains(path))
        });
        let imported = imported.filter(|target| *target != name && target != "lib").collect();
        imports.insert(name, imported);
    }
    imports
}

/// A file that can be reached from itself, if there is one.
fn circle(imports: &Imports) -> Option<String> {
    imports
        .keys()
        .find(|&start| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![start]);
            while let Some(file) = next.pop() {
                for target in imports.get(file).into_iter().flatten() {
                    if target == start {
                        return true;
                    }
                    if seen.insert(target) {
                        next.push(target);
                    }
                }
            }
            false
        })
        .cloned()
}

/// The folders, or files beside them, that each imports.
fn folders(imports: &Imports) -> Imports {
    let folder = |module: &str| module.split("::").next().unwrap().to_owned();
    let mut all = Imports::new();
    for (file, targets) in imports {
        let others = targets.iter().map(|target| folder(target)).filter(|target| *target != folder(file));
        all.entry(folder(file)).or_default().extend(others);
    }
    all
}

fn room(rooms: Rooms, module: &str) -> Option<usize> {
    rooms
        .iter()
        .position(|room| module.strip_prefix(room).is_some_and(|rest| rest.is_empty() || rest.starts_with("::")))
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let packages = [
        ("kernels/src", 100),
        ("src", 40),
        ("layers/src", 30),
        ("adapters/burn/src", 4),
        ("adapters/candle/src", 4),
        ("adapters/python/src", 4),
        ("benches/peers/src", 20),
        ("distributed/src", 10),
    ];
    for (root, least) in packages {
        let imports = imports(root);
        assert!(imports.len() > least, "{root}: files were missed");
        assert_eq!(circle(&imports), None, "{root}");
        assert_eq!(circle(&folders(&imports)), None, "{root}, by folder");
    }
}

#[test]
fn imports_go_down_the_rooms() {
    for (root, rooms) in [("kernels/src", KERNELS), ("src", ROOT), ("layers/src", LAYERS)] {
        let imports = imports(root);
        for name in rooms {
            let inside =
                |file: &String| file.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"));
            assert!(imports.keys().any(inside), "{root}: no file is in room {name}");
        }
        for (file, targets) in imports {
            let from = room(rooms, &file);
            assert!(from.is_some() || file == "lib" || file == "attention", "{root}: {file} is in no room");
            for target in targets {
                let to = room(rooms, &target);
                assert!(from.is_none() || to <= from, "{root}: {file} imports {target}");
            }
        }
    }
}

/// The files that know of threads.
#[test]
fn rayon_is_named_in_one_file() {
    for (root, expected) in [("src", &["threads"][..]), ("layers/src", &[])] {
        let mut found = Vec::new();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(root);
        files(&root, &mut found);
        let names = |file: &&PathBuf| {
            let text = fs::read_to_string(file).unwrap();
            text.lines().any(|line| line.split("//").next().unwrap().contains("rayon::"))
        };
        let named: Vec<_> = found.iter().filter(names).map(|file| module(&root, file)).collect();
        assert_eq!(named, expected, "{}", root.display());
    }
}
