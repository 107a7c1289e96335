//! Requests that are none: each is refused by name.

use crate::server::{Server, block_on, complete, wait_until_idle};
use reqwest::Client;
use serde_json::{Value, json};
use serve::{Decoder, Engine, Limits, Models};

#[test]
fn completions_that_cannot_be_are_refused_by_name() {
    let bytes = Decoder::trained().unwrap().transformer().caches(1).unwrap().bytes_for(256);
    let server = Server::start(Limits { cache_bytes: bytes, ..Limits::default() }, None);
    block_on(async {
        let client = Client::new();
        for (body, message) in [
            (json!({}), "body: missing field `prompt`"),
            (
                json!({ "prompt": "a", "n": 2 }),
                "body: unknown field `n`, expected one of `prompt`, `model`, `max_tokens`, ",
            ),
            (json!({ "prompt": "a", "max_tokens": -1 }), "body: invalid value: integer `-1`, expected usize"),
            (
                json!({ "prompt": "a", "max_tokens": 0 }),
                "max_tokens: 0, but must be from 1 to 510: the prompt has 2 tokens",
            ),
            (json!({ "prompt": "a", "max_tokens": 511 }), "max_tokens: 511, but must be from 1 to 510"),
            (
                json!({ "prompt": "a".repeat(600) }),
                "max_tokens: 16, but must be from 1 to 0: the prompt has 601 tokens",
            ),
            (json!({ "prompt": "a", "max_tokens": usize::MAX }), "max_tokens: 18446744073709551615, but must be "),
            (json!({ "prompt": "a".repeat(300) }), "max_tokens: 317 tokens take "),
            (json!({ "prompt": "Attention" }), "prompt: 'A': not a letter of this decoder, which knows "),
            (json!({ "prompt": "a", "temperature": -1.0 }), "temperature: -1, but must be from 0 to 100"),
            (json!({ "prompt": "a", "stop": "ab" }), "stop: 2 letters, but must be one"),
            (json!({ "prompt": "a", "stop": "" }), "stop: 0 letters, but must be one"),
            (json!({ "prompt": "a", "logprobs": 5 }), "logprobs: 5, but must be 0 or 1"),
            (json!({ "prompt": ["a"] }), "body: invalid type: sequence, expected a string"),
        ] {
            let (status, answer) = complete(&client, &server, &body).await;
            let got = answer["error"]["message"].as_str().unwrap();
            assert!(status == 400 && got.starts_with(message), "{body}: {status}, {got}");
            assert_eq!(
                (&answer["error"]["type"], &answer["error"]["code"]),
                (&json!("invalid_request_error"), &json!(400))
            );
        }
        wait_until_idle(&client, &server, 0).await;
    });
}

#[test]
fn bodies_that_are_no_json_or_too_large_are_refused() {
    let server = Server::start(Limits::default(), None);
    block_on(async {
        let client = Client::new();
        let long = " ".repeat(1 << 21);
        for (body, status) in
            [("", 400), ("{", 400), ("[1, 2]", 400), ("\u{0}", 400), (r#"{"prompt": "a"#, 400), (&long, 413)]
        {
            let response = client.post(server.url("/v1/completions")).body(body.to_owned()).send().await.unwrap();
            assert_eq!(response.status(), status, "{:?}", &body[..body.len().min(20)]);
            let answer: Value = response.json().await.unwrap();
            assert!(!answer["error"]["message"].as_str().unwrap().is_empty());
        }
        assert_eq!(client.get(server.url("/v1/completions")).send().await.unwrap().status(), 405);
        assert_eq!(client.get(server.url("/v2")).send().await.unwrap().status(), 404);
        assert_eq!(client.get(server.url("/health")).send().await.unwrap().text().await.unwrap(), "ok\n");
    });
}

#[test]
fn limits_that_do_not_fit_are_refused_by_name() {
    let start = |limits| {
        let models = Models { decoder: Decoder::trained().unwrap(), embedder: None };
        Engine::start(models, limits).unwrap_err().to_string()
    };
    let limits = Limits::default;
    for (limits, message) in [
        (Limits { places: 0, ..limits() }, "places: 0, but must be at least 1"),
        (Limits { places: 8, rows: 8, ..limits() }, "rows: 8, but must be more than the places, which are 8"),
        (Limits { prefixes: vec!["É".to_owned()], ..limits() }, "'É': not a letter of this decoder, "),
        (
            Limits { prefixes: vec!["a".repeat(512)], ..limits() },
            "prefix 0: positions: entry 512 is 512, but must be at most 511",
        ),
        (
            Limits { prefixes: vec!["a".to_owned()], cache_bytes: 9, ..limits() },
            "cache_bytes: 9, but the prefixes alone take ",
        ),
    ] {
        let got = start(limits);
        assert!(got.starts_with(message), "{got}");
    }
}
