//! burn's attention and this one on a call of BERT's size: 12 heads of 64, 512 rows and keys, f32.
//!
//! In turns, shuffled, on the same tensors: heads one after the other, and as projections leave them. Printed are medians,
//! and the median of the ratios of one turn.
//!
//! `cargo bench --bench bert_512 [-- --turns 101]`

#[path = "../../../benches/support/interleaved.rs"]
mod interleaved;

use burn_tensor::module::attention as burns;
use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{Device, Distribution, Tensor};
use interleaved::median;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;
use std::hint::black_box;
use std::time::Instant;

const SHAPE: [usize; 4] = [1, 12, 512, 64];
const OPTIONS: AttentionModuleOptions = AttentionModuleOptions { scale: None, softcap: None, is_causal: false };

fn main() {
    let turns = turns();
    println!("{SHAPE:?}, {} threads, {turns} turns, medians", rayon::current_num_threads());
    let [batch, heads, rows, dim] = SHAPE;
    let dense = || Tensor::<4>::random(SHAPE, Distribution::Normal(0.0, 1.0), &Device::default());
    let projected = || {
        let stored = [batch, rows, heads, dim];
        Tensor::<4>::random(stored, Distribution::Normal(0.0, 1.0), &Device::default()).swap_dims(1, 2)
    };
    println!("{:<28} {:>9} {:>9} {:>6}", "layout", "burn", "sdpa", "ratio");
    compare("heads one after the other", [dense(), dense(), dense()], turns);
    compare("as projections leave them", [projected(), projected(), projected()], turns);
}

fn turns() -> usize {
    let mut args = std::env::args().skip_while(|arg| arg != "--turns").skip(1);
    let turns = args.next().map_or(101, |n| n.parse().expect("--turns: a number"));
    if std::env::args().any(|arg| arg == "--test") { 3 } else { turns.max(1) }
}

/// Times both alternately, in either order, and prints a line.
fn compare(layout: &str, tensors: [Tensor<4>; 3], turns: usize) {
    let mut rng = ChaCha8Rng::seed_from_u64(25);
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..turns + 3 {
        let mut order = [0, 1];
        order.shuffle(&mut rng);
        let mut seconds = [0.0; 2];
        for which in order {
            let [q, k, v] = tensors.clone();
            let start = Instant::now();
            drop(black_box(match which {
                0 => burns(q, k, v, None, None, OPTIONS),
                _ => sdpa_burn::attention(q, k, v, None, None, OPTIONS).expect("a good call"),
            }));
            seconds[which] = start.elapsed().as_secs_f64();
        }
        // The first turns warm up.
        if turn >= 3 {
            times.iter_mut().zip(seconds).for_each(|(all, one)| all.push(one));
        }
    }
    let mut ratios: Vec<f64> = times[1].iter().zip(&times[0]).map(|(ours, burns)| ours / burns).collect();
    let [burns, ours] = times.each_mut().map(|all| median(all));
    println!("{layout:<28} {:>6.2} ms {:>6.2} ms {:>6.2}", burns * 1e3, ours * 1e3, median(&mut ratios));
}
