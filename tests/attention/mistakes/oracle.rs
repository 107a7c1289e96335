//! 3–32: what the fused path refuses is refused by the oracle, too, in the same words.

use super::{ACCEPTED, Mistake, OUT, bytes, call, floats, good, mistake, outcome};
use core::num::NonZeroUsize;
use sdpa::{Alignment, Attention, Inputs, KvCache, KvShape, Mask, Mods, Window, naive};

pub(super) fn mistakes() -> Vec<Mistake> {
    let plain = Attention::new();
    let twice = Inputs::new(floats([2, 2, 3, 6]), floats([2, 4, 5, 6]), floats([2, 4, 5, 7]));
    let all = [
        (3, "oracle: heads no multiple of kv_heads", plain, twice),
        (8, "oracle: causal", plain.causal(), good()),
        (9, "oracle: window", plain.window(Window::inclusive(Some(1), None)), good()),
        (10, "oracle: ALiBi", plain, good().alibi(&[0.5; 4])),
        (22, "oracle: scale NaN", plain.scale(f32::NAN), good()),
        (23, "oracle: softcap 0", plain.softcap(0.0), good()),
        (23, "oracle: dropout 1", plain.dropout(1.0, 0, 0), good()),
        (24, "oracle: mask one column short", plain, good().mask(Mask::keep(bytes([1, 1, 3, 4])))),
        (26, "oracle: bias of 3 heads", plain, good().bias(floats([2, 3, 3, 5]))),
        (29, "oracle: slopes by kv_heads", plain.align(Alignment::TopLeft), good().alibi(&[0.5; 2])),
        (29, "oracle: slope NaN", plain.align(Alignment::TopLeft), good().alibi(&[f32::NAN; 4])),
        (30, "oracle: sinks by kv_heads", plain, good().sinks(&[0.5; 2])),
        (31, "oracle: kv_lens of another batch", plain, good().kv_lens(&[5])),
        (32, "oracle: kv_lens beyond kv_len", plain, good().kv_lens(&[5, 6])),
    ];
    let mut all: Vec<Mistake> =
        all.into_iter().map(|(number, what, of, inputs)| refused(number, what, of, inputs)).collect();
    let mut cache =
        KvCache::sliding(1, KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 }, NonZeroUsize::new(100).unwrap(), 4)
            .unwrap();
    (0..10).for_each(|_| cache.append(floats([1, 1, 100, 2]), floats([1, 1, 100, 2])).unwrap());
    let cached = Inputs::cached(floats([1, 1, 1, 2]), &cache);
    all.push(mistake(50, "oracle: keys that slid away", oracle(plain, cached), call(plain, cached, [1, 1, 1, 2], &[])));
    all.push(mistake(1, "oracle: nothing", oracle(plain, good()), ACCEPTED));
    all
}

fn oracle(attention: Attention, inputs: Inputs<'_>) -> String {
    outcome(naive::oracle(&attention, &inputs))
}

/// A mistake that the oracle, in either precision and backwards, answers as the fused path does.
fn refused(number: usize, what: &'static str, attention: Attention, inputs: Inputs<'_>) -> Mistake {
    let [batch, _, rows, _] = OUT;
    let heads = inputs.queries().shape()[1];
    let out = [batch, heads, rows, 7];
    let expected = call(attention, inputs, out, &[]);
    assert_ne!(expected, ACCEPTED, "{what}");
    let got = oracle(attention, inputs);
    assert_eq!(outcome(naive::attention(&attention, &inputs)), got, "{what}");
    assert_eq!(
        outcome(naive::gradients::<f64, _, _, _>(&attention, &inputs, floats(out), None, &Mods::new())),
        got,
        "{what}"
    );
    mistake(number, what, got, expected)
}
