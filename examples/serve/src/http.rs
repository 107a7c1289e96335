//! The server's HTTP side: routes, and the end of a server that is told to stop.

mod completions;
mod embeddings;
mod error;

use crate::Result;
use crate::engine::Engine;
use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use std::future::Future;
use std::time::Duration;
use tokio::net::TcpListener;

/// Bytes that a request may have.
const MOST_BYTES: usize = 1 << 20;
/// Time that is left, at the end, to answers whose deadline is near.
const GRACE: Duration = Duration::from_secs(1);

/// Serves on a socket until `shutdown` is there; then requests under way come to their end, or to their deadline, and the engine
/// ends.
///
/// # Errors
/// If the socket fails.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let longest = engine.limits().deadline + GRACE;
    let (told, heard) = tokio::sync::oneshot::channel();
    let shutdown = async {
        shutdown.await;
        let _ = told.send(());
    };
    let too_long = async {
        // If the server ends first, nobody tells.
        let _ = heard.await;
        tokio::time::sleep(longest).await;
    };
    // A letter is a small packet: it must not wait until the one before it is acknowledged.
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    let server = axum::serve(listener, routes(engine.clone())).with_graceful_shutdown(shutdown);
    let done = tokio::select! {
        biased;
        done = async { server.await } => done,
        () = too_long => Ok(()),
    };
    engine.stop();
    Ok(done?)
}

fn routes(engine: Engine) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::answer))
        .route("/v1/embeddings", post(embeddings::answer))
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .layer(DefaultBodyLimit::max(MOST_BYTES))
        .with_state(engine)
}

async fn metrics(State(engine): State<Engine>) -> String {
    engine.metrics().text()
}

async fn health(State(engine): State<Engine>) -> (StatusCode, &'static str) {
    if engine.is_alive() {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the engine has ended\n")
    }
}
