//! Clients that vanish in the middle: nothing of them is left.

use crate::server::{Server, block_on, complete, metric, request, wait_for, wait_until_idle, written};
use reqwest::Client;
use serde_json::json;
use serve::Limits;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Says to the test below which server to ask.
const ADDRESS: &str = "SERVE_TEST_ADDRESS";

/// Asks for a long text on a new connection.
fn ask(address: SocketAddr, seed: u64, stream: bool) -> TcpStream {
    let mut body = request("the ", 500, (1.0, seed));
    body["stream"] = json!(stream);
    let body = body.to_string();
    let mut socket = TcpStream::connect(address).unwrap();
    let length = body.len();
    write!(socket, "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    socket
}

/// Limits under which a long text takes long: many side by side.
fn limits() -> Limits {
    Limits { places: 32, rows: 64, waiting: 200, ..Limits::default() }
}

#[test]
fn connections_that_are_dropped_leave_nothing() {
    let server = Server::start(limits(), None);
    block_on(async {
        let client = Client::new();
        let expected = written(&complete(&client, &server, &request("my ", 20, (0.0, 0))).await.1);
        for round in 0..3 {
            let mut sockets: Vec<_> = (0..40).map(|seed| ask(server.address, seed, seed % 2 == 0)).collect();
            if round > 0 {
                wait_for(&client, &server, "serve_running", |running| running > 0).await;
                // A few bytes of the first answer, which is a stream.
                sockets[0].read_exact(&mut [0; 64]).unwrap();
            }
            drop(sockets);
            // One that stays is served meanwhile.
            assert_eq!(written(&complete(&client, &server, &request("my ", 20, (0.0, 0))).await.1), expected);
            wait_until_idle(&client, &server, 0).await;
        }
        assert!(metric(&client, &server, "serve_given_up_total").await > 40);
        assert_eq!(metric(&client, &server, "serve_failed_total").await, 0);
    });
}

#[test]
fn a_client_that_is_killed_leaves_nothing() {
    let server = Server::start(limits(), None);
    block_on(async {
        let client = Client::new();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "clients::asks_and_waits_to_be_killed", "--ignored", "--nocapture"])
            .env(ADDRESS, server.address.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().ends_with("asked")), "the child has asked");
        wait_for(&client, &server, "serve_accepted_total", |accepted| accepted == 64).await;
        child.kill().unwrap(); // with SIGKILL
        child.wait().unwrap();
        wait_until_idle(&client, &server, 0).await;
        let [finished, given_up] = ["serve_finished_total", "serve_given_up_total"];
        let [finished, given_up] = [metric(&client, &server, finished).await, metric(&client, &server, given_up).await];
        assert!(given_up > 0 && finished + given_up == 64, "{finished} finished, {given_up} given up");
        assert_eq!(complete(&client, &server, &request("my ", 20, (0.0, 0))).await.0, 200);
    });
}

/// Client of the test above, in a process that it starts.
#[test]
#[ignore = "started by a_client_that_is_killed_leaves_nothing"]
fn asks_and_waits_to_be_killed() {
    let Ok(address) = std::env::var(ADDRESS) else { return };
    let address = address.parse().unwrap();
    let sockets: Vec<_> = (0..64).map(|seed| ask(address, seed, true)).collect();
    println!("asked");
    std::thread::sleep(Duration::from_secs(60));
    drop(sockets);
}

#[test]
fn a_server_that_is_told_to_stop_finishes_its_texts() {
    let mut server = Server::start(Limits::default(), None);
    let mut socket = ask(server.address, 1, true);
    let mut begun = [0; 64];
    socket.read_exact(&mut begun).unwrap();
    server.stop();
    let mut rest = String::new();
    socket.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert!(TcpStream::connect(server.address).is_err(), "the socket is closed");
}
