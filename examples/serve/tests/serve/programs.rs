//! The two programs as their users meet them.

use crate::embeddings::tiny;
use crate::server::Server;
use crate::temporary_folder::TemporaryFolder;
use serve::Limits;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program).args(args).output().expect("the program runs")
}

#[test]
fn refusals_are_one_line_and_status_2() {
    let (serve, load) = (env!("CARGO_BIN_EXE_serve"), env!("CARGO_BIN_EXE_load"));
    for (program, args, message) in [
        (serve, &["--modle", "m"][..], "serve: --modle: unknown flag; --help lists them"),
        (serve, &["--rows"], "serve: --rows: needs a value, but is the last word"),
        (serve, &["--rows", "x"], "serve: --rows: x, but must be a whole number"),
        (serve, &["--model", "none", "--rows", "3"], "serve: rows: 3, but must be more than the places, which are 8"),
        (serve, &["--model", "no/such/folder"], "serve: no/such/folder: no such folder. The model is in "),
        (serve, &["--decoder", "3x65"], "serve: --decoder: 3x65, but must be 1 to 128 layers of "),
        (serve, &["--prefix", "no/such/file"], "serve: no/such/file: "),
        (load, &["--url", "http://192.0.2.1:80"], "load: --url: http://192.0.2.1:80, but must be on this machine, "),
        (load, &["--loads", "0.5,x"], "load: --loads: x, but must be a positive number"),
        (load, &["--minutes", "1000"], "load: --minutes: 1000, but must be at most 60"),
    ] {
        let output = run(program, args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.starts_with(message) && error.lines().count() == 1, "{args:?}: {error}");
    }
    for program in [serve, load] {
        let help = run(program, &["--help"]);
        assert!(help.status.success() && String::from_utf8(help.stdout).unwrap().contains("Usage: "));
    }
}

#[test]
fn a_load_is_made_measured_and_drawn() {
    let server = Server::start(Limits::default(), Some(tiny("load")));
    let folder = TemporaryFolder::new("serve-load");
    let (url, pictures) = (server.url(""), folder.path().to_str().unwrap().to_owned());
    let args = ["--url", &url, "--seconds", "1", "--loads", "0.3,2", "--words", "a,b,c", &pictures];
    let output = run(env!("CARGO_BIN_EXE_load"), &args);
    let (text, error) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{text}\n{error}");
    assert!(text.contains("capacity: ") && text.contains("| 0.30 |") && text.contains("| 2.00 |"), "{text}");
    assert!(folder.file("serve.png").is_file() && folder.file("serve.svg").is_file());
}

#[cfg(unix)]
#[test]
fn a_server_ends_when_it_is_told_to() {
    let args = ["--listen", "127.0.0.1:0", "--model", "none", "--decoder", "1x64"];
    let mut child = Command::new(env!("CARGO_BIN_EXE_serve")).args(args).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("listening on http://127.0.0.1:"), "{line}");
    assert!(run("kill", &["-TERM", &child.id().to_string()]).status.success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
