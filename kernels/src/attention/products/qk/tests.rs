use super::*;
use crate::attention::products::multiply::Multiply;
use crate::attention::products::operands::RunKeys;
use crate::attention::steps::span::Span;
use crate::kv::key_block::Keys;
use crate::matmul::operands::Floats;
use crate::matmul::prefetch::PrefetchQueue;
use crate::simd::Simd;
use crate::simd::x86::avx512_token::Avx512;
use crate::tensor::any::{AnyPanels, Typed};
use crate::tensor::element::{Bf16, Dtype, Element};

/// Returns the scores of `rows` rows against `panels` panels, as bits. They must not depend on the core's first-level
/// cache.
fn scores(s: Avx512, [rows, panels, d]: [usize; 3], keys: AnyPanels) -> Vec<u32> {
    let queries: Vec<f32> = (0..rows * d).map(|i| (i as f32 * 0.37).sin()).collect();
    let pointers: Vec<_> = queries.chunks_exact(d).map(<[f32]>::as_ptr).collect();
    let spans = vec![Span::new(0, panels * LANES, false); rows.div_ceil(<Avx512 as Simd>::TILE_ROWS)];
    let mut out = vec![0.0; rows * SCORE_STRIDE];
    // SAFETY: every query has `d` floats, and the caller made `panels` panels.
    unsafe {
        let queries = QueryRows { rows: &pointers, head_dim: d, dtype: Dtype::F32, scale: 0.7 };
        let later = Some(LaterKeys::Rows { at: pointers[0].cast(), bytes: 64 });
        let run = &mut ScoreRun {
            rows,
            panels: 0..panels,
            spans: &spans,
            next_bias: None,
            prefetch: &mut PrefetchQueue::nothing(),
            out: &mut out,
        };
        Floats::scores(s, run, queries, RunKeys { keys: Keys::Packed(keys), later });
    }
    out.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_roomy_core_gives_the_same_bits() {
    let Some(s) = Avx512::detect() else {
        eprintln!("skipped: no AVX-512");
        return;
    };
    for d in [1, 16, 33, 64, 100, 128] {
        for panels in 1..=5 {
            let keys: Vec<f32> = (0..panels * d * LANES).map(|i| (i as f32 * 0.11).cos()).collect();
            let halves: Vec<Bf16> = keys.iter().map(|&x| Bf16::narrow(x)).collect();
            for rows in (1..=7).chain([16, 17, 24]) {
                let panel = (d * LANES) as isize;
                let keys = Rows::strided(keys.as_ptr(), panel, 1);
                for keys in [Typed::F32(keys), Typed::Bf16(Rows::strided(halves.as_ptr(), panel, 1))] {
                    let [roomy, narrow] = [true, false].map(|room| scores(s.with_room(room), [rows, panels, d], keys));
                    assert_eq!(roomy, narrow, "{rows} rows, {panels} panels, head_dim {d}");
                }
            }
        }
    }
}

#[test]
fn an_odd_panel_gives_the_same_bits() {
    let Some(s) = Avx512::detect() else {
        eprintln!("skipped: no AVX-512");
        return;
    };
    for d in [1, 16, 33, 64, 100, 128] {
        let most = 6;
        let keys: Vec<f32> = (0..most * d * LANES).map(|i| (i as f32 * 0.11).cos()).collect();
        let all = Typed::F32(Rows::strided(keys.as_ptr(), (d * LANES) as isize, 1));
        for rows in [16, 17, 20, 96] {
            let whole = scores(s, [rows, most, d], all);
            for panels in 1..most {
                let got = scores(s, [rows, panels, d], all);
                for (row, (got, whole)) in got.chunks(SCORE_STRIDE).zip(whole.chunks(SCORE_STRIDE)).enumerate() {
                    let seen = panels * LANES;
                    assert_eq!(got[..seen], whole[..seen], "row {row} of {rows}, {panels} panels, head_dim {d}");
                }
            }
        }
    }
}
