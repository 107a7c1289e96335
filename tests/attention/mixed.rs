//! Mixed batches: prompts and single steps over some sequences of a cache or of pages, in one call. The bits are those of
//! the same sequences as ragged tensors, and of each sequence in a call of its own.

use crate::counting::counted;
use crate::kv_support::{Pool, append_part, cache_of, same_full, same_oracle};
use crate::options::{Case, Full, Wanted, same_rows};
use crate::support::{Layout, Rng, Tensor, assert_same_bits, execs};
use sdpa::{
    Alignment, Attention, Dtype, Error, Exec, Inputs, KeyScales, KvCache, KvShape, Outputs, Plan, View, ViewMut,
    Workspace,
};

const HEADS: [(usize, usize); 4] = [(1, 1), (4, 2), (3, 1), (8, 2)];
const DIMS: [usize; 5] = [8, 16, 33, 64, 80];

/// Four ragged sequences: rows from none to several tiles, keys from none to several blocks, any options.
fn ragged(seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    loop {
        let (heads, kv_heads) = rng.pick(&HEADS);
        let sizes = [4, heads, kv_heads, rng.pick(&[1, 2, 5, 40]), rng.pick(&[17, 257, 700]), rng.pick(&DIMS), 80];
        let case = Case { kv_lens: None, ..Case::of_sizes(&mut rng, sizes) };
        if case.ragged.is_some() {
            return case;
        }
    }
}

/// The sequences of a case at other places of a cache or of pages.
struct Homes {
    /// The sequences side by side, reordered.
    at_home: Case,
    /// Place of each sequence.
    places: Vec<usize>,
}

impl Homes {
    fn of(case: &Case, rng: &mut Rng) -> Self {
        let mut order: Vec<usize> = (0..case.batch()).collect();
        (1..order.len()).for_each(|i| order.swap(i, rng.below(i + 1)));
        let places = (0..order.len()).map(|s| order.iter().position(|&sequence| sequence == s).unwrap()).collect();
        let side_by_side = Case { alignment: Some(Alignment::TopLeft), ..case.clone() }.padded(f32::NAN);
        Self { at_home: side_by_side.reordered(&order), places }
    }
}

/// The ragged queries of a case over keys and values from elsewhere.
fn over<'a>(case: &'a Case, source: Inputs<'a>, places: &'a [usize]) -> Inputs<'a> {
    source.sequences(places).ragged_queries(&case.ragged.as_ref().unwrap()[0])
}

fn every(seeds: core::ops::Range<u64>, mut check: impl FnMut(&str, &mut Rng, &Case, Exec)) {
    for seed in seeds {
        let case = ragged(seed);
        for (isa, exec) in execs() {
            for threads in [1, 64] {
                check(&format!("seed {seed}, {isa}"), &mut Rng::new(!seed), &case, exec.threads(threads));
            }
        }
    }
}

#[test]
fn ragged_queries_over_caches_and_pages_are_ragged_tensors() {
    let wanted = [Wanted::LEAST, Wanted { mass: false, ..Wanted::ALL }];
    every(0..40, |what, rng, case, exec| {
        let Homes { at_home, places } = &Homes::of(case, rng);
        let cache = cache_of(at_home, rng);
        let pool = Pool::of(at_home, rng.pick(&[1, 16, 17, 256]), [Layout::Bhld; 2], f32::NAN, rng);
        for wanted in wanted {
            let expected = case.run(exec, wanted);
            let cached = over(case, Inputs::cached(case.q.view(), &cache), places);
            same_full(&format!("{what}, cache"), &case.run_over(cached, exec, wanted), &expected);
            let paged = over(case, Inputs::paged(case.q.view(), pool.pages()), places);
            same_full(&format!("{what}, pages"), &case.run_over(paged, exec, wanted), &expected);
        }
    });
}

#[test]
fn each_sequence_is_a_call_of_its_own() {
    every(100..120, |what, rng, case, exec| {
        let Homes { at_home, places } = &Homes::of(case, rng);
        let cache = cache_of(at_home, rng);
        let cached = over(case, Inputs::cached(case.q.view(), &cache), places);
        let whole = case.run_over(cached, exec, Wanted::LEAST);
        for (b, place) in places.iter().enumerate() {
            let alone = case.sequence(b);
            let over_tensors = alone.run(exec, Wanted::LEAST);
            let subset = Inputs::cached(alone.q.view(), &cache).sequences(core::slice::from_ref(place));
            same_full(&format!("{what}, subset"), &alone.run_over(subset, exec, Wanted::LEAST), &over_tensors);
            let row = |[_, h, i]: [usize; 3]| Some([b, h, i]);
            same_rows(what, (&alone, &over_tensors), (case, &whole), row);
        }
    });
}

#[test]
fn the_oracle_reads_the_same_sequences() {
    for seed in 200..230 {
        let (case, mut rng) = (ragged(seed), Rng::new(!seed));
        let Homes { at_home, places } = &Homes::of(&case, &mut rng);
        let cache = cache_of(at_home, &mut rng);
        let cached = over(&case, Inputs::cached(case.q.view(), &cache), places);
        same_oracle(&format!("seed {seed}"), &case.oracle_over(cached), &case.oracle());
    }
}

/// Key weight sums have a row for each sequence of the call, not for each of the cache.
#[test]
fn key_weight_sums_go_by_the_sequences_of_the_call() {
    every(300..310, |what, rng, case, exec| {
        let Homes { at_home, places } = &Homes::of(case, rng);
        let cache = cache_of(at_home, rng);
        let expected = case.run(exec, Wanted::MASS).mass.unwrap();
        let (kv_heads, keys) = (case.kv_heads(), case.longest().1);
        let mass = Tensor::filled([case.batch(), kv_heads, keys, 1], f32::NAN);
        let mut got = Full { mass: Some(mass), ..case.unwritten(Wanted::LEAST) };
        let cached = over(case, Inputs::cached(case.q.view(), &cache), places);
        case.run_over_into(cached, exec, &mut got, &mut Workspace::new());
        for b in 0..case.batch() {
            let (kb, first) = case.key_at(b, 0);
            let mass = got.mass.as_ref().unwrap();
            let n = case.keys(b);
            let its = |x: &Tensor, b: usize, first: usize| x.part(b..b + 1, 0..kv_heads, first..first + n);
            assert_same_bits(what, &its(mass, b, 0), &its(&expected, kb, first));
            assert!(mass.part(b..b + 1, 0..kv_heads, n..keys).data.iter().all(|&x| x == 0.0), "{what}");
        }
    });
}

/// A cache of three sequences with 600, 0 and 300 keys.
fn three(dtype: Option<Dtype>) -> (KvCache, Case) {
    let mut rng = Rng::new(5);
    let case = Case { kv_lens: Some(vec![600, 0, 300]), ..Case::plain(&mut rng, [3, 8, 2, 1, 600, 64, 64]) };
    let cache = KvCache::new(3, KvShape { kv_heads: 2, head_dim: 64, value_dim: 64 }).unwrap();
    let mut cache = match dtype {
        Some(dtype) => cache.dtype(dtype).unwrap(),
        None => cache.int8(KeyScales::PerToken).unwrap(),
    };
    (0..3).for_each(|b| append_part(&mut cache, &case, b, 0..case.kv_len(b)));
    (cache, case)
}

/// A prompt of 300 rows is shared out by rows, the steps beside it by keys; a warm call allocates nothing.
#[test]
fn prompts_and_steps_are_planned_together() {
    let ends = [0, 300, 301, 301, 302];
    let places = [2, 0, 0, 1];
    let q = Tensor::normal([1, 8, 302, 64], &mut Rng::new(9));
    let attention = Attention::new().causal().align(Alignment::BottomRight);
    for dtype in [Some(Dtype::F32), Some(Dtype::Bf16), Some(Dtype::F16), None] {
        let (cache, _) = three(dtype);
        for (isa, exec) in execs() {
            let (mut out, mut workspace) = (vec![f32::NAN; 8 * 302 * 64], Workspace::new());
            let mut run = |exec: Exec, out: &mut [f32], q: View<'_>, places: &[usize], ends: &[usize]| {
                let inputs = Inputs::cached(q, &cache).sequences(places).ragged_queries(ends);
                let outputs = Outputs::new(ViewMut::bhld(out, [1, 8, q.shape()[2], 64]).unwrap());
                let problem = attention.problem(inputs, outputs).unwrap();
                let plan = Plan::new(&problem, exec);
                problem.run(&plan, &mut workspace);
                plan
            };
            let plan = run(exec, &mut out, q.view(), &places, &ends);
            assert!(plan.partials_bytes() > 0 && plan.tasks() > 2, "{isa}: {plan}");
            let warm = counted(|| _ = run(exec, &mut out, q.view(), &places, &ends));
            assert_eq!(warm, (0, 0), "{isa}");
            for (n, &place) in places.iter().enumerate() {
                let rows = ends[n]..ends[n + 1];
                let part = q.rows(rows.clone());
                let mut alone = vec![0.0; 8 * rows.len() * 64];
                run(exec.threads(3), &mut alone, part.view(), &[place], &[0, rows.len()]);
                let whole = View::bhld(&out, [1, 8, 302, 64]).unwrap();
                for (i, x) in alone.iter().enumerate() {
                    let at = [0, i / 64 / rows.len(), rows.start + i / 64 % rows.len(), i % 64];
                    assert_eq!(x.to_bits(), whole.get(at).unwrap().to_bits(), "{isa}, {dtype:?}, {at:?}");
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let (cache, case) = three(Some(Dtype::F32));
    let q = vec![0.0; 8 * 4 * 64];
    let view = |batch: usize, rows: usize| View::bhld(&q[..batch * 8 * rows * 64], [batch, 8, rows, 64]).unwrap();
    let cached = |q| Inputs::cached(q, &cache);
    let message = |inputs: Inputs<'_>| match inputs.shape() {
        Err(e @ (Error::Mismatch { .. } | Error::Needs { .. } | Error::Sequence { .. } | Error::Entry { .. })) => {
            e.to_string()
        }
        other => panic!("{other:?}"),
    };
    let tensors = || Inputs::new(view(3, 1), case.k.view(), case.v.view());
    for (inputs, expected) in [
        (cached(view(2, 1)), "cache: number of sequences is 3, but q (batch) has 2"),
        (cached(view(2, 1)).sequences(&[0]), "sequences: length is 1, but q (batch) has 2"),
        (cached(view(2, 1)).sequences(&[0, 3]), "sequences: there is no sequence 3, the cache has 3"),
        (cached(view(1, 4)).ragged_queries(&[0, 4]), "cache: number of sequences is 3, but ragged queries has 1"),
        (
            cached(view(1, 4)).ragged_queries(&[0, 1, 2, 3]),
            "ragged queries: entry 3 is 3, but must be exactly 4, the number of rows",
        ),
        (
            cached(view(1, 4)).ragged_queries(&[0, 1, 4]).sequences(&[0]),
            "sequences: length is 1, but ragged queries has 2",
        ),
        (cached(view(2, 1)).ragged_queries(&[0, 1]), "q: batch is 2, but a ragged call has 1"),
        (
            tensors().ragged_queries(&[0, 1]),
            "ragged queries: needs a cache or pages; tensors laid end to end take `ragged`",
        ),
        (tensors().sequences(&[0, 1, 2]), "sequences: needs a cache or pages; tensors laid end to end take `ragged`"),
    ] {
        assert_eq!(message(inputs), expected);
    }
}

/// A step of one of very many sequences, named, or the only one that has rows: neither it, nor its plan, nor an append, looks at
/// the others again and again, and it takes no memory for them.
#[test]
fn what_one_of_a_million_sequences_takes() {
    const SEQUENCES: usize = 1 << 20;
    let (row, at) = ([0.5f32; 16], SEQUENCES - 7);
    let view = |rows| View::from_strides(&row, 0, [1, 2, rows, 16], [0, 0, 0, 1]).unwrap();
    let shape = KvShape { kv_heads: 2, head_dim: 16, value_dim: 16 };
    let [few, mut many] = [8, SEQUENCES].map(|sequences| {
        let mut cache = KvCache::new(sequences, shape).unwrap();
        cache.append_to(sequences - 7, view(600), view(600)).unwrap();
        cache
    });
    let mut ends = vec![0; SEQUENCES + 1];
    ends[at + 1..].fill(1);
    let step = |inputs: Inputs<'_>| {
        let (mut out, mut workspace) = ([0.0; 2 * 16], Workspace::new());
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 2, 1, 16]).unwrap());
        let problem = Attention::new().causal().align(Alignment::BottomRight).problem(inputs, outputs).unwrap();
        let plan = Plan::new(&problem, Exec::serial().threads(2));
        let (_, asked) = counted(|| problem.run(&plan, &mut workspace));
        (out, plan.partials_bytes(), workspace.bytes(), asked)
    };
    let expected = step(Inputs::cached(view(1), &few).sequences(&[1]));
    assert!(expected.1 > 0);
    // Thousands of looks at a million lengths each would take minutes.
    for _ in 0..2000 {
        assert_eq!(step(Inputs::cached(view(1), &many).sequences(&[at])), expected);
    }
    for _ in 0..2000 {
        many.append_to(at, view(1), view(1)).unwrap();
        many.truncate(at, 600).unwrap();
    }
    // A look at all lengths for each of a million sequences would take longer.
    assert_eq!(step(Inputs::cached(view(1), &many).ragged_queries(&ends)), expected);
}
