//! Rows that choose their keys: index scores and lists against the oracle, bits, every source, hostile numbers, memory.

mod refusals;
mod top_k;

use crate::counting::counted;
use crate::kv_support::{Pool, append_tokens, cache_of, empty_cache, every_format};
use crate::options::Case;
use crate::positions::{random_case, random_positions};
use crate::support::{Layout, Rng, Tensor, UNWRITTEN, assert_close, assert_same_bits, distance, execs, fewer, largest};
use sdpa::{
    Alignment, Attention, Bf16, Error, Exec, Inputs, Precision, SelectedKeys, TopK, View, ViewMut, Workspace, naive,
    top_k, widen_e4m3,
};

/// A call of an indexer.
struct Index<'a> {
    attention: Attention,
    inputs: Inputs<'a>,
    weights: &'a Tensor,
    factors: Option<&'a Tensor>,
}

impl<'a> Index<'a> {
    fn of(case: &'a Case, weights: &'a Tensor) -> Self {
        Self { attention: case.attention(), inputs: case.inputs(), weights, factors: None }
    }

    fn with<T>(&self, f: impl FnOnce(sdpa::Indexer<'a>) -> T) -> T {
        let indexer = self.attention.indexer(self.inputs, self.weights.view()).expect("a good call");
        f(match self.factors {
            Some(factors) => indexer.key_factors(factors.view()).expect("factors of the keys"),
            None => indexer,
        })
    }

    fn scores(&self, exec: Exec) -> Tensor {
        let shape = self.inputs.shape().expect("a good call");
        let shape = [shape.batch, shape.kv_heads, shape.q_len, shape.kv_len];
        let mut out = Tensor::filled(shape, f32::from_bits(UNWRITTEN));
        let view = ViewMut::bhld(&mut out.data, shape).expect("dense");
        self.with(|indexer| indexer.scores(view, exec, &mut Workspace::new())).expect("memory");
        out
    }

    fn select(&self, rule: &TopK, exec: Exec) -> SelectedKeys {
        let mut selected = SelectedKeys::new();
        self.with(|indexer| indexer.select(rule, exec, &mut Workspace::new(), &mut selected)).expect("a good rule");
        selected
    }

    fn oracle(&self) -> Vec<f64> {
        let factors = self.factors.map(Tensor::view);
        naive::index_scores(&self.attention, &self.inputs, self.weights.view(), factors).expect("a good call")
    }

    /// Scores on every instruction set and on threads, held against the oracle and each other.
    fn check(&self, what: &str, bound: f64) {
        let (oracle, mut first) = (self.oracle(), None);
        for (isa, exec) in execs() {
            let scores = self.scores(exec);
            let close = bound * largest(&scores.data).max(1.0);
            assert_close(&format!("{what}, {isa}"), &scores, &oracle, close);
            assert_same_bits(
                &format!("{what}, {isa}, threads"),
                &self.scores(Exec::default().threads(3).isa(isa)),
                &scores,
            );
            if isa.has_fma() {
                assert_same_bits(&format!("{what}, {isa}"), &scores, first.get_or_insert_with(|| scores.clone()));
            }
        }
    }
}

fn weights_of(case: &Case, rng: &mut Rng) -> Tensor {
    let [b, h, l, _] = case.q.shape;
    Tensor::normal([b, h, l, 1], rng)
}

/// A plain causal case, the last row at the last key.
fn causal(rng: &mut Rng, sizes: [usize; 7]) -> Case {
    Case { causal: true, alignment: Some(Alignment::BottomRight), ..Case::plain(rng, sizes) }
}

fn list(selected: &SelectedKeys, [b, head, row]: [usize; 3]) -> Vec<usize> {
    selected.numbers(b, head, row).expect("a row").collect()
}

fn random_rule(rng: &mut Rng, keys: usize) -> TopK {
    let k = rng.pick(&[1, 2, 16, 100, keys.max(1), 2 * keys + 1]);
    let (first, last) = (rng.pick(&[0, 0, 1, 5, keys]), rng.pick(&[0, 0, 1, 7, keys]));
    TopK { first, last, rows: rng.pick(&[1, 1, 2, 5, 1000]), unit: rng.pick(&[1, 4]), ..TopK::new(k) }
}

/// The largest of the scores of a list's rows, by the order that the rule states.
fn shared(rows: &[&[f32]]) -> Vec<f32> {
    let rank = |x: f32| if x == f32::NEG_INFINITY { (0, 0.0) } else { (1 + i32::from(!x.is_nan()), x) };
    let larger = |a: f32, b: f32| if rank(b).0 > rank(a).0 || rank(b).0 == rank(a).0 && b > a { b } else { a };
    (0..rows[0].len()).map(|j| rows.iter().map(|row| row[j]).reduce(larger).expect("a row")).collect()
}

#[test]
fn index_scores_agree_with_the_oracle() {
    for seed in 0..fewer(150) {
        let rng = &mut Rng::new(seed ^ 0x1dec5);
        let case = random_case(rng, seed);
        let case = if rng.below(4) == 0 { random_positions(rng, &case) } else { case };
        let case = Case { functions: Default::default(), precision: Precision::Exact, ..case };
        let weights = weights_of(&case, rng).laid_out(rng.pick(&[Layout::Bhld, Layout::Transposed, Layout::Reversed]));
        Index::of(&case, &weights).check(&format!("seed {seed}"), 1e-4);
    }
}

/// Few heads and more than a task holds, few rows and many, key blocks before and behind the diagonal.
#[test]
fn heads_of_a_row_are_added_whatever_their_number() {
    for sizes in [
        [1, 64, 1, 1, 700, 32, 32],
        [1, 64, 1, 20, 700, 16, 16],
        [2, 500, 1, 3, 300, 8, 8],
        [1, 100, 1, 2, 300, 576, 512],
        [1, 1, 1, 40, 300, 24, 24],
        [1, 12, 4, 33, 600, 24, 24],
    ] {
        let rng = &mut Rng::new(sizes[1] as u64);
        let (case, factors) = (causal(rng, sizes), rng.below(2) == 0);
        let weights = weights_of(&case, rng);
        let of_keys = Tensor::normal([sizes[0], sizes[2], sizes[4], 1], rng);
        let index = Index { factors: factors.then_some(&of_keys), ..Index::of(&case, &weights) };
        index.check(&format!("{sizes:?}"), 1e-4);
    }
}

/// A row has the bits that it has alone, and a chunk of rows those of all.
#[test]
fn rows_alone_have_the_same_bits() {
    let rng = &mut Rng::new(77);
    let case = causal(rng, [2, 24, 2, 37, 530, 40, 40]);
    let weights = weights_of(&case, rng);
    for (isa, exec) in execs() {
        let all = Index::of(&case, &weights).scores(exec);
        for rows in [0..1, 5..6, 36..37, 3..20] {
            let (q, w) = (case.q.rows(rows.clone()), weights.rows(rows.clone()));
            let inputs = Inputs::new(q.view(), case.k.view(), case.v.view());
            let attention = case.attention().align(Alignment::Offset((530 - 37 + rows.start) as isize));
            let alone = Index { attention, inputs, weights: &w, factors: None }.scores(exec);
            assert_same_bits(&format!("{isa}, rows {rows:?}"), &alone, &all.rows(rows.clone()));
        }
    }
}

#[test]
fn sources_have_the_bits_of_tensors() {
    for seed in 0..fewer(40) {
        let rng = &mut Rng::new(seed ^ 0x50ce);
        let case = random_case(rng, seed).side_by_side();
        let case = Case { functions: Default::default(), ..case };
        let (weights, cache) = (weights_of(&case, rng), cache_of(&case, rng));
        let pool = Pool::of(&case, rng.pick(&[1, 16, 48]), [Layout::Padded, Layout::Bhld], f32::NAN, rng);
        let sources = [Inputs::cached(case.q.view(), &cache), Inputs::paged(case.q.view(), pool.pages())];
        for (isa, exec) in execs() {
            let expected = Index::of(&case, &weights).scores(exec);
            for (n, source) in sources.iter().enumerate() {
                let inputs = case.inputs_over(*source);
                let scores = Index { inputs, ..Index::of(&case, &weights) }.scores(exec);
                let [b, h, l, keys] = scores.shape;
                let part = Tensor::from_fn([b, h, l, keys], |at| expected.get(at));
                assert_same_bits(&format!("seed {seed}, {isa}, source {n}"), &scores, &part);
            }
        }
    }
}

/// Caches of every format: what the oracle says of the numbers that they hold, within the rounding of queries.
#[test]
fn caches_of_every_format_have_scores() {
    let rng = &mut Rng::new(4);
    let case = causal(rng, [1, 16, 1, 3, 600, 64, 64]);
    let weights = weights_of(&case, rng);
    for (format, mut cache) in every_format(&empty_cache(&case)) {
        append_tokens(&mut cache, 0, &[case.k.clone(), case.v.clone()]);
        let index = Index { inputs: Inputs::cached(case.q.view(), &cache), ..Index::of(&case, &weights) };
        let bound = if format.contains("int") { 0.05 } else { 1e-4 };
        index.check(format, bound);
    }
}

/// Bfloat16, multiplied as the machine does; and codes of eight bits with scales, which bfloat16 holds exactly.
#[test]
fn native_products_and_e4m3_keys() {
    let rng = &mut Rng::new(9);
    let (heads, keys, dim) = (64, 900, 128);
    let codes: Vec<u8> = (0..keys * dim).map(|_| (rng.below(0x7f) + rng.below(2) * 0x80) as u8).collect();
    let mut wide = vec![Bf16::default(); keys * dim];
    widen_e4m3(&codes, &mut wide).unwrap();
    let scales = Tensor::from_fn([1, 1, keys, 1], |_| rng.normal().abs() / 448.0);
    let q: Vec<Bf16> = (0..heads * dim).map(|_| Bf16::from_f32(rng.normal())).collect();
    let (q, k) = (View::bhld(&q, [1, heads, 1, dim]).unwrap(), View::bhld(&wide, [1, 1, keys, dim]).unwrap());
    let weights = Tensor::normal([1, heads, 1, 1], rng);
    for precision in [Precision::Exact, Precision::Native] {
        let attention = Attention::new().precision(precision);
        let index = Index { attention, inputs: Inputs::new(q, k, k), weights: &weights, factors: Some(&scales) };
        let oracle = index.oracle();
        for (isa, exec) in execs() {
            let scores = index.scores(exec);
            assert_close(&format!("{precision:?}, {isa}"), &scores, &oracle, 1e-4 * largest(&scores.data));
        }
    }
}

#[test]
fn e4m3_is_exact() {
    let codes: Vec<u8> = (0..=255).collect();
    let mut wide = vec![Bf16::default(); 256];
    widen_e4m3(&codes, &mut wide).unwrap();
    for (code, wide) in codes.iter().zip(&wide) {
        let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let size = match exponent {
            0 => fraction * 2f32.powi(-9),
            15 if fraction == 7.0 => f32::NAN,
            _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
        };
        let expected = if *code >= 0x80 { -size } else { size };
        assert!(distance(f64::from(wide.to_f32()), f64::from(expected)) == 0.0, "{code:#x}: {wide:?}");
        assert!(size.is_nan() || wide.to_f32().is_sign_negative() == (*code >= 0x80), "{code:#x}: {wide:?}");
    }
    let error = widen_e4m3(&codes, &mut wide[1..]).unwrap_err();
    assert!(matches!(error, Error::Mismatch { got: 255, expected: 256, .. }), "{error}");
}

/// Lists are those of the scores, whatever rows share them.
#[test]
fn selections_are_those_of_the_scores() {
    for seed in 0..fewer(60) {
        let rng = &mut Rng::new(seed ^ 0x5e1);
        let case = Case { functions: Default::default(), ..random_case(rng, seed) };
        let weights = weights_of(&case, rng);
        let (index, rule) = (Index::of(&case, &weights), random_rule(rng, case.longest().1));
        for (isa, exec) in execs() {
            let scores = index.scores(exec);
            for exec in [exec, Exec::default().threads(2).isa(isa)] {
                let selected = index.select(&rule, exec);
                for (b, h) in (0..case.batch()).flat_map(|b| (0..case.kv_heads()).map(move |h| (b, h))) {
                    for first in (0..case.rows(b)).step_by(rule.rows) {
                        let rows = first..case.rows(b).min(first + rule.rows);
                        let rows: Vec<_> = rows.map(|l| scores.row([b, h, l]).expect("dense")).collect();
                        let expected = naive::top_k(&shared(&rows), &rule);
                        let what = format!("seed {seed}, {isa}, {rule:?}, {b} {h} {first}");
                        assert_eq!(list(&selected, [b, h, first]), expected, "{what}");
                    }
                }
            }
        }
    }
}

/// What the attention over chosen keys is for: a call with the lists.
#[test]
fn lists_go_into_a_call() {
    let rng = &mut Rng::new(3);
    let (case, index) = (causal(rng, [2, 4, 2, 20, 300, 16, 16]), causal(rng, [2, 8, 1, 20, 300, 16, 16]));
    let weights = weights_of(&index, rng);
    let selected = Index::of(&index, &weights).select(&TopK { last: 4, ..TopK::new(30) }, Exec::serial());
    assert_eq!(selected.q_lens(), [20, 20]);
    let with = Case { selected: Some(selected), ..case };
    let oracle = with.oracle::<f64>();
    let full = with.run(Exec::serial(), crate::options::Wanted::ALL);
    crate::options::check_against_oracle("chosen keys", &with, &full, &oracle);
}

#[test]
fn a_warm_choice_allocates_nothing() {
    let rng = &mut Rng::new(5);
    for sizes in [[1, 64, 1, 1, 9000, 32, 32], [3, 16, 2, 30, 700, 16, 16]] {
        let case = causal(rng, sizes);
        let weights = weights_of(&case, rng);
        let index = Index::of(&case, &weights);
        let shape = [sizes[0], sizes[2], sizes[3], sizes[4]];
        let mut scores = Tensor::filled(shape, 0.0);
        for (isa, exec) in execs() {
            let (mut workspace, mut selected) = (Workspace::new(), SelectedKeys::new());
            for rule in [TopK::new(300), TopK { rows: 4, last: 2, share: Some(0.5), ..TopK::new(50) }] {
                let mut call = || {
                    let indexer = index.attention.indexer(index.inputs, index.weights.view()).unwrap();
                    let out = ViewMut::bhld(&mut scores.data, shape).unwrap();
                    indexer.scores(out, exec, &mut workspace).unwrap();
                    indexer.select(&rule, exec, &mut workspace, &mut selected).unwrap();
                    top_k(View::bhld(&scores.data, shape).unwrap(), &rule, exec, &mut workspace, &mut selected)
                        .unwrap();
                };
                call();
                assert_eq!(counted(call), (0, 0), "{sizes:?}, {isa}, {rule:?}");
            }
        }
    }
}

/// NaN and infinite queries, keys, weights and factors: what the formula says of them, key by key.
#[test]
fn hostile_numbers_stay_where_they_are() {
    let rng = &mut Rng::new(6);
    let mut case = causal(rng, [1, 8, 1, 4, 300, 16, 16]);
    case.k.set([0, 0, 7, 3], f32::NAN);
    case.k.set([0, 0, 280, 0], f32::INFINITY);
    let mut weights = weights_of(&case, rng);
    weights.set([0, 2, 1, 0], f32::NAN);
    let mut factors = Tensor::filled([1, 1, 300, 1], 2.0);
    factors.set([0, 0, 20, 0], f32::NAN);
    for (isa, exec) in execs() {
        let index = Index { factors: Some(&factors), ..Index::of(&case, &weights) };
        let scores = index.scores(exec);
        for (i, j) in (0..4).flat_map(|i| (0..300).map(move |j| (i, j))) {
            let got = scores.get([0, 0, i, j]);
            match (i, j) {
                _ if j > 296 + i => assert_eq!(got, f32::NEG_INFINITY, "{isa}, {i} {j}"),
                (_, 280) => assert!(got == f32::NEG_INFINITY, "{isa}, {i}: {got}"),
                (1, _) | (_, 7 | 20) => assert_eq!(got.to_bits(), 0x7fc0_0000, "{isa}, {i} {j}"),
                _ => assert!(got.is_finite(), "{isa}, {i} {j}: {got}"),
            }
        }
        // A score of −∞, that of key 280 for some heads, hides; NaN is chosen last, and the lower keys first.
        let expected: Vec<usize> = (0..298).filter(|&key| key != 280).take(200).collect();
        assert_eq!(list(&index.select(&TopK::new(200), exec), [0, 0, 1]), expected, "{isa}");
    }
}
