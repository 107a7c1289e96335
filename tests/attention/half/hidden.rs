//! NaN and ∞ of 16 bits behind a mask change no bit.

use super::short::{DTYPES, SHORT, Short};
use crate::kv_support::same_full;
use crate::options::{Case, MaskData, Wanted};
use crate::support::{LAYOUTS, Rng, Tensor, assert_same_bits, execs};
use sdpa::{Alignment, Dtype};

const SIZES: [[usize; 7]; 6] = [
    [1, 1, 1, 1, 3, 1, 1],
    [2, 2, 1, 5, 40, 16, 16],
    [1, 6, 2, 33, 65, 20, 33],
    [2, 4, 2, 1, 520, 64, 48],
    [1, 2, 1, 100, 300, 40, 17],
    [1, 1, 1, 12, 257, 257, 8],
];
const POISONS: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38];

/// With `x` in k, in v, or in both.
fn poisoned(case: &Case, keys: impl Fn(usize) -> bool, x: f32) -> [Case; 3] {
    [[true, false], [false, true], [true, true]].map(|[k, v]| {
        let mut case = case.clone();
        for j in (0..case.k.shape[2]).filter(|&j| keys(j)) {
            if k {
                case.k.fill_row(j, x);
            }
            if v {
                case.v.fill_row(j, x);
            }
        }
        case
    })
}

/// Types, instruction sets and poisons: keys that `hidden` names do not show in any output.
fn check(what: &str, case: &Case, hidden: impl Fn(usize) -> bool) {
    for k in DTYPES {
        for v in SHORT {
            let mix = [Dtype::Bf16, k, v];
            let clean = Short::new(case.clone(), mix);
            for (isa, exec) in execs() {
                let expected = clean.case.run_over(clean.source(), exec, Wanted::MASS);
                for x in POISONS {
                    for case in poisoned(case, &hidden, x) {
                        let short = Short::new(case, mix);
                        let got = short.case.run_over(short.source(), exec, Wanted::MASS);
                        same_full(&format!("{what}, {x}, {mix:?}, {isa}"), &got, &expected);
                    }
                }
            }
        }
    }
}

#[test]
fn by_a_length() {
    for (n, sizes) in SIZES.into_iter().enumerate() {
        let mut case = Case::plain(&mut Rng::new(n as u64), sizes);
        let len = sizes[4] * 2 / 3;
        case.kv_lens = Some(vec![len; sizes[0]]);
        check(&format!("length, {sizes:?}"), &case, |j| j >= len);
    }
}

#[test]
fn by_a_causal_rule() {
    for (n, sizes) in SIZES.into_iter().enumerate() {
        let mut case = Case::plain(&mut Rng::new(n as u64), sizes);
        (case.causal, case.alignment) = (true, Some(Alignment::TopLeft));
        check(&format!("causal, {sizes:?}"), &case, |j| j >= sizes[3]);
    }
}

#[test]
fn by_a_mask_in_any_layout() {
    for (n, sizes) in SIZES.into_iter().enumerate() {
        let mut rng = Rng::new(n as u64);
        let mut case = Case::plain(&mut rng, sizes);
        let hidden = |j: usize| j % 7 == 2 || (100..180).contains(&j);
        let tensor = Tensor::from_fn([1, 1, 1, sizes[4]], |[.., j]| f32::from(u8::from(!hidden(j))));
        case.mask = Some(MaskData::new(true, false, tensor));
        (case.k, case.v) = (case.k.laid_out(rng.pick(&LAYOUTS)), case.v.laid_out(rng.pick(&LAYOUTS)));
        check(&format!("mask, {sizes:?}"), &case, hidden);
    }
}

/// Later rows see it; those before do not, in the same tile.
#[test]
fn from_the_rows_before() {
    for sizes @ [_, _, _, _, keys, _, _] in [[1, 2, 1, 40, 40, 20, 33], [1, 2, 1, 300, 300, 16, 16]] {
        let mut case = Case::plain(&mut Rng::new(7), sizes);
        (case.causal, case.alignment) = (true, Some(Alignment::TopLeft));
        for dtype in SHORT {
            let clean = Short::new(case.clone(), [dtype; 3]);
            for (isa, exec) in execs() {
                let expected = clean.case.run_over(clean.source(), exec, Wanted::LEAST);
                for cut in [1, 5, 16, 37, 255, 257, 299].into_iter().filter(|&j| j < keys) {
                    for x in POISONS {
                        for case in poisoned(&case, |j| j >= cut, x) {
                            let short = Short::new(case, [dtype; 3]);
                            let got = short.case.run_over(short.source(), exec, Wanted::LEAST);
                            let what = format!("{dtype}, {x} from key {cut}, {isa}");
                            assert_same_bits(&what, &got.out.rows(0..cut), &expected.out.rows(0..cut));
                            same_full(&what, &got, &short.wide.run(exec, Wanted::LEAST));
                        }
                    }
                }
            }
        }
    }
}
