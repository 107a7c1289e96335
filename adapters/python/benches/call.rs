//! The Rust side of `call.py`, which starts it: for each line it reads, `kept` or `new`, it makes four calls and writes the median
//! of the last three in nanoseconds.

use sdpa::{Attention, Exec, Inputs, Outputs, View, ViewMut};
use std::hint::black_box;
use std::io::{Write, stdin, stdout};
use std::time::Instant;

/// Batch, heads, rows, head_dim; as many keys as rows.
const SHAPE: [usize; 4] = [1, 12, 512, 64];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [q, k, v] = [1, 2, 3].map(numbers);
    let mut kept = vec![0.0; q.len()];
    for line in stdin().lines() {
        let output = line?;
        let mut nanoseconds = [0; 4];
        for time in &mut nanoseconds {
            let start = Instant::now();
            match &*output {
                "kept" => call([&q, &k, &v], &mut kept)?,
                _ => {
                    let mut new = vec![0.0; q.len()];
                    call([&q, &k, &v], &mut new)?;
                    drop(black_box(new));
                }
            }
            *time = start.elapsed().as_nanos();
        }
        nanoseconds[1..].sort_unstable();
        writeln!(stdout(), "{}", nanoseconds[2])?;
    }
    Ok(())
}

/// The call that Python makes, on one thread.
fn call([q, k, v]: [&[f32]; 3], out: &mut [f32]) -> Result<(), sdpa::Error> {
    let inputs = Inputs::new(View::bhld(q, SHAPE)?, View::bhld(k, SHAPE)?, View::bhld(v, SHAPE)?);
    let problem = Attention::new().problem(inputs, Outputs::new(ViewMut::bhld(out, SHAPE)?))?;
    problem.run_once(Exec::serial());
    Ok(())
}

/// Numbers between −1 and 1, by a linear congruential generator.
fn numbers(seed: u32) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(SHAPE.iter().product()).collect()
}
