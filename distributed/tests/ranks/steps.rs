//! Decode steps over caches that are cut over ranks, in every element type: the bits of one cache.

use crate::PATIENT;
use crate::launch::FINE;
use crate::support::{Rng, Tensors};
use core::ops::Range;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{
    Alignment, Attention, Dtype, Exec, Inputs, Int4, KeyScales, KvCache, KvShape, Mask, Outputs, View, ViewMut, Window,
};
use sdpa_mpi::{Merges, Ranks, Step};

const KEY_BLOCK: usize = 256;

/// Makes a cache of a random element type.
fn empty(form: usize, [batch, heads]: [usize; 2], dims: [usize; 2]) -> KvCache {
    let cache =
        KvCache::new(batch, KvShape { kv_heads: heads, head_dim: dims[0], value_dim: dims[1] }).expect("good sizes");
    match form {
        0 => Ok(cache),
        1 => cache.dtype(Dtype::Bf16),
        2 => cache.dtype(Dtype::F16),
        3 => cache.int8(KeyScales::PerToken),
        _ => cache.int4(Int4::Centred),
    }
    .expect("good dimensions")
}

/// Cuts keys over ranks, by whole blocks; some ranks have none.
fn cut(keys: usize, ranks: usize, rng: &mut Rng) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> = (1..ranks).map(|_| rng.below(keys / KEY_BLOCK + 1) * KEY_BLOCK).collect();
    cuts.sort_unstable();
    cuts.insert(0, 0);
    cuts.push(keys);
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

/// Output and log-sum-exp, not yet written.
struct Written([usize; 4], Vec<f32>, Vec<f32>);

impl Written {
    fn new([b, h, l, d]: [usize; 4]) -> Self {
        Self([b, h, l, d], vec![f32::NAN; b * h * l * d], vec![f32::NAN; b * h * l])
    }

    fn outputs(&mut self) -> Outputs<'_> {
        let Self([b, h, l, d], out, lse) = self;
        let lse = ViewMut::bhl(lse, [*b, *h, *l]).expect("it fits");
        Outputs::new(ViewMut::bhld(out, [*b, *h, *l, *d]).expect("it fits")).lse(lse)
    }

    fn bits(&self) -> Vec<u32> {
        self.1.iter().chain(&self.2).map(|x| x.to_bits()).collect()
    }
}

fn settings(rng: &mut Rng, keys: usize, rows: usize) -> Attention {
    let at_end = Alignment::Offset(keys as isize - rows as isize);
    match rng.below(4) {
        0 => Attention::new(),
        1 => Attention::new().causal().align(at_end),
        2 => Attention::new().causal().align(at_end).softcap(2.0),
        _ => Attention::new().window(Window::inclusive(Some(rng.below(keys + 1)), None).keep_first(4)).align(at_end),
    }
}

pub(crate) fn run(world: &SimpleCommunicator, cases: u64, seed: u64) {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let ranks = Ranks::new(world, PATIENT).exec(Exec::serial());
    for case in 0..cases {
        let rng = &mut Rng::new(seed * 7919 + case);
        let (kv_heads, group, batch, rows) = (1 + rng.below(3), 1 + rng.below(4), 1 + rng.below(2), 1 + rng.below(4));
        let (keys, dims) = (rows + rng.below(3000), [rng.pick(&[8, 20, 64]), rng.pick(&[16, 24, 64])]);
        let heads = kv_heads * group;
        let tensors =
            Tensors::normal([batch, heads, kv_heads, rows, keys, dims[0], dims[1]], rng.below(1 << 30) as u64);
        let sinks: Vec<f32> = (0..heads).map(|head| head as f32 - 1.0).collect();
        let slopes: Vec<f32> = (0..heads).map(|head| 0.01 * head as f32).collect();
        let (attention, form, with_sinks) = (settings(rng, keys, rows), rng.below(5), rng.below(2) == 0);
        let cuts = cut(keys, size, rng);
        let cache_of = |keys: &Range<usize>| {
            let mut cache = empty(form, [batch, kv_heads], dims);
            if !keys.is_empty() {
                let [k, v] = [&tensors.k, &tensors.v].map(|x| x.view().rows(keys.clone()).expect("keys"));
                cache.append(k, v).expect("it fits");
            }
            cache
        };
        let (all, own) = (cache_of(&(0..keys)), cache_of(&cuts[rank]));
        let (q, shape) = (tensors.q.view(), [batch, heads, rows, dims[1]]);
        let shown: Option<Vec<bool>> =
            (rng.below(3) == 0).then(|| (0..rows * keys).map(|_| rng.below(4) > 0).collect());
        let shown = shown.as_ref().map(|shown| View::bhld(shown, [1, 1, rows, keys]).expect("it fits"));
        let inputs = |cache, keys: &Range<usize>| {
            let inputs = Inputs::cached(q, cache);
            let mask = shown.map(|shown| Mask::keep(shown.columns(keys.clone()).expect("keys")));
            let inputs = mask.map_or(inputs, |mask| inputs.mask(mask));
            if attention.alignment().is_some() { inputs.alibi(&slopes) } else { inputs }
        };
        let (mut expected, mut got) = (Written::new(shape), Written::new(shape));
        let whole = inputs(&all, &(0..keys));
        let whole = if with_sinks { whole.sinks(&sinks) } else { whole };
        attention.problem(whole, expected.outputs()).expect("a good call").run_once(Exec::serial());
        let step = Step::new(inputs(&own, &cuts[rank]), cuts[rank].start, got.outputs());
        let step = if with_sinks { step.sinks(&sinks) } else { step };
        let what =
            format!("seed {seed}, case {case}, rank {rank} of {size}: cache {form}, cuts {cuts:?}, {attention:?}");
        let report = ranks.step(&attention, step).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(got.bits() == expected.bits(), "{what}");
        // Merged in a tree, up to rounding.
        let mut tree = Written::new(shape);
        let step = Step::new(inputs(&own, &cuts[rank]), cuts[rank].start, tree.outputs()).merges(Merges::Tree);
        let step = if with_sinks { step.sinks(&sinks) } else { step };
        ranks.step(&attention, step).unwrap_or_else(|error| panic!("{what}: {error}"));
        for (got, expected) in [(&tree.1, &expected.1), (&tree.2, &expected.2)] {
            let far = got.iter().zip(expected).find(|(a, b)| a != b && (*a - *b).abs() > 4e-6 * b.abs().max(1.0));
            assert!(far.is_none(), "{what}: in a tree {far:?}");
        }
        let of_blocks = cuts.iter().filter(|keys| !keys.is_empty()).count();
        assert!(of_blocks > 1 || tree.bits() == expected.bits(), "{what}: in a tree of one");
        // States alone travel, at most once along the keys and to each other rank.
        let states = batch * heads * rows * (2 + dims[1].next_multiple_of(16)) * size_of::<f32>();
        assert!(report.sent <= states * size, "{what}: {report}");
    }
    println!("{rank}: {FINE}");
}
