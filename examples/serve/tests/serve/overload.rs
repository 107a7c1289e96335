//! More requests than the server has room or time for.

use crate::embeddings::tiny;
use crate::server::{Server, block_on, complete, metric, post, request, wait_for, wait_until_idle, written};
use reqwest::Client;
use serde_json::{Value, json};
use serve::Limits;
use std::time::Duration;

/// Statuses of as many long texts at once.
async fn flood(client: &Client, server: &Server, count: usize) -> Vec<u16> {
    let texts = (0..count).map(|seed| {
        let body = request("the ", 400, (1.0, seed as u64));
        async move { complete(client, server, &body).await.0 }
    });
    futures_util::future::join_all(texts).await
}

#[test]
fn what_cannot_wait_is_refused_and_the_server_recovers() {
    let server = Server::start(Limits { places: 1, waiting: 2, ..Limits::default() }, None);
    block_on(async {
        let client = Client::new();
        let expected = written(&complete(&client, &server, &request("my ", 20, (0.0, 0))).await.1);
        let statuses = flood(&client, &server, 12).await;
        let count = |status| statuses.iter().filter(|&&got| got == status).count();
        // Two wait, at least; one may run by then, and some may have come late enough for the next place.
        assert!(count(200) >= 2 && count(429) >= 1 && count(200) + count(429) == 12, "{statuses:?}");
        assert_eq!(metric(&client, &server, "serve_refused_total").await, count(429) as u64);
        wait_until_idle(&client, &server, 0).await;
        assert_eq!(written(&complete(&client, &server, &request("my ", 20, (0.0, 0))).await.1), expected);
    });
}

#[test]
fn memory_is_promised_before_a_text_is_accepted() {
    let decoder = serve::Decoder::trained().unwrap();
    let bytes = decoder.transformer().caches(1).unwrap().bytes_for(405);
    let limits = Limits { promised_bytes: 3 * bytes, ..Limits::default() };
    let server = Server::start(limits, None);
    block_on(async {
        let client = Client::new();
        let statuses = flood(&client, &server, 12).await;
        assert!(statuses.iter().filter(|&&status| status == 200).count() >= 3, "{statuses:?}");
        assert!(statuses.contains(&429), "{statuses:?}");
        let response = post(&client, &server, "/v1/completions", &request("a", 5, (0.0, 0))).await;
        assert_eq!(response.status(), 200);
        wait_until_idle(&client, &server, 0).await;
    });
}

#[test]
fn a_refusal_says_when_to_try_again() {
    let server = Server::start(Limits { waiting_tokens: 40, ..Limits::default() }, Some(tiny("overload")));
    block_on(async {
        let client = Client::new();
        let body = json!({ "input": vec!["a b c d"; 8] });
        let answers = (0..30).map(|_| post(&client, &server, "/v1/embeddings", &body));
        let mut refused = 0;
        for response in futures_util::future::join_all(answers).await {
            if response.status() == 429 {
                assert_eq!(response.headers()["retry-after"], "1");
                let answer: Value = response.json().await.unwrap();
                assert_eq!(answer["error"]["message"], "exhausted: tokens of waiting texts");
                refused += 1;
            } else {
                assert_eq!(response.status(), 200);
            }
        }
        assert_eq!(metric(&client, &server, "serve_refused_total").await, refused);
        wait_until_idle(&client, &server, 0).await;
    });
}

#[test]
fn a_text_that_is_late_is_given_up() {
    let server = Server::start(Limits { deadline: Duration::from_millis(20), places: 2, ..Limits::default() }, None);
    block_on(async {
        let client = Client::new();
        let statuses = flood(&client, &server, 8).await;
        assert!(statuses.contains(&504), "{statuses:?}");
        let mut body = request("the ", 500, (1.0, 1));
        body["stream"] = json!(true);
        let text = post(&client, &server, "/v1/completions", &body).await.text().await.unwrap();
        let events: Vec<&str> = text.split_terminator("\n\n").collect();
        let [.., failure, done] = events[..] else { panic!("{text}") };
        assert_eq!(done, "data: [DONE]");
        let failure: Value = serde_json::from_str(failure.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(failure["error"]["message"], "not done within 20 ms");
        assert_eq!(failure["error"]["code"], 504);
        wait_until_idle(&client, &server, 0).await;
        let late = statuses.iter().filter(|&&status| status == 504).count() as u64 + 1;
        wait_for(&client, &server, "serve_given_up_total", |got| got == late).await;
    });
}
