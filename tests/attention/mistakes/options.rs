//! 22–37: numbers, biases, masks, lists and lengths. 64: options without a derivative.

use super::{ACCEPTED, K, Mistake, OUT, Q, V, answer, bytes, call, floats, good, inputs, mistake, numbers};
use sdpa::{
    Attention, BlockTable, Gradients, Inputs, KvCache, KvShape, Mask, Mods, Pages, Position, Run, Saved, ScoreMod,
    View, ViewMut, WeightMod, WithDerivative,
};

pub(super) fn mistakes() -> Vec<Mistake> {
    let scale = |x| call(Attention::new().scale(x), good(), OUT, &[]);
    let softcap = |x| call(Attention::new().softcap(x), good(), OUT, &[]);
    let keep = |shape| Mask::keep(bytes(shape));
    let fewer = "; mask_prefix and bias_prefix take fewer columns and hide the other keys; mask_suffix and bias_suffix \
        take the columns of the last keys";
    let three = Inputs::new(floats([3, 4, 3, 6]), floats([3, 2, 5, 6]), floats([3, 2, 5, 7]));
    let (few, infinite) = ([0.5; 2], f32::INFINITY);
    let short = inputs(good().mask(keep([1, 1, 3, 4])));
    let two = call(Attention::new(), three.bias(floats([2, 1, 1, 5])), [3, 4, 3, 7], &[]);
    vec![
        mistake(22, "scale NaN", scale(f32::NAN), "scale: NaN, but must be finite"),
        mistake(22, "scale ∞", scale(infinite), "scale: inf, but must be finite"),
        mistake(23, "softcap 0", softcap(0.0), "softcap: 0, but must be positive and finite"),
        mistake(23, "softcap negative", softcap(-30.0), "softcap: -30, but must be positive and finite"),
        mistake(23, "softcap NaN", softcap(f32::NAN), "softcap: NaN, but must be positive and finite"),
        mistake(24, "mask one column short", short, format!("mask: columns is 4, but k (rows) has 5{fewer}")),
        mistake(25, "mask with one column", one_column(), ACCEPTED),
        mistake(26, "mask per kv head", inputs(good().mask(keep([2, 2, 3, 5]))), ACCEPTED),
        mistake(27, "bias with batch 2 for batch 3", two, "bias: batch is 2, but the call has 3"),
        mistake(28, "bias NaN", nan_bias(), ACCEPTED),
        mistake(29, "slopes by kv_heads", inputs(good().alibi(&few)), "alibi slopes: length is 2, but q (heads) has 4"),
        mistake(30, "sinks by kv_heads", inputs(good().sinks(&few)), "sinks: length is 2, but q (heads) has 4"),
    ]
}

/// One column stands for all keys, row by row: what it hides from a row is everything.
fn one_column() -> String {
    let column = [1, 0, 1];
    let all: Vec<u8> = column.iter().flat_map(|&byte| [byte; 5]).collect();
    let [one, all] = [(&column[..], 1), (&all, 5)].map(|(data, n)| Mask::keep(View::bhld(data, [1, 1, 3, n]).unwrap()));
    let out = answer(Attention::new(), good().mask(one), OUT);
    assert_eq!(out, answer(Attention::new(), good().mask(all), OUT));
    inputs(good().mask(one))
}

/// A NaN on a visible key makes its row NaN, and no other.
fn nan_bias() -> String {
    let mut bias = [0.0; 15];
    bias[5 + 2] = f32::NAN;
    let bias = View::bhld(&bias, [1, 1, 3, 5]).unwrap();
    let out = answer(Attention::new(), good().bias(bias), OUT);
    for (i, row) in out.chunks(7).enumerate() {
        assert!(row.iter().all(|x| x.is_nan() == (i % 3 == 1)), "row {i}");
    }
    inputs(good().bias(bias))
}

/// 31–33: key lengths.
pub(super) fn lengths() -> Vec<Mistake> {
    let own = "needs tensors; caches and pages have their own lengths";
    let rows = numbers(2 * 2 * 5 * 7);
    let [k, v] = [(K, 120), (V, 140)].map(|(shape, n)| View::bhld(&rows[..n], shape).unwrap());
    let mut cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 6, value_dim: 7 }).unwrap();
    cache.append(k, v).unwrap();
    let pages = Pages::new(k, v, BlockTable { entries: &[1, 0], lens: &[5, 4] }).unwrap();
    vec![
        mistake(
            31,
            "kv_lens of another batch",
            inputs(good().kv_lens(&[5])),
            "kv_lens: length is 1, but the batch has 2",
        ),
        mistake(
            32,
            "kv_lens beyond kv_len",
            inputs(good().kv_lens(&[5, 6])),
            "kv_lens: entry 1 is 6, but must be at most 5, the keys of that sequence",
        ),
        mistake(
            33,
            "kv_lens with a cache",
            inputs(Inputs::cached(floats(Q), &cache).kv_lens(&[5, 5])),
            format!("kv_lens: {own}"),
        ),
        mistake(
            33,
            "kv_lens with pages",
            inputs(Inputs::paged(floats(Q), pages).kv_lens(&[5, 4])),
            format!("kv_lens: {own}"),
        ),
    ]
}

/// 34–37: ragged sequences.
pub(super) fn ragged() -> Vec<Mistake> {
    let ragged = |q: &[usize], k: &[usize]| {
        let inputs = Inputs::new(floats([1, 4, 6, 6]), floats([1, 2, 9, 6]), floats([1, 2, 9, 7])).ragged(q, k);
        call(Attention::new(), inputs, [1, 4, 6, 7], &[])
    };
    vec![
        mistake(
            34,
            "cumulative lengths that fall",
            ragged(&[0, 4, 3, 6], &[0, 1, 2, 9]),
            "ragged q: entry 2 is 3, but must be at least 4, the entry before it",
        ),
        mistake(
            34,
            "lengths in place of cumulative ones",
            ragged(&[2, 4], &[0, 9]),
            "ragged q: entry 0 is 2, but must be exactly 0, where cumulative lengths begin",
        ),
        mistake(
            34,
            "cumulative lengths without the 0",
            ragged(&[2, 6], &[0, 4, 9]),
            "ragged q: entry 0 is 2, but must be exactly 0, where cumulative lengths begin",
        ),
        mistake(
            34,
            "key lengths in place of cumulative ones",
            ragged(&[0, 2, 6], &[4, 5]),
            "ragged k: entry 0 is 4, but must be exactly 0, where cumulative lengths begin",
        ),
        mistake(
            35,
            "cumulative lengths that end early",
            ragged(&[0, 5], &[0, 9]),
            "ragged q: entry 1 is 5, but must be exactly 6, the number of rows",
        ),
        mistake(
            35,
            "cumulative lengths that end late",
            ragged(&[0, 6], &[0, 10]),
            "ragged k: entry 1 is 10, but must be exactly 9, the number of rows",
        ),
        mistake(
            36,
            "ragged with batch > 1",
            inputs(good().ragged(&[0, 3], &[0, 5])),
            "q: batch is 2, but a ragged call has 1",
        ),
        mistake(
            37,
            "ragged with unequal counts",
            ragged(&[0, 2, 6], &[0, 9]),
            "ragged k: number of sequences is 1, but ragged q has 2",
        ),
    ]
}

/// Backward calls with something that has no derivative.
pub(super) fn backward() -> Vec<Mistake> {
    fn outcome_of<S: ScoreMod, P: WeightMod>(inputs: Inputs<'_>, mods: &Mods<S, (), P>) -> String {
        let (mut dq, rows) = ([42.0f32; 4 * 3 * 6 * 2], floats([2, 4, 3, 1]));
        let gradients = Gradients::new().q(ViewMut::bhld(&mut dq, Q).expect("dense"));
        let saved = Saved::new(floats(OUT), rows, floats(OUT));
        let result = sdpa::attention_backward_with(&Attention::new(), inputs, saved, gradients, Run::new().mods(mods));
        assert!(result.is_ok() || dq.iter().all(|&x| x == 42.0), "a refused call wrote: {result:?}");
        super::outcome(result)
    }
    let (none, half) = (Mods::new(), |x: f32, _: Position| x / 2.0);
    let cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 6, value_dim: 7 }).expect("small");
    let closure = "score function: needs a derivative in a backward call: ScoreMod::derivative, or WithDerivative";
    let weights = "weight function: needs a forward call: it has no derivative";
    let cached = "backward: needs keys and values as tensors, not a cache or pages";
    let both = WithDerivative::new(half, |_, _| 0.5);
    let in_parameters = |mods| {
        let (mut written, saved) = ([42.0f32; 3], Saved::new(floats(OUT), floats([2, 4, 3, 1]), floats(OUT)));
        let (gradients, run) = (Gradients::new().parameters(&mut written), Run::new().mods(&mods));
        let result = sdpa::attention_backward_with(&Attention::new(), good(), saved, gradients, run);
        assert!(written == [42.0; 3], "a refused call wrote: {result:?}");
        super::outcome(result)
    };
    let no_parameters = "dparameters: length is 3, but the score function (ScoreMod::parameters) has 0";
    vec![
        mistake(64, "backward of a score closure", outcome_of(good(), &none.score(half)), closure),
        mistake(64, "backward of one with a derivative", outcome_of(good(), &none.score(both)), ACCEPTED),
        mistake(64, "gradients in parameters of closures", in_parameters(none.score(both)), no_parameters),
        mistake(64, "backward of a weight function", outcome_of(good(), &none.weight(half)), weights),
        mistake(64, "backward of a cache", outcome_of(Inputs::cached(floats(Q), &cache), &none), cached),
    ]
}
