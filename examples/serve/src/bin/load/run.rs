//! Runs: a crowd that asks without a pause, and arrivals at random times.

use crate::Result;
use crate::client::{Asker, Outcome};
use crate::measured::{Long, Measured};
use futures_util::stream::{FuturesUnordered, StreamExt};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};
use tokio::time::{sleep_until, timeout};

/// Requests under way, at most: an arrival beyond them counts as failed.
const MOST_UNDER_WAY: usize = 4096;
/// Time between two looks at the server's memory.
const LOOK: Duration = Duration::from_secs(5);

/// `count` askers; each asks again as soon as it has its answer. The first third of the time does not count: short
/// requests are more of the first answers than of the others.
pub(crate) async fn crowd(asker: &Asker, count: usize, length: Duration) -> Result<Measured> {
    let (bar, before, start) = (bar("capacity", length), asker.metrics().await?, Instant::now());
    let (mut outcomes, warm) = (Vec::new(), length / 3);
    let ask = || async {
        let request = asker.workload.borrow_mut().next();
        asker.ask(request).await
    };
    let mut under_way: FuturesUnordered<_> = (0..count).map(|_| ask()).collect();
    while let Some(outcome) = under_way.next().await {
        if start.elapsed() >= length {
            break;
        }
        bar.set_position(start.elapsed().as_secs());
        if start.elapsed() >= warm {
            outcomes.push(outcome);
        }
        under_way.push(ask());
    }
    let seconds = (start.elapsed() - warm).as_secs_f64();
    let steps = [before, asker.metrics().await?];
    drop(under_way);
    bar.finish_and_clear();
    Ok(Measured { load: f64::NAN, offered: f64::NAN, seconds, outcomes, steps })
}

/// Arrivals at random times, at a mean rate a second, whether the server keeps up or not.
pub(crate) async fn arrivals(asker: &Asker, load: (f64, f64), length: Duration) -> Result<Measured> {
    watched(asker, load, length, &mut |_, _| {}).await
}

/// One long run, during which the server's memory is looked at.
pub(crate) async fn long(asker: &Asker, load: (f64, f64), length: Duration) -> Result<Long> {
    let mut memory = Vec::new();
    let measured = watched(asker, load, length, &mut |time, mebibytes| memory.push((time, mebibytes))).await?;
    Ok(Long { measured, memory })
}

async fn watched(
    asker: &Asker,
    (load, per_second): (f64, f64),
    length: Duration,
    look: &mut dyn FnMut(Duration, f64),
) -> Result<Measured> {
    let (bar, before, start) = (bar(&format!("{load:.2} × capacity"), length), asker.metrics().await?, Instant::now());
    let (mut outcomes, mut under_way, mut offered) = (Vec::new(), FuturesUnordered::new(), 0usize);
    let (mut next, mut next_look) = (start, start + LOOK);
    loop {
        while let Ok(Some(outcome)) = timeout(Duration::ZERO, under_way.next()).await {
            outcomes.push(outcome);
        }
        let now = Instant::now();
        if now >= start + length {
            break;
        }
        bar.set_position(start.elapsed().as_secs());
        if now >= next_look {
            look(start.elapsed(), asker.metrics().await?.mebibytes());
            next_look += LOOK;
        }
        if now >= next {
            let (request, pause) = {
                let mut workload = asker.workload.borrow_mut();
                (workload.next(), workload.pause(per_second))
            };
            (next, offered) = (next + pause, offered + 1);
            if under_way.len() < MOST_UNDER_WAY {
                under_way.push(asker.ask(request));
            } else {
                outcomes.push(Outcome::Failed("too many requests under way".to_owned()));
            }
            continue;
        }
        let until = next.min(next_look).min(start + length);
        tokio::select! {
            () = sleep_until(until.into()) => {}
            Some(outcome) = under_way.next() => outcomes.push(outcome),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    while let Some(outcome) = under_way.next().await {
        outcomes.push(outcome);
    }
    bar.finish_and_clear();
    let steps = [before, asker.metrics().await?];
    Ok(Measured { load, offered: offered as f64 / seconds, seconds, outcomes, steps })
}

fn bar(what: &str, length: Duration) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:16} {bar:40} {pos}/{len} s");
    let bar = ProgressBar::new(length.as_secs()).with_message(what.to_owned());
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
