//! Times of all ranks together, of one alone, and of as many callers at once that share nothing: what the machine gives at
//! best. In shuffled turns, since machines change their speed.

use crate::numbers::Stripe;
use crate::{Asked, share};
use mpi::collective::SystemOperation;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;
use sdpa::{Inputs, Outputs, ViewMut};
use sdpa_mpi::Ranks;
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

/// Kind of calls that are timed.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Together,
    Alone,
    Apart,
}

/// Sleep between polls: a rank that waits leaves its core to others.
const NAP: Duration = Duration::from_micros(200);

/// Times in seconds, and the largest share of its time that a rank waited, for each turn.
#[derive(Default)]
struct Times {
    together: Vec<f64>,
    alone: Vec<f64>,
    apart: Vec<f64>,
    waiting: Vec<f64>,
}

pub(crate) fn run(
    world: &SimpleCommunicator,
    asked: &Asked,
    ranks: &Ranks<'_>,
    stripes: &mut [Stripe; 2],
) -> Result<(), Box<dyn Error>> {
    let mut all = Stripe::new(asked, 0..asked.shape[2]);
    let (mut times, mut rng) = (Times::default(), ChaCha8Rng::seed_from_u64(1));
    for _ in 0..asked.turns {
        let mut kinds = [Kind::Together, Kind::Alone, Kind::Apart];
        kinds.shuffle(&mut rng);
        for kind in kinds {
            rest(world);
            let begin = Instant::now();
            let mut waiting = 0.0;
            match kind {
                Kind::Together => {
                    let report = ranks.attention(&asked.attention(), share(stripes)?)?;
                    waiting = report.waiting.as_secs_f64() / report.total.as_secs_f64();
                }
                Kind::Alone if world.rank() > 0 => {}
                Kind::Alone | Kind::Apart => whole(asked, &mut all)?,
            }
            let [time, waiting] = longest(world, [begin.elapsed().as_secs_f64(), waiting]);
            match kind {
                Kind::Together => {
                    times.together.push(time);
                    times.waiting.push(waiting);
                }
                Kind::Alone => times.alone.push(time),
                Kind::Apart => times.apart.push(time),
            }
        }
    }
    if world.rank() == 0 {
        show(times, f64::from(world.size()));
    }
    Ok(())
}

fn show(times: Times, ranks: f64) {
    let [together, alone, apart, waiting] =
        [times.together, times.alone, times.apart, times.waiting].map(|mut times| median(&mut times));
    let ms = |seconds: f64| 1e3 * seconds;
    println!(
        "medians: one alone {:.1} ms; {ranks} ranks together {:.1} ms, {:.3} ×",
        ms(alone),
        ms(together),
        alone / together
    );
    println!(
        "{ranks} callers at once that share nothing: {:.1} ms each, {:.3} ×; together they reach {:.3} of that",
        ms(apart),
        ranks * alone / apart,
        apart / (ranks * together)
    );
    println!("the rank that waits most: {:.1} % of its time", 100.0 * waiting);
}

/// Computes the whole prompt in this process.
fn whole(asked: &Asked, all: &mut Stripe) -> Result<(), Box<dyn Error>> {
    let Stripe { qkv: [q, k, v], out, .. } = all;
    let inputs = Inputs::new(q.tensor()?, k.tensor()?, v.tensor()?);
    sdpa::attention(&asked.attention(), inputs, Outputs::new(ViewMut::bhld(out, asked.shape)?))?;
    Ok(())
}

/// Waits for all ranks, asleep.
fn rest(world: &SimpleCommunicator) {
    let mut barrier = world.immediate_barrier();
    while let Err(waits) = barrier.test() {
        barrier = waits;
        thread::sleep(NAP);
    }
}

/// Returns the largest of each number on all ranks; those that are done early sleep.
fn longest(world: &SimpleCommunicator, mine: [f64; 2]) -> [f64; 2] {
    rest(world);
    let mut all = [0.0; 2];
    world.all_reduce_into(&mine[..], &mut all[..], SystemOperation::max());
    all
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
