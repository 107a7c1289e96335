//! Builds an example and runs it.
#![allow(dead_code, reason = "compiled into each test of the program; none uses all of it")]

use safetensors::SafeTensors;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// `compare`.
static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| build("compare"));

/// An example, built as this test was: `cargo test` does not build one that has tests of its own.
pub(crate) fn build(example: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    // target/PROFILE/deps/TEST
    let profile = test.ancestors().nth(2).and_then(Path::file_name).and_then(OsStr::to_str);
    let profile = profile.expect("the profile's folder").replace("debug", "dev");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args(["build", "--quiet", "--example", example, "--message-format", "json", "--profile", &profile]);
    // With the features of `cargo test --workspace`, else the library would be compiled again.
    cargo.arg(if cfg!(feature = "rayon") { "--workspace" } else { "--no-default-features" });
    let built = cargo.output().expect("cargo runs");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let messages = String::from_utf8_lossy(&built.stdout);
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let of_program = |message: &serde_json::Value| message["target"]["name"] == example;
    let path = messages.filter(of_program).find_map(|message| Some(PathBuf::from(message["executable"].as_str()?)));
    path.expect("cargo names what it built")
}

/// Runs the program with these arguments.
pub(crate) fn run(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Output {
    Command::new(&*PROGRAM).args(args).output().expect("the program runs")
}

/// Runs a line of the shell, in which `$0` is the program.
pub(crate) fn run_in_shell(line: &str) -> Output {
    Command::new("sh").args(["-c", line]).arg(&*PROGRAM).output().expect("a shell")
}

/// The f32 tensors of a file that the program wrote, in `f64`.
#[derive(Debug)]
pub(crate) struct Written(Vec<u8>);

impl Written {
    pub(crate) fn read(path: &Path) -> Self {
        Self(std::fs::read(path).expect("the program has written a file"))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.file().names().into_iter().map(str::to_owned).collect();
        names.sort();
        names
    }

    pub(crate) fn tensor(&self, name: &str) -> (Vec<usize>, Vec<f64>) {
        let tensor = self.file().tensor(name).expect("the tensor is there");
        let numbers = tensor.data().as_chunks().0.iter().map(|&x| f32::from_le_bytes(x).into()).collect();
        (tensor.shape().to_vec(), numbers)
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).expect("a safetensors file")
    }
}
