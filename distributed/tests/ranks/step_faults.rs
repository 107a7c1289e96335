//! Faults of decode steps: ranks that disagree about a step, die in it, or come late to it.

use crate::faults::{DIM, Fault, GUILTY, Kind, fault};
use sdpa::{Attention, Bf16, Inputs, KvCache, KvShape, Outputs, Tensor, View, ViewMut};
use sdpa_mpi::{Error, Merges, Ranks, Step};

/// Keys of each rank: a whole block.
const KEYS: usize = 256;

pub(crate) const FAULTS: [Fault; 16] = [
    fault("step softcap", "softcap: rank 1 has 3, but rank 0 has none", Kind::Said),
    fault("step sinks", "sinks of the step: rank 1 has [0.5], but rank 0 has [0.25]", Kind::Said),
    fault("step slopes", "alibi slopes: rank 1 has [0.5], but rank 0 has [0.25]", Kind::Said),
    fault("step element", "element type of q: rank 1 has bf16, but rank 0 has f32", Kind::Said),
    fault("step rows", "rows: rank 1 has 2, but rank 0 has 1", Kind::Said),
    fault("step shape", "value_dim: rank 1 has 7, but rank 0 has 8", Kind::Said),
    fault("step merges", "merges: rank 1 has tree, but rank 0 has in order", Kind::Said),
    fault("step gap", "keys 256..512: no rank has them", Kind::Said),
    fault("step overlap", "key 0: rank 0 has it, and so has rank 1", Kind::Said),
    fault(
        "step uneven",
        "rank 1 refused its part of the call: first key: 255, but must be a multiple of 256",
        Kind::Own,
    ),
    fault(
        "step positions",
        "rank 1 refused its part of the call: row positions: needs a call over all keys",
        Kind::Own,
    ),
    fault("step inputs", "rank 1 refused its part of the call: sinks: needs `Step::sinks`", Kind::Own),
    fault("step output", "rank 1 refused its part of the call: out: value_dim is 7, but v has 8", Kind::Own),
    fault("step late", "waited 3s in vain for rank 1: what it has of the step", Kind::Late),
    fault("step dead", "waited 3s in vain for rank 1: what it has of the step", Kind::Dies),
    fault("step dying", "waited 3s in vain for rank 1:", Kind::Dies),
];

/// A step over a block of keys of each rank, in which the guilty rank does something else.
pub(crate) fn call(ranks: &Ranks<'_>, name: &str, rank: usize, guilty: bool) -> Result<(), Error> {
    let is = |fault: &str| guilty && name == fault;
    let attention = if is("step softcap") { Attention::new().softcap(3.0) } else { Attention::new() };
    let attention = attention.align(sdpa::Alignment::Offset(0));
    let value_dim = if is("step shape") { 7 } else { DIM };
    let rows = if is("step rows") { 2 } else { 1 };
    let (k, v) = (vec![0.25f32; KEYS * DIM], vec![1.0f32; KEYS * value_dim]);
    let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: DIM, value_dim })?;
    cache.append(View::bhld(&k, [1, 1, KEYS, DIM])?, View::bhld(&v, [1, 1, KEYS, value_dim])?)?;
    let (q, short) = (vec![0.5f32; rows * DIM], vec![Bf16::from_f32(0.5); rows * DIM]);
    let q: Tensor<'_> = match is("step element") {
        true => View::bhld(&short, [1, 1, rows, DIM])?.into(),
        false => View::bhld(&q, [1, 1, rows, DIM])?.into(),
    };
    let slopes = [if is("step slopes") { 0.5 } else { 0.25 }];
    let sinks = [if is("step sinks") { 0.5 } else { 0.25 }];
    let width = if is("step output") { 7 } else { value_dim };
    let mut out = vec![7.0f32; rows * width];
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, rows, width])?);
    let first = match name {
        "step gap" if rank >= GUILTY => (rank + 1) * KEYS,
        "step overlap" if guilty => 0,
        "step uneven" if guilty => KEYS - 1,
        _ => rank * KEYS,
    };
    let inputs = Inputs::cached(q, &cache).alibi(&slopes);
    let inputs = if is("step positions") { inputs.row_positions(&[&[3]]) } else { inputs };
    let inputs = if is("step inputs") { inputs.sinks(&sinks) } else { inputs };
    let step = Step::new(inputs, first, outputs).sinks(&sinks);
    let step = if is("step merges") { step.merges(Merges::Tree) } else { step };
    let result = ranks.step(&attention, step);
    assert!(result.is_ok() || out.iter().all(|&x| x == 7.0), "outputs were written");
    result.map(|_| ())
}
