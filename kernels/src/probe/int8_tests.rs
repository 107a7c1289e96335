//! Tests of the int8 scores against plain integers, in every instruction set, with and without products of bytes.

use crate::attention::products::qk_int8::{Int8Queries, IntegerKeys, IntegerScores};
use crate::attention::products::score_run::ScoreRun;
use crate::attention::scratch::SCORE_STRIDE;
use crate::attention::steps::span::{Span, Spans};
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
            use crate::simd::{
                Int8DotWork,
                x86::{avx2::Avx2, avx512_token::Avx512Vnni},
            };
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
        let size = QuerySize::int8(d);
        let mut queries = vec![0.0; rows * size.floats()];
        for ((row, &factor), to) in self.rows.iter().zip(&self.factors).zip(queries.chunks_exact_mut(size.floats())) {
            let (quads, sums) = cut_query(to, size);
            for (four, quad) in row.chunks(4).zip(quads) {
                let mut bytes = [0; 4];
                bytes[..four.len()].copy_from_slice(four);
                *quad = Query4::new(bytes);
            }
            sums[0] = Row { total: row.iter().map(|&b| i32::from(b)).sum(), factor };
        }
        let addresses: Vec<_> = queries.chunks_exact(size.floats()).map(<[f32]>::as_ptr).collect();
        let mut keys = vec![0; n.div_ceil(LANES) * panel_bytes(d)];
        for (j, key) in self.keys.iter().enumerate() {
            place_key(key, j, &mut keys);
        }
        let mut out = vec![UNTOUCHED; rows * SCORE_STRIDE];
        let spans: Vec<_> = (0..rows.div_ceil(tile)).map(&span_of).collect();
        let panels = Rows::strided(keys.as_ptr(), panel_bytes(d) as isize, 1);
        run(IntegerScores {
            queries: Int8Queries { rows: &addresses, size },
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

type Int8Scores<'a, 'b> = IntegerScores<'a, 'b, Int8Keys<'a>>;

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

/// Keys placed in any order lie where the description of the layout says, among zeros.
#[test]
fn keys_lie_in_panels() {
    let mut numbers = Floats(6);
    for head_dim in [1, 3, 4, 5, 63, 64, 65] {
        for n in [1usize, 15, 16, 17, 40] {
            let rows: Vec<i8> = (0..n * head_dim).map(|_| numbers.byte()).collect();
            let mut keys = vec![0; n.div_ceil(LANES) * panel_bytes(head_dim)];
            for j in (0..n).rev() {
                place_key(&rows[j * head_dim..][..head_dim], j, &mut keys);
            }
            for j in 0..n.next_multiple_of(LANES) {
                for i in 0..quads(head_dim) * 4 {
                    let at = j / LANES * panel_bytes(head_dim) + i / 4 * 64 + j % LANES * 4 + i % 4;
                    let want = if j < n && i < head_dim { rows[j * head_dim + i] } else { 0 };
                    assert_eq!(keys[at], want, "key {j}, element {i}");
                }
            }
        }
    }
}

#[test]
fn numbers_that_are_not_finite_spoil_their_own_scores_alone() {
    let (mut numbers, mut bytes) = (Floats(9), Floats(10));
    let mut case = Case::new([3, 40, 20], || bytes.byte(), &mut numbers);
    let mut scales = vec![0.5; 48];
    scales[17] = f32::NAN;
    case.scales = Some(scales);
    case.factors[1] = f32::NAN;
    case.check(|_| Span::new(0, 40, false));
}
