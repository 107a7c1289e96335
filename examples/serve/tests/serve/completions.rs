//! Completions: the letters and bits of a text alone, whatever else runs.

use crate::server::{Server, block_on, complete, metric, post, request, wait_until_idle, write_alone, written};
use reqwest::Client;
use serde_json::{Value, json};
use serve::{Decoder, Limits, Sampler};

/// Prompts of different lengths, and how each is continued: letters, temperature and seed.
const ASKED: [(&str, usize, (f32, u64)); 9] = [
    ("", 40, (0.0, 0)),
    ("the happy girls ", 30, (0.0, 0)),
    ("the happy girls ", 30, (0.8, 1)),
    ("the happy girls ", 30, (0.8, 2)),
    ("we love to sing in the garden.\ni want to come with you to my small hotel.\nthe old teacher ", 60, (0.5, 3)),
    ("a", 1, (1.0, 4)),
    ("she has thirteen red umbrellas.\nhe ", 25, (1.0, 5)),
    ("zzzz", 50, (2.0, 6)),
    ("they buy the newspaper today. they read the newspaper today. they ", 33, (0.3, 7)),
];

/// Asks for all of them at once, and checks each answer.
async fn check_all(client: &Client, server: &Server, decoder: &Decoder, prefix: &str) {
    let asked = ASKED.map(|(prompt, letters, how)| (format!("{prefix}{prompt}"), letters, how));
    let answers = asked.iter().map(|(prompt, letters, how)| {
        let body = request(prompt, *letters, *how);
        async move { complete(client, server, &body).await }
    });
    for ((prompt, letters, how), (status, answer)) in asked.iter().zip(futures_util::future::join_all(answers).await) {
        assert_eq!(status, 200, "{answer}");
        let expected = write_alone(decoder, prompt, *letters, Sampler::new(how.0, how.1));
        assert_eq!(written(&answer), expected, "after {prompt:?} by {how:?}");
        let tokens = json!({ "prompt_tokens": prompt.len() + 1, "completion_tokens": letters,
            "total_tokens": prompt.len() + 1 + letters });
        assert_eq!(answer["usage"], tokens);
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
    }
}

#[test]
fn texts_have_the_bits_that_they_have_alone() {
    let decoder = Decoder::trained().unwrap();
    // Places and rows for all; few places; chunks of prompts of a few rows.
    for (places, rows) in [(16, 1000), (2, 48), (3, 4)] {
        let server = Server::start(Limits { places, rows, ..Limits::default() }, None);
        block_on(async {
            let client = Client::new();
            check_all(&client, &server, &decoder, "").await;
            wait_until_idle(&client, &server, 0).await;
            let prompts = ASKED.iter().map(|(prompt, ..)| prompt.len() as u64 + 1).sum::<u64>();
            assert_eq!(metric(&client, &server, "serve_prompt_tokens_total").await, prompts);
            let letters = ASKED.iter().map(|&(_, letters, _)| letters as u64).sum::<u64>();
            assert_eq!(metric(&client, &server, "serve_written_tokens_total").await, letters);
            assert_eq!(metric(&client, &server, "serve_preempted_total").await, 0);
        });
    }
}

#[test]
fn a_shared_beginning_is_computed_once_and_changes_no_bit() {
    let decoder = Decoder::trained().unwrap();
    let sentence = "the intelligent doctor waits for her friends in the library. ";
    let prefix = sentence.repeat(5); // more than a block of 256 keys
    let limits = Limits { prefixes: vec![prefix.clone(), "the happy cat".to_owned()], ..Limits::default() };
    let server = Server::start(limits, None);
    block_on(async {
        let client = Client::new();
        let held = metric(&client, &server, "serve_cache_bytes").await;
        assert!(held > 0);
        check_all(&client, &server, &decoder, &prefix).await;
        wait_until_idle(&client, &server, held).await;
        // All of the prefix and the token that begins a line, except that a text's last token is always computed.
        let forked = metric(&client, &server, "serve_forked_tokens_total").await;
        assert_eq!(forked, (ASKED.len() * (prefix.len() + 1)) as u64 - 1);
        // Parts of a prefix: "the happy " of the second is more than "the " of the first.
        check_all(&client, &server, &decoder, "").await;
        let beginnings = [0, 11, 11, 11, 1, 1, 1, 1, 4];
        let more = metric(&client, &server, "serve_forked_tokens_total").await - forked;
        assert_eq!(more, beginnings.iter().sum::<u64>());
        wait_until_idle(&client, &server, held).await;
    });
}

#[test]
fn texts_that_lose_their_place_go_on_with_the_same_bits() {
    let decoder = Decoder::trained().unwrap();
    // Room for one text of 256 tokens, or several short ones.
    let bytes = decoder.transformer().caches(1).unwrap().bytes_for(256);
    let server = Server::start(Limits { cache_bytes: bytes, places: 6, ..Limits::default() }, None);
    block_on(async {
        let client = Client::new();
        let asked: Vec<(String, f32, u64)> = (0..6).map(|n| ("my sister ".repeat(n), 0.7, n as u64)).collect();
        let answers = asked.iter().map(|(prompt, temperature, seed)| {
            let body = request(prompt, 120, (*temperature, *seed));
            let (client, server) = (&client, &server);
            async move { complete(client, server, &body).await }
        });
        let answers = futures_util::future::join_all(answers).await;
        for ((prompt, temperature, seed), (status, answer)) in asked.iter().zip(answers) {
            assert_eq!(status, 200, "{answer}");
            let expected = write_alone(&decoder, prompt, 120, Sampler::new(*temperature, *seed));
            assert_eq!(written(&answer), expected, "after {prompt:?}");
        }
        assert!(metric(&client, &server, "serve_preempted_total").await > 0, "nothing was preempted");
        wait_until_idle(&client, &server, 0).await;
    });
}

/// Events of a streamed answer: the data of each.
async fn events(client: &Client, server: &Server, body: &Value) -> Vec<String> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let response = post(client, server, "/v1/completions", &body).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let text = response.text().await.unwrap();
    text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap().to_owned()).collect()
}

#[test]
fn a_stream_has_an_event_for_each_letter() {
    let server = Server::start(Limits::default(), None);
    block_on(async {
        let client = Client::new();
        let body = request("the women ", 20, (0.9, 5));
        let whole = complete(&client, &server, &body).await.1;
        let mut events = events(&client, &server, &body).await;
        assert_eq!(events.pop().unwrap(), "[DONE]");
        let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        assert_eq!(events.len(), 21);
        let (text, bits): (Vec<String>, Vec<Vec<u32>>) = events.iter().map(written).unzip();
        assert_eq!((text.concat(), bits.concat()), written(&whole));
        let finish: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
        assert!(finish[..20].iter().all(|finish| finish.is_null()) && finish[20] == "length");
    });
}

#[test]
fn a_text_ends_before_its_stop_letter() {
    let server = Server::start(Limits::default(), None);
    block_on(async {
        let client = Client::new();
        let whole = complete(&client, &server, &request("my brother ", 60, (0.0, 0))).await.1;
        let (text, bits) = written(&whole);
        let end = text.find('.').expect("a sentence ends within sixty letters");
        let mut body = request("my brother ", 60, (0.0, 0));
        body["stop"] = json!(".");
        let stopped = complete(&client, &server, &body).await.1;
        assert_eq!(written(&stopped), (text[..end].to_owned(), bits[..end].to_vec()));
        assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
        assert_eq!(stopped["usage"]["completion_tokens"], end);
        wait_until_idle(&client, &server, 0).await;
    });
}
