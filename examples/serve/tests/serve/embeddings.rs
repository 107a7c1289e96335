//! Embeddings: the bits of single calls, however texts are batched.

use crate::model_folder;
use crate::server::{Server, block_on, metric, post, wait_until_idle};
use crate::temporary_folder::TemporaryFolder;
use crate::tiny_bert;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use reqwest::Client;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use serve::{Embedder, Limits};

/// A tokenizer of some words.
const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2, "c": 3, "d": 40}, "unk_token": "[UNK]"},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[UNK]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"[UNK]": {"id": "[UNK]", "ids": [0], "tokens": ["[UNK]"]}}}}"#;

/// A BERT of random weights: 20 positions, rows of 24.
pub(crate) fn tiny(name: &str) -> Embedder {
    let folder = TemporaryFolder::new(&format!("serve-{name}"));
    let bytes = |data: &[f32]| data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let model = tiny_bert::model();
    let tensors: Vec<_> = model.iter().map(|(name, (shape, data))| (name, shape.clone(), bytes(data))).collect();
    let views = tensors
        .iter()
        .map(|(name, shape, data)| (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    std::fs::write(folder.file("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    std::fs::write(folder.file("config.json"), tiny_bert::JSON).unwrap();
    std::fs::write(folder.file("tokenizer.json"), TOKENIZER).unwrap();
    Embedder::load(folder.path()).unwrap()
}

/// Rows of an answer, as bits.
fn rows(answer: &Value) -> Vec<Vec<u32>> {
    let data = answer["data"].as_array().unwrap_or_else(|| panic!("{answer}"));
    assert!(data.iter().enumerate().all(|(n, row)| row["index"] == n && row["object"] == "embedding"));
    data.iter().map(|row| bits(&row["embedding"])).collect()
}

fn bits(row: &Value) -> Vec<u32> {
    match row {
        Value::String(text) => {
            let bytes = BASE64_STANDARD.decode(text).unwrap();
            bytes.as_chunks::<4>().0.iter().map(|&x| f32::from_le_bytes(x).to_bits()).collect()
        }
        row => row.as_array().unwrap().iter().map(|x| (x.as_f64().unwrap() as f32).to_bits()).collect(),
    }
}

/// Asks for these requests all at once, and compares each text's row with that of a call for it alone.
fn check(embedder: impl Fn() -> Embedder, requests: &[Vec<String>], batch_tokens: usize) {
    let alone = embedder();
    let server = Server::start(Limits { batch_tokens, ..Limits::default() }, Some(embedder()));
    block_on(async {
        let client = Client::new();
        let answers = requests.iter().enumerate().map(|(n, texts)| {
            let input = if texts.len() == 1 { json!(texts[0]) } else { json!(texts) };
            let format = ["float", "base64"][n % 2];
            let body = json!({ "input": input, "model": "m", "encoding_format": format });
            let (client, server) = (&client, &server);
            async move { post(client, server, "/v1/embeddings", &body).await.json::<Value>().await.unwrap() }
        });
        for (texts, answer) in requests.iter().zip(futures_util::future::join_all(answers).await) {
            let expected: Vec<Vec<u32>> = texts
                .iter()
                .map(|text| alone.embed_alone(text).unwrap().iter().map(|x| x.to_bits()).collect())
                .collect();
            assert_eq!(rows(&answer), expected, "{texts:?}");
            assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("m")));
        }
        wait_until_idle(&client, &server, 0).await;
        let tokens = metric(&client, &server, "serve_embedded_tokens_total").await;
        assert!(tokens > 0 && metric(&client, &server, "serve_finished_total").await == requests.len() as u64);
    });
}

fn ragged(words: &[&str], requests: usize) -> Vec<Vec<String>> {
    let text = |n: usize| (0..n % 19).map(|i| words[(7 * n + i * i) % words.len()]).collect::<Vec<_>>().join(" ");
    (0..requests).map(|n| (0..1 + n % 4).map(|i| text(5 * n + i)).collect()).collect()
}

#[test]
fn rows_have_the_bits_of_single_calls() {
    for batch_tokens in [1, 30, 4096] {
        check(|| tiny(&format!("rows-{batch_tokens}")), &ragged(&["a", "b", "c", "d", "e"], 23), batch_tokens);
    }
}

#[test]
fn rows_of_the_real_model_have_the_bits_of_single_calls_where_it_is_present() {
    let Some(folder) = model_folder::folder("rows_of_the_real_model") else { return };
    let words = ["attention", "is", "a", "weighted", "mean", "of", "values", "by", "similarity"];
    check(|| Embedder::load(&folder).unwrap(), &ragged(&words, 12), 64);
}

#[test]
fn what_is_no_request_is_refused() {
    let server = Server::start(Limits { waiting_tokens: 100, ..Limits::default() }, Some(tiny("refused")));
    block_on(async {
        let client = Client::new();
        for (body, status, message) in [
            (json!({ "input": [] }), 400, "input: 0 texts, but must be 1 to 256"),
            (json!({ "input": vec!["a"; 257] }), 400, "input: 257 texts, but must be 1 to 256"),
            (json!({ "input": ["a", "a ".repeat(20)] }), 400, "input[1]: more than 20 tokens"),
            (json!({ "input": vec!["a b c"; 26] }), 400, "input: 104 tokens, but a request may have 100"),
            (json!({ "input": 7 }), 400, "body: input must be a string or an array of strings at line 1 column 11"),
            (
                json!({ "input": "a", "encoding_format": "int8" }),
                400,
                "body: unknown variant `int8`, expected `float` or ",
            ),
            (json!({ "inputs": "a" }), 400, "body: unknown field `inputs`, expected one of `input`, `model`, "),
        ] {
            let response = post(&client, &server, "/v1/embeddings", &body).await;
            assert_eq!(response.status(), status, "{body}");
            let answer: Value = response.json().await.unwrap();
            let got = answer["error"]["message"].as_str().unwrap();
            assert!(got.starts_with(message), "{got}");
        }
        wait_until_idle(&client, &server, 0).await;
    });
    let none = Server::start(Limits::default(), None);
    block_on(async {
        let response = post(&Client::new(), &none, "/v1/embeddings", &json!({ "input": "a" })).await;
        assert_eq!(response.status(), 501);
    });
}
