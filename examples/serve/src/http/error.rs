//! Refusals and failures as answers, in the form that OpenAI's API has.

use crate::engine::{Engine, Refusal};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::time::Instant;

/// Seconds after which a refused client may try again.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// An answer that is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    status: StatusCode,
    kind: &'static str,
    message: String,
}

impl Failure {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into() }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    pub(super) fn late(engine: &Engine) -> Self {
        let message = format!("not done within {} ms", engine.limits().deadline.as_millis());
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message)
    }

    /// The engine no longer answers: it has seen the deadline first, has failed, or has ended.
    pub(super) fn given_up(engine: &Engine, deadline: Instant) -> Self {
        if Instant::now() >= deadline {
            return Self::late(engine);
        }
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "the engine has given this request up")
    }

    pub(super) fn no_embedder() -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "not_implemented", "this server was started without a sentence encoder")
    }

    /// Takes a refusal, and counts it.
    pub(super) fn refused(engine: &Engine, refusal: Refusal) -> Self {
        match refusal {
            Refusal::Invalid(message) => Self::invalid(message),
            Refusal::Busy(what) => {
                engine.metrics().refused.add(1);
                Self::new(StatusCode::TOO_MANY_REQUESTS, "overloaded", format!("exhausted: {what}"))
            }
            Refusal::Closing => Self::new(StatusCode::SERVICE_UNAVAILABLE, "shutdown", "the server is going down"),
        }
    }

    /// The error as JSON: the body of an answer, or an event of a stream.
    pub(super) fn json(&self) -> Value {
        json!({ "error": { "message": self.message, "type": self.kind, "code": self.status.as_u16() } })
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        response
    }
}

/// Reads the body of a request.
pub(super) fn read<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, Failure> {
    let body = body.map_err(|e| Failure::new(e.status(), "invalid_request_error", e.body_text()))?;
    serde_json::from_slice(&body).map_err(|e| Failure::invalid(format!("body: {e}")))
}
