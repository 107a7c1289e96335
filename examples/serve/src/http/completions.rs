//! `POST /v1/completions`, in OpenAI's form: at once, or as a stream of events.

use super::error::{Failure, read};
use crate::engine::{Completion, Engine, Event, Finish, Writing};
use crate::sampling::Choice;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::sse::{self, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use serde::Deserialize;
use serde_json::{Value, json};
use std::convert::Infallible;
use tokio::time::timeout_at;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    prompt: String,
    model: Option<String>,
    #[serde(default = "sixteen")]
    max_tokens: usize,
    #[serde(default)]
    temperature: f32,
    #[serde(default)]
    seed: u64,
    /// One letter, at which the text ends.
    stop: Option<String>,
    #[serde(default)]
    stream: bool,
    /// 1 for the logarithm of each letter's probability.
    #[serde(default)]
    logprobs: u8,
    /// Taken, and of no effect.
    #[serde(rename = "user")]
    _user: Option<String>,
}

fn sixteen() -> usize {
    16
}

pub(super) async fn answer(
    State(engine): State<Engine>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Failure> {
    let request: Request = read(body)?;
    if !(0.0..=100.0).contains(&request.temperature) {
        return Err(Failure::invalid(format!("temperature: {}, but must be from 0 to 100", request.temperature)));
    }
    if request.logprobs > 1 {
        return Err(Failure::invalid(format!("logprobs: {}, but must be 0 or 1", request.logprobs)));
    }
    let stop = request.stop.map(|stop| one_letter(&engine, &stop)).transpose()?;
    let Request { prompt, max_tokens, temperature, seed, .. } = request;
    let completion = Completion { prompt, max_tokens, temperature, seed, stop };
    let writing = engine.complete(completion).map_err(|refusal| Failure::refused(&engine, refusal))?;
    let answer = Answer {
        writing,
        engine,
        model: request.model.unwrap_or_else(|| "decoder".to_owned()),
        logprobs: request.logprobs == 1,
    };
    if request.stream { Ok(Sse::new(answer.stream()).into_response()) } else { answer.whole().await }
}

fn one_letter(engine: &Engine, stop: &str) -> Result<u32, Failure> {
    let tokens = engine.models().decoder.encode(stop).map_err(|e| Failure::invalid(format!("stop: {e}")))?;
    match tokens[..] {
        [_, token] => Ok(token),
        _ => Err(Failure::invalid(format!("stop: {} letters, but must be one", tokens.len() - 1))),
    }
}

/// A text that is being written, and the form of its answer. When the client goes away it is dropped, and so is the request.
#[derive(Debug)]
struct Answer {
    writing: Writing,
    engine: Engine,
    model: String,
    logprobs: bool,
}

impl Answer {
    /// Next part of the text, before its deadline.
    async fn next(&mut self) -> Result<Event, Failure> {
        let deadline = self.writing.deadline();
        let next = timeout_at(deadline.into(), self.writing.next()).await.map_err(|_| Failure::late(&self.engine))?;
        next.ok_or_else(|| Failure::given_up(&self.engine, deadline))
    }

    /// The whole text.
    async fn whole(mut self) -> Result<Response, Failure> {
        let mut choices = Vec::new();
        let finish = loop {
            match self.next().await? {
                Event::Token(choice) => choices.push(choice),
                Event::End(finish) => break finish,
            }
        };
        let (prompt, written) = (self.writing.prompt_tokens, choices.len());
        let mut json = self.json(&choices, Some(finish));
        json["usage"] =
            json!({ "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written });
        Ok(Json(json).into_response())
    }

    /// The text, an event for each letter, then `[DONE]`. A failure is an event too: the status was sent before.
    fn stream(self) -> impl Stream<Item = Result<sse::Event, Infallible>> {
        enum State {
            Writing(Answer),
            Ending,
            Ended,
        }
        stream::unfold(State::Writing(self), |state| async move {
            let (data, state) = match state {
                State::Writing(mut answer) => match answer.next().await {
                    Ok(Event::Token(choice)) => (answer.json(&[choice], None).to_string(), State::Writing(answer)),
                    Ok(Event::End(finish)) => (answer.json(&[], Some(finish)).to_string(), State::Ending),
                    Err(failure) => (failure.json().to_string(), State::Ending),
                },
                State::Ending => ("[DONE]".to_owned(), State::Ended),
                State::Ended => return None,
            };
            Some((Ok(sse::Event::default().data(data)), state))
        })
    }

    fn json(&self, choices: &[Choice], finish: Option<Finish>) -> Value {
        let letters: Vec<char> =
            choices.iter().map(|choice| self.engine.models().decoder.letter(choice.token)).collect();
        let text: String = letters.iter().collect();
        let logprobs = self.logprobs.then(|| {
            let tokens: Vec<String> = letters.iter().map(char::to_string).collect();
            let logprobs: Vec<f32> = choices.iter().map(|choice| choice.logprob).collect();
            json!({ "tokens": tokens, "token_logprobs": logprobs })
        });
        let choice =
            json!({ "index": 0, "text": text, "finish_reason": finish.map(Finish::name), "logprobs": logprobs });
        json!({ "object": "text_completion", "model": self.model, "choices": [choice] })
    }
}
