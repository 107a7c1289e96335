//! A worker: one peer, told what to do line by line.

use crate::failure::Result;
use crate::peer::Peer;
use crate::protocol::{Reply, Request};
use serde::de::DeserializeOwned;
use std::io::{BufRead, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Answers until nobody asks any more.
pub(crate) fn serve<T: DeserializeOwned>(version: String, peer: &mut dyn Peer<T>) -> Result<()> {
    say(&Reply::Ready { version })?;
    for line in std::io::stdin().lock().lines() {
        let request = serde_json::from_str(&line?)?;
        // Some libraries panic where others return an error.
        let reply = catch_unwind(AssertUnwindSafe(|| answer(peer, request)));
        let reply = reply.unwrap_or_else(|_| Err("panicked: see above".into()));
        say(&reply.unwrap_or_else(|e| Reply::Failed { why: e.to_string() }))?;
    }
    Ok(())
}

fn answer<T>(peer: &mut dyn Peer<T>, request: Request<T>) -> Result<Reply> {
    Ok(match request {
        Request::Prepare(task) => match peer.supports(&task) {
            Ok(()) => Reply::Prepared { how: peer.prepare(&task)? },
            Err(why) => Reply::Unsupported { why },
        },
        Request::Burst { runs } => {
            let mut seconds = Vec::with_capacity(runs);
            for _ in 0..runs {
                let start = Instant::now();
                peer.run()?;
                seconds.push(start.elapsed().as_secs_f64());
            }
            Reply::Seconds(seconds)
        }
        Request::Output { file } => {
            crate::case::write(&file, &peer.output()?)?;
            Reply::Written
        }
    })
}

fn say(reply: &Reply) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", serde_json::to_string(reply)?)?;
    Ok(stdout.flush()?)
}
