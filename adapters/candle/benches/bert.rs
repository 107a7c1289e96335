//! BERT of all-MiniLM-L6-v2 on 32 padded texts: candle-transformers' own, and the same with this attention. And attention
//! alone: this package's operation, and a bare call of `sdpa` on the same memory.
//!
//! In turns, shuffled. Printed are medians, and medians of the ratios of one turn.
//!
//! `cargo bench --bench bert [-- --longest 128] [--turns 41]`

#[path = "../../../benches/support/interleaved.rs"]
mod interleaved;
#[path = "../examples/bert/minilm.rs"]
mod minilm;
#[path = "../examples/bert/model.rs"]
mod model;

use candle_core::{CpuStorage, Device, Storage, Tensor};
use candle_transformers::models::bert::BertModel;
use interleaved::median;
use minilm::{Batch, MiniLm, Result};
use model::Bert;
use rand::seq::SliceRandom;
use sdpa_candle::Sdpa;
use sdpa_candle::sdpa::{Attention, Inputs, Mask, Outputs, View, ViewMut};
use std::hint::black_box;
use std::time::Instant;

const TEXTS: usize = 32;
const SHORTEST: usize = 8;
const TEXT: &str = "The harbour froze twice that winter, and both times the ferries ran late for a week. ";

fn main() -> Result<()> {
    let (longest, turns) = (number("--longest", 128)?, number("--turns", 41)?);
    let Some(minilm) = MiniLm::load()? else { return Ok(()) };
    let words = minilm.tokens(&TEXT.repeat(longest.div_ceil(16)))?;
    let length = |n: usize| SHORTEST + n * (longest - SHORTEST) / (TEXTS - 1);
    let texts: Vec<_> = (0..TEXTS).map(|n| words[..length(n)].to_vec()).collect();
    let batch = Batch::new(&texts)?;
    let candle = BertModel::load(minilm.weights.clone(), &minilm.config)?;
    let ours = Bert::load(&minilm.weights, &minilm.config)?;
    println!("{TEXTS} texts of {SHORTEST} to {longest} tokens, {} threads", rayon::current_num_threads());
    in_turns(
        turns,
        &mut [
            ("candle's BERT", &mut || {
                drop(black_box(candle.forward(&batch.ids, &batch.types, Some(&batch.mask)).unwrap()))
            }),
            ("with this attention", &mut || {
                drop(black_box(ours.forward(&batch.ids, &batch.types, &batch.mask).unwrap()))
            }),
        ],
    );

    let (heads, dim) =
        (minilm.config.num_attention_heads, minilm.config.hidden_size / minilm.config.num_attention_heads);
    let stored = [TEXTS, longest, heads, dim];
    let random = || Tensor::randn(0f32, 1.0, &stored[..], &Device::Cpu)?.transpose(1, 2);
    let (q, k, v) = (random()?, random()?, random()?);
    let mask = batch.mask.ne(0u32)?.reshape((TEXTS, 1, 1, longest))?;
    let sdpa = Sdpa::default().keep_mask(&mask);
    let bytes = mask.flatten_all()?.to_vec1::<u8>()?;
    let mut kept = vec![0f32; stored.iter().product()];
    in_turns(
        turns * 10,
        &mut [
            ("bare call, new output", &mut || {
                let mut out = vec![0f32; stored.iter().product()];
                bare([&q, &k, &v], &bytes, stored, &mut out);
                black_box(out);
            }),
            ("this operation", &mut || drop(black_box(sdpa.forward(&q, &k, &v).unwrap()))),
            ("bare call, kept output", &mut || bare([&q, &k, &v], &bytes, stored, &mut kept)),
        ],
    );
    Ok(())
}

/// The number after a flag.
fn number(flag: &str, default: usize) -> Result<usize> {
    let value = std::env::args().skip_while(|argument| argument != flag).nth(1);
    Ok(value.map_or(Ok(default), |value| value.parse())?)
}

/// A call of `sdpa` on the memory of tensors stored batch, rows, heads, dim.
fn bare(qkv: [&Tensor; 3], mask: &[u8], stored: [usize; 4], out: &mut [f32]) {
    let storages = qkv.map(|x| x.storage_and_layout().0);
    let [q, k, v] = storages.each_ref().map(|storage| match &**storage {
        Storage::Cpu(CpuStorage::F32(data)) => View::blhd(data, stored).unwrap(),
        _ => unreachable!("made on the CPU, of f32"),
    });
    let mask = View::bhld(mask, [stored[0], 1, 1, stored[1]]).unwrap();
    let inputs = Inputs::new(q, k, v).mask(Mask::keep(mask));
    sdpa_candle::sdpa::attention(&Attention::new(), inputs, Outputs::new(ViewMut::blhd(out, stored).unwrap())).unwrap();
}

/// Runs every case once in each turn, in an order that is shuffled each time; the first turn does not count.
fn in_turns(turns: usize, cases: &mut [(&str, &mut dyn FnMut())]) {
    let mut seconds = vec![Vec::new(); cases.len()];
    let mut order: Vec<_> = (0..cases.len()).collect();
    for turn in 0..=turns {
        order.shuffle(&mut rand::rng());
        for &case in &order {
            let start = Instant::now();
            cases[case].1();
            if turn > 0 {
                seconds[case].push(start.elapsed().as_secs_f64());
            }
        }
    }
    for ((name, _), own) in cases.iter().zip(&seconds) {
        let mut ratios: Vec<_> = own.iter().zip(&seconds[0]).map(|(own, first)| own / first).collect();
        let (seconds, ratio) = (median(&mut own.clone()), median(&mut ratios));
        println!("{name:>24} {:8.3} ms, {ratio:.3} of the first", 1e3 * seconds);
    }
}
