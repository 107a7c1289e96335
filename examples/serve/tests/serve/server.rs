//! A server on a socket, in this process, and a client.

use reqwest::{Client, Response};
use sdpa::Exec;
use sdpa_layers::{Compute, LayerInput, Sequences};
use serde_json::{Value, json};
use serve::{Choice, Decoder, Embedder, Engine, Limits, Models, Sampler, http};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// A server on a free port of 127.0.0.1; it ends when this is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    engine: Engine,
    end: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(limits: Limits, embedder: Option<Embedder>) -> Self {
        let engine = Engine::start(Models { decoder: Decoder::trained().unwrap(), embedder }, limits).unwrap();
        let (end, ended) = oneshot::channel::<()>();
        let (tell, address) = std::sync::mpsc::channel();
        let serving = engine.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                http::serve(listener, serving, async { drop(ended.await) }).await.unwrap();
            });
        });
        Self { address: address.recv().unwrap(), engine, end: Some(end), thread: Some(thread) }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Tells the server to stop, and waits until it has.
    pub(crate) fn stop(&mut self) {
        self.end.take();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end.take();
        self.engine.stop();
    }
}

/// Runs a test's part on this thread.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limit = Duration::from_secs(120);
    runtime.block_on(async { tokio::time::timeout(limit, work).await.expect("the test takes two minutes") })
}

pub(crate) async fn post(client: &Client, server: &Server, path: &str, body: &Value) -> Response {
    client.post(server.url(path)).json(body).send().await.unwrap()
}

/// Answer of a completion, and its status.
pub(crate) async fn complete(client: &Client, server: &Server, body: &Value) -> (u16, Value) {
    let response = post(client, server, "/v1/completions", body).await;
    (response.status().as_u16(), response.json().await.unwrap())
}

/// A number of the metrics.
pub(crate) async fn metric(client: &Client, server: &Server, name: &str) -> u64 {
    let text = client.get(server.url("/metrics")).send().await.unwrap().text().await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name}: not in the metrics")).parse().unwrap()
}

/// Waits until a number of the metrics is as expected.
pub(crate) async fn wait_for(client: &Client, server: &Server, name: &str, expected: impl Fn(u64) -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let got = metric(client, server, name).await;
        if expected(got) {
            return;
        }
        assert!(Instant::now() < end, "{name} stays {got}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until nothing runs or waits, and checks that no text has left anything but `bytes` of prefixes.
pub(crate) async fn wait_until_idle(client: &Client, server: &Server, bytes: u64) {
    let gauges = ["serve_running", "serve_waiting", "serve_waiting_tokens", "serve_promised_bytes"];
    for name in gauges {
        wait_for(client, server, name, |got| got == 0).await;
    }
    wait_for(client, server, "serve_cache_bytes", |got| got == bytes).await;
}

/// A completion's text and the bits of its log-probabilities.
pub(crate) fn written(answer: &Value) -> (String, Vec<u32>) {
    let choice = &answer["choices"][0];
    let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap_or_else(|| panic!("{answer}"));
    let bits = logprobs.iter().map(|x| (x.as_f64().unwrap() as f32).to_bits());
    (choice["text"].as_str().unwrap().to_owned(), bits.collect())
}

/// The same completion by the decoder alone, without a cache: the whole text anew for every letter.
pub(crate) fn write_alone(decoder: &Decoder, prompt: &str, letters: usize, mut sampler: Sampler) -> (String, Vec<u32>) {
    let (mut tokens, mut text, mut bits) = (decoder.encode(prompt).unwrap(), String::new(), Vec::new());
    let compute = &mut Compute::new(Exec::serial());
    for _ in 0..letters {
        let (ends, width) = ([0, tokens.len()], decoder.width());
        let (mut x, mut out) = (vec![0.0; tokens.len() * width], vec![0.0; tokens.len() * width]);
        let mut logits = vec![0.0; decoder.letters()];
        decoder.embed(&tokens, (&ends, &[0]), &mut x, compute).unwrap();
        let input = LayerInput::new(&x, Sequences::one(tokens.len()));
        decoder.transformer().forward(input, &mut out, compute).unwrap();
        decoder.logits(&out[out.len() - width..], &mut logits, compute).unwrap();
        let Choice { token, logprob } = sampler.choose(&logits);
        tokens.push(token);
        text.push(decoder.letter(token));
        bits.push(logprob.to_bits());
    }
    (text, bits)
}

/// A request for a text, with the logarithms of its probabilities.
pub(crate) fn request(prompt: &str, max_tokens: usize, (temperature, seed): (f32, u64)) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed, "logprobs": 1 })
}
