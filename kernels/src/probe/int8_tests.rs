//! Tests of the int8 scores against plain integers, in every instruction set, with and without products of bytes.

use super::int8::Cache;
use crate::attention::call::tiling::SCORE_STRIDE;
use crate::attention::steps::qk_int8::{Int8Queries, IntegerKeys};
use crate::attention::steps::score_run::{ScoreRun, Scores};
use crate::attention::steps::span::Span;
use crate::matmul::int8::*;
use crate::matmul::key_code::Int8Keys;
use crate::matmul::prefetch::PrefetchQueue;
use crate::simd::isa::Isa;
use crate::simd::{LANES, Query4, Simd};
use crate::tensor::rows::Rows;

mod nibbles;
mod rows;
mod values;

/// Pseudo-random floats: the upper bits of a linear congruence.
struct Floats(u64);

impl Floats {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn byte(&mut self) -> i8 {
        (i64::from(self.next() % 255) - 127) as i8
    }

    /// Returns a number between −1 and 1.
    fn float(&mut self) -> f32 {
        self.next() as f32 / 2f32.powi(30) - 1.0
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Int8 rows and keys, and their sums in plain integers.
struct Case {
    head_dim: usize,
    rows: Vec<Vec<i8>>,
    keys: Vec<Vec<i8>>,
    factors: Vec<f32>,
    scales: Option<Vec<f32>>,
}

const UNTOUCHED: f32 = -1.25e30;

impl Case {
    fn new([rows, keys, head_dim]: [usize; 3], mut byte: impl FnMut() -> i8, numbers: &mut Floats) -> Self {
        let mut bytes = |n: usize| (0..n).map(|_| (0..head_dim).map(|_| byte()).collect()).collect();
        let (rows, keys): (Vec<Vec<i8>>, Vec<Vec<i8>>) = (bytes(rows), bytes(keys));
        let factors = numbers.floats(rows.len());
        let scales = (!numbers.next().is_multiple_of(3)).then(|| numbers.floats(keys.len().next_multiple_of(LANES)));
        Self { head_dim, rows, keys, factors, scales }
    }

    fn score(&self, r: usize, j: usize) -> f32 {
        let products = self.rows[r].iter().zip(&self.keys[j]).map(|(&a, &b)| i64::from(a) * i64::from(b));
        let sum = i32::try_from(products.sum::<i64>()).expect("a sum that fits");
        let factor = self.scales.as_ref().map_or(self.factors[r], |scales| self.factors[r] * scales[j]);
        factor * sum as f32
    }

    /// Runs the step in every form, on these spans (in keys), and checks which scores it wrote and which it left.
    fn check(&self, span_of: impl Fn(usize) -> Span) {
        for isa in Isa::available() {
            self.check_form(isa.name(), isa.tile().0, &span_of, |scores| dispatch!(isa, |s| Step(scores).run(s)));
        }
        #[cfg(target_arch = "x86_64")]
        {
            use crate::simd::{Int8DotWork, avx2::Avx2, avx512::Avx512Vnni};
            if let Some(avx2) = Avx2::detect() {
                // SAFETY: the scores' keys are in whole panels.
                self.check_form("avx2 without vnni", Avx2::TILE_ROWS, &span_of, |scores| unsafe { scores.run(avx2) });
            }
            for (name, room) in [("avx512, roomy", true), ("avx512, not roomy", false)] {
                if let Some(vnni) = Avx512Vnni::detect() {
                    let vnni = vnni.with_room(room);
                    // SAFETY: the scores' keys are in whole panels.
                    self.check_form(name, Avx512Vnni::TILE_ROWS, &span_of, |scores| unsafe { scores.run(vnni) });
                }
            }
        }
    }

    fn check_form(&self, name: &str, tile: usize, span_of: impl Fn(usize) -> Span, run: impl Fn(Int8Scores<'_, '_>)) {
        let (n, d, rows) = (self.keys.len(), self.head_dim, self.rows.len());
        let mut queries = Vec::new();
        let mut row_data = Vec::new();
        for (row, &factor) in self.rows.iter().zip(&self.factors) {
            queries.extend(row.chunks(4).map(|four| {
                let mut bytes = [0; 4];
                bytes[..four.len()].copy_from_slice(four);
                Query4::new(bytes)
            }));
            row_data.push(Row { total: row.iter().map(|&b| i32::from(b)).sum(), factor });
        }
        let mut keys = vec![99; n.div_ceil(LANES) * panel_bytes(d)];
        pack_keys(&self.keys.concat(), d, &mut keys);
        let mut out = vec![UNTOUCHED; rows * SCORE_STRIDE];
        let spans: Vec<_> = (0..rows.div_ceil(tile)).map(&span_of).collect();
        let panels = Rows::strided(keys.as_ptr(), panel_bytes(d) as isize, 1);
        run(Scores {
            queries: Int8Queries { quads: &queries, rows: &row_data, size: QuerySize::int8(d) },
            keys: IntegerKeys { panels, code: Int8Keys(self.scales.as_deref()) },
            run: &mut ScoreRun {
                rows,
                panels: 0..n.div_ceil(LANES),
                spans: &spans,
                next_bias: None,
                prefetch: &mut PrefetchQueue::nothing(),
                out: &mut out,
            },
        });
        for r in 0..rows {
            let span = spans[r / tile];
            for j in 0..SCORE_STRIDE {
                let got = out[r * SCORE_STRIDE + j];
                if !(span.first_panel() * LANES..span.end_panel() * LANES).contains(&j) {
                    assert_eq!(got, UNTOUCHED, "{name}: row {r}, key {j} of {n} written");
                } else if j < n {
                    let want = self.score(r, j);
                    assert!(same(got, want), "{name}: row {r} of {rows}, key {j} of {n}, dim {d}: {got} for {want}");
                }
            }
        }
    }
}

type Int8Scores<'a, 'b> = Scores<'a, 'b, Int8Queries<'a>, IntegerKeys<Int8Keys<'a>>>;

struct Step<'a, 'b>(Int8Scores<'a, 'b>);

impl Step<'_, '_> {
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the scores' keys are in whole panels.
        unsafe { s.with_int8_dot(self.0) }
    }
}

#[test]
fn scores_are_those_of_plain_integers() {
    let mut numbers = Floats(1);
    for head_dim in [1, 3, 4, 5, 63, 64, 65, 128] {
        for keys in [1, 15, 16, 17, 255, 256] {
            for rows in 1..=7 {
                let mut bytes = Floats(numbers.next().into());
                Case::new([rows, keys, head_dim], || bytes.byte(), &mut numbers).check(|_| Span::new(0, keys, false));
            }
        }
    }
}

#[test]
fn the_largest_sums_are_exact() {
    let mut numbers = Floats(2);
    for head_dim in [4, 65, 128, 4096, MAX_HEAD_DIM] {
        for extremes in [[127, 127], [-127, -127], [127, -127], [-128, 127], [127, -128]] {
            // Rows are made first, then keys.
            let (rows, keys) = if head_dim > 4096 { (2, 17) } else { (7, 33) };
            let mut made = 0;
            let byte = || {
                made += 1;
                extremes[usize::from(made > rows * head_dim)]
            };
            if extremes[0] == -128 && head_dim == MAX_HEAD_DIM {
                continue; // Rows never hold −128; keys from elsewhere might.
            }
            Case::new([rows, keys, head_dim], byte, &mut numbers).check(|_| Span::new(0, keys, false));
        }
        // Signs that differ in the elements of a pair, so that sums taken in the wrong order or width would show.
        let signs = [127, -127, -127, 127, 127, 127];
        let mut i = 0;
        let byte = || {
            i += 1;
            signs[i % signs.len()]
        };
        Case::new([3, 18, head_dim.min(4096)], byte, &mut numbers).check(|_| Span::new(0, 18, false));
    }
}

#[test]
fn only_the_panels_of_a_span_are_written() {
    let mut numbers = Floats(3);
    let mut bytes = Floats(4);
    let case = Case::new([23, 200, 20], || bytes.byte(), &mut numbers);
    case.check(|tile| match tile % 3 {
        0 => Span::new(33, 130, true),
        1 => Span::EMPTY,
        _ => Span::new(16, 200, false),
    });
}

#[test]
fn keys_one_by_one_lie_as_keys_packed_at_once() {
    let mut numbers = Floats(6);
    for head_dim in [1, 3, 4, 5, 63, 64, 65] {
        for n in [1usize, 15, 16, 17, 40] {
            let rows: Vec<i8> = (0..n * head_dim).map(|_| numbers.byte()).collect();
            let bytes = n.div_ceil(LANES) * panel_bytes(head_dim);
            let (mut whole, mut single) = (vec![99; bytes + 1], vec![0; bytes]);
            pack_keys(&rows, head_dim, &mut whole);
            // Keys are placed in reverse: any order gives the same bytes.
            for j in (0..n).rev() {
                place_key(&rows[j * head_dim..][..head_dim], j, &mut single);
            }
            assert_eq!(whole[bytes], 99);
            assert_eq!(whole[..bytes], single);
            for j in 0..bytes / panel_bytes(head_dim) * LANES {
                for i in 0..quads(head_dim) * 4 {
                    let at = j / LANES * panel_bytes(head_dim) + i / 4 * 64 + j % LANES * 4 + i % 4;
                    let want = if j < n && i < head_dim { rows[j * head_dim + i] } else { 0 };
                    assert_eq!(whole[at], want, "key {j}, element {i}");
                }
            }
        }
    }
    let (keys, values) = (numbers.floats(50 * 37), numbers.floats(50 * 21));
    for channels in [None, Some((0..37).map(|i| 0.001 + i as f32 / 5000.0).collect::<Vec<_>>())] {
        for isa in Isa::available() {
            let whole = Cache::pack(isa, [&keys, &values], [37, 21], channels.clone());
            let mut single = Cache::new(50, [37, 21], channels.clone());
            for (key, value) in keys.chunks(37).zip(values.chunks(21)) {
                single.push(isa, key, value);
            }
            let queries = &keys[..3 * 37];
            let (mut a, mut b) = (vec![0.0; 150], vec![1.0; 150]);
            whole.scores(isa, queries, 0.3, 0..50, &mut a);
            single.scores(isa, queries, 0.3, 0..50, &mut b);
            assert_eq!(a, b);
            assert!((0..50).all(|j| (0..21).all(|i| whole.value(j, i) == single.value(j, i))));
            assert!((0..50).all(|j| (0..37).all(|i| whole.key(j, i) == single.key(j, i))));
        }
    }
}

/// Returns the largest error of a quantised sum of products: half a scale in either factor of each.
fn bound(a: &[f32], b: &[f32], [sa, sb]: [f32; 2]) -> f64 {
    let each = |(&a, &b): (&f32, &f32)| {
        let (a, b, sa, sb) = (f64::from(a.abs()), f64::from(b.abs()), f64::from(sa), f64::from(sb));
        0.5 * (a * sb + b * sa) + 0.25 * sa * sb
    };
    1.001 * a.iter().zip(b).map(each).sum::<f64>() + 1e-6
}

#[test]
fn a_cache_says_nearly_what_its_tokens_say() {
    let mut numbers = Floats(9);
    let (n, d, e, rows) = (600, 65, 40, 5);
    let (keys, values) = (numbers.floats(n * d), numbers.floats(n * e));
    let queries = numbers.floats(rows * d);
    let channels: Vec<f32> = (0..d).map(|_| 1.0 / 127.0).collect();
    let mut bits: [Option<Vec<f32>>; 2] = [None, None];
    for isa in Isa::available() {
        for (channels, bits) in [None, Some(channels.clone())].into_iter().zip(&mut bits) {
            let cache = Cache::pack(isa, [&keys, &values], [d, e], channels);
            let mut out = vec![0.0; rows * n];
            cache.scores(isa, &queries, 0.5, 0..n, &mut out);
            for (r, q) in queries.chunks(d).enumerate() {
                for (j, k) in keys.chunks(d).enumerate() {
                    let exact: f64 = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                    let error = (f64::from(out[r * n + j]) - 0.5 * exact).abs();
                    assert!(error <= 0.5 * bound(q, k, [1.0 / 127.0; 2]), "{isa}: row {r}, key {j}: off by {error}");
                }
            }
            assert_eq!(out.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), {
                let first = bits.get_or_insert(out);
                first.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
        }
        let cache = Cache::pack(isa, [&keys, &values], [d, e], None);
        let weights: Vec<f32> = (0..rows * n).map(|i| ((i % 13) as f32) / 64.0).collect();
        let width = e.next_multiple_of(LANES);
        let mut out = vec![0.0; rows * width];
        cache.values(isa, &weights, 0..n, &mut out);
        for (r, w) in weights.chunks(n).enumerate() {
            for i in 0..width {
                let exact: f64 =
                    (0..n).map(|j| if i < e { f64::from(w[j]) * f64::from(values[j * e + i]) } else { 0.0 }).sum();
                let bound = w.iter().map(|&w| f64::from(w)).sum::<f64>() * 0.51 / 127.0;
                let error = (f64::from(out[r * width + i]) - exact).abs();
                assert!(error <= bound, "{isa}: row {r}, column {i}: off by {error}");
            }
        }
    }
}

#[test]
fn a_token_that_is_not_finite_spoils_its_own_scores_alone() {
    for isa in Isa::available() {
        let mut cache = Cache::new(40, [20, 16], None);
        for j in 0..40 {
            let mut key = [1.0; 20];
            key[7] = if j == 17 { f32::INFINITY } else { 0.5 };
            cache.push(isa, &key, &[1.0; 16]);
        }
        let mut out = vec![0.0; 80];
        let mut queries = [1.0; 40];
        queries[20] = f32::NAN;
        cache.scores(isa, &queries, 1.0, 0..40, &mut out);
        for (j, score) in out[..40].iter().enumerate() {
            assert_eq!(score.is_nan(), j == 17, "{isa}: key {j}");
        }
        assert!(out[40..].iter().all(|score| score.is_nan()));
    }
}
