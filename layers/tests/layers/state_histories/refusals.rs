//! Calls over a cache of states that are refused, and change nothing.

use super::{History, absent, seen};
use crate::support::{Rng, Tensor, UNWRITTEN};
use sdpa::{Error, ViewMut};
use sdpa_layers::{Form, LinearAttention, Normaliser, Reach};

/// Makes a refused call of some kind, and checks that it says so and has changed nothing.
pub(super) fn refuse(rng: &mut Rng, history: &mut History) {
    let before = seen(&history.cache);
    let (what, result) = if rng.below(3) == 0 { change(rng, history) } else { decode(rng, history) };
    history.said.push_str(&format!(" refused {what}"));
    let error = result.expect_err(&history.said);
    assert!(!error.to_string().is_empty(), "{}", history.said);
    assert!(seen(&history.cache) == before, "{}: refused, and changed", history.said);
}

/// A change of a sequence that is not there, or beyond its length, or a file that is none.
fn change(rng: &mut Rng, history: &mut History) -> (&'static str, Result<(), Error>) {
    let (absent, there) = (absent(rng, &history.plain), history.there());
    let (b, cache) = (rng.pick(&there), &mut history.cache);
    let len = cache.len(b).expect("it is there");
    match rng.below(8) {
        0 => ("truncate, absent", cache.truncate(absent, 0)),
        1 => ("truncate, beyond", cache.truncate(b, rng.pick(&[len + 1, usize::MAX]))),
        2 => ("fork, absent", cache.fork(absent, b)),
        3 => ("fork, to absent", cache.fork(b, absent)),
        4 => ("remove, absent", cache.remove_sequence(absent)),
        5 => ("len, absent", cache.len(absent).and(cache.state(absent)).map(drop)),
        6 if history.sizes[0] > 0 => {
            let file = cache.export_sequence(b).expect("it has heads");
            let cut = rng.below(file.len());
            let to = if len > 0 { b } else { absent };
            ("import", cache.import_sequence(to, if rng.below(2) == 0 { &file } else { &file[..cut] }))
        }
        _ => ("export, absent", cache.export_sequence(absent).map(drop)),
    }
}

/// A call over some sequences that does not fit in one way. Its output is not written.
fn decode(rng: &mut Rng, history: &mut History) -> (&'static str, Result<(), Error>) {
    let mut sequences = history.there();
    let rows = rng.below(4);
    let mut case = history.case(rng, &sequences, rows);
    let mut layer: LinearAttention = history.layer();
    let mut out_shape = case.out_shape();
    let wider = |x: &Tensor| Tensor::filled([x.shape[0], x.shape[1], x.shape[2], x.shape[3] + 1], 0.5);
    let longer = |x: &Tensor| Tensor::filled([x.shape[0], x.shape[1], x.shape[2] + 1, x.shape[3]], 0.5);
    let at = rng.below(sequences.len());
    let what = match rng.below(11) {
        0 => {
            sequences[at] = absent(rng, &history.plain);
            "decode, absent"
        }
        1 if sequences.len() > 1 => {
            sequences[at] = sequences[(at + 1) % sequences.len()];
            "decode, twice"
        }
        2 => {
            sequences.truncate(at);
            "decode, fewer sequences"
        }
        3 => {
            let mut lens = vec![rows; sequences.len()];
            lens[at] = rng.pick(&[rows + 1, usize::MAX]);
            case.lens = Some(lens);
            "decode, a length"
        }
        4 => {
            (case.v, out_shape[3]) = (wider(&case.v), out_shape[3] + 1);
            "decode, wider values"
        }
        5 => {
            (case.q, case.k) = (wider(&case.q), wider(&case.k));
            "decode, wider keys"
        }
        6 => {
            case.q = longer(&case.q);
            "decode, more queries than keys"
        }
        7..10 => {
            layer = wrong_settings(rng, layer, history.normaliser);
            "decode, settings"
        }
        _ => {
            out_shape[2] += 1;
            "decode, a longer output"
        }
    };
    let mut got = Tensor::filled(out_shape, f32::from_bits(UNWRITTEN));
    let out = ViewMut::bhld(&mut got.data, out_shape).expect("dense");
    let result = layer.decode(case.inputs(), &mut history.cache, &sequences, out, &mut history.compute);
    let unwritten = got.data.iter().all(|x| x.to_bits() == UNWRITTEN);
    assert!(unwritten, "{} {what}: refused, and wrote", history.said);
    (what, result)
}

/// Settings that no call over the cache has.
fn wrong_settings(rng: &mut Rng, layer: LinearAttention, normaliser: Normaliser) -> LinearAttention {
    match rng.below(4) {
        0 => layer.reach(Reach::Whole),
        1 if normaliser == Normaliser::None => layer.normaliser(Normaliser::KeySum),
        1 => layer.normaliser(Normaliser::None),
        2 => layer.scale(rng.pick(&[f32::NAN, f32::INFINITY])),
        _ => layer.form(Form::Chunked(rng.pick(&[0, 1025, usize::MAX]))),
    }
}
