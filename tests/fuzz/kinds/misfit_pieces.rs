//! States, keys and sums that do not fit together: refused by rules of one line each, with nothing written and no sum changed.

use crate::fuzzer::array::{At, Layout};
use crate::fuzzer::place::Placed;
use crate::fuzzer::rng::Rng;
use sdpa::parts::{BackwardState, BlockStates, KeyGradientShape, KeyGradientSums};
use sdpa::{
    Alignment, Attention, AttnState, Error, Exec, Gradients, Inputs, Mask, Mods, Position, Saved, View, Window,
};

const ONE: [f32; 1] = [0.25];

pub(super) fn check(rng: &mut Rng) {
    match rng.below(5) {
        0 => key_gradients(rng),
        1 => needs(rng),
        2 => merges(rng),
        _ => backward(rng),
    }
}

fn view(shape: At) -> View<'static> {
    View::from_strides(&ONE, 0, shape, [0; 4]).expect("one element for all")
}

/// One of several shapes with one of its sizes another, or all as they were.
fn spoiled<const N: usize>(rng: &mut Rng, good: [At; N]) -> [At; N] {
    let mut shapes = good;
    if rng.one_in(2) {
        let size = &mut shapes[rng.below(N)][rng.below(4)];
        *size = rng.pick(&[0, 1, *size + 1, size.saturating_sub(1)]);
    }
    shapes
}

fn blank(rng: &mut Rng, shape: At) -> Placed<f32> {
    let layout = Layout::draw(rng, shape);
    Placed::blank(rng, layout)
}

fn bits(sums: &KeyGradientSums) -> Vec<u32> {
    sums.as_slice().iter().map(|x| x.to_bits()).collect()
}

/// A state of the backward pass, two pushes, and what it writes.
fn backward(rng: &mut Rng) {
    let [b, g, l, n] = [rng.below(3), rng.below(3), rng.below(4), rng.pick(&[0, 1, 5, 255, 256, 300])];
    let [h, d, dv] = [g * rng.below(3), rng.below(3), rng.below(3)];
    let good = [[b, h, l, d], [b, g, 0, d], [b, g, 0, dv], [b, h, l, dv], [b, h, l, 1], [b, h, l, dv]];
    let [q, mut k, mut v, out, lse, d_out] = spoiled(rng, good);
    // Their rows do not count, if both have the same number.
    (k[2], v[2]) = (good[1][2], good[1][2]);
    let what = format!("{:?}", [q, k, v, out, lse, d_out]);
    let attention = Attention::new().causal().align(Alignment::Offset(3));
    let saved = Saved::new(view(out), view(lse), view(d_out));
    let state = BackwardState::new(attention, Inputs::new(view(q), view(k), view(v)), saved, Exec::serial());
    let heads = q[1] == k[1] || k[1] > 0 && q[1].is_multiple_of(k[1]);
    // A second column has what the rounding of the first leaves.
    let numbers = [1, 2].map(|columns| [q[0], q[1], q[2], columns]);
    let results = out == [q[0], q[1], q[2], v[3]] && d_out == out && numbers.contains(&lse);
    let fits =
        k == [q[0], k[1], k[2], q[3]] && v == [q[0], k[1], k[2], v[3]] && heads && q[3] > 0 && v[3] > 0 && results;
    assert_eq!(state.is_ok(), fits, "{what}: {:?}", state.err());
    let Ok(mut state) = state else { return };
    // They fit, so these are the sizes.
    let ([b, h, l, d], g, dv) = (q, k[1], v[3]);
    let mut whole = true;
    for n in [n, rng.pick(&[0, 1, 256])] {
        let [k, v] = spoiled(rng, [[b, g, n, d], [b, g, n, dv]]);
        let [of_k, of_v] = spoiled(rng, [[b, h, n, d], [b, h, n, dv]]);
        let shape =
            KeyGradientShape { batch: of_k[0], heads: of_k[1], keys: of_k[2], head_dim: of_k[3], value_dim: of_v[3] };
        let sums = KeyGradientSums::new(shape);
        if of_k[3] == 0 || of_v[3] == 0 {
            assert!(matches!(sums, Err(Error::Empty { .. })), "{shape:?}: {sums:?}");
            continue;
        }
        let mut sums = sums.expect("small");
        let (before, len) = (bits(&sums), state.len());
        let m = k[2];
        let fits = k == [b, g, m, d] && v == [b, g, m, dv] && (whole || m == 0);
        let fits = fits && shape == KeyGradientShape { batch: b, heads: h, keys: m, head_dim: d, value_dim: dv };
        let pushed = state.push(view(k), view(v), &mut sums);
        assert_eq!(pushed.is_ok(), fits, "{what}, then {k:?} {v:?} {shape:?}: {pushed:?}");
        assert_eq!(state.len(), if fits { len + m } else { len }, "{what}, then {k:?} {v:?}");
        assert!(fits || bits(&sums) == before, "a refused push changed sums");
        whole = state.len().is_multiple_of(256);
        assert!(matches!(state.skip(usize::MAX), Err(Error::TooLarge { .. })), "beyond the last position");
    }
    write(rng, state, [[b, h, l, d], [b, g, n, d]]);
}

/// What a state writes, or refuses to.
fn write(rng: &mut Rng, state: BackwardState<'_>, [q, k]: [At; 2]) {
    let [shape] = spoiled(rng, [q]);
    let (mut dq, mut other) = (blank(rng, shape), blank(rng, k));
    let (kind, mut parameters) = (rng.below(5), [7.0; 3]);
    let gradients = Gradients::new().q(dq.view_mut());
    let gradients = match kind {
        0 => gradients.k(other.view_mut()),
        1 => gradients.v(other.view_mut()),
        2 => gradients.bias(other.view_mut()),
        3 => gradients.parameters(&mut parameters),
        _ => gradients,
    };
    let checked = state.check(&gradients);
    let written = state.write(gradients);
    assert_eq!(written.is_ok(), checked.is_ok(), "{shape:?} of {q:?}, {kind}");
    assert_eq!(written.is_ok(), shape == q && kind == 4, "{shape:?} of {q:?}, {kind}: {written:?}");
    assert!(other.is_blank() && parameters == [7.0; 3], "what nobody has was written");
    if written.is_ok() {
        assert!(dq.take("dq").data.iter().all(|&bits| bits != u32::MAX), "not all was written");
    } else {
        assert!(dq.is_blank(), "a refused write wrote");
    }
}

/// Sums of any sizes, parts of them, and gradients that may not be theirs.
fn key_gradients(rng: &mut Rng) {
    let [b, g, n, d, dv] = [(); 5].map(|()| rng.below(4));
    let h = g * rng.below(3);
    let shape = KeyGradientShape { batch: b, heads: h, keys: n, head_dim: d, value_dim: dv };
    let sums = KeyGradientSums::new(shape);
    if d == 0 || dv == 0 {
        return assert!(matches!(sums, Err(Error::Empty { .. })), "{shape:?}: {sums:?}");
    }
    let mut sums = sums.expect("small");
    sums.as_mut_slice().fill(1.0);
    let keys = rng.below(5)..rng.below(5);
    let some = sums.keys(keys.clone());
    assert_eq!(some.is_ok(), keys.start <= keys.end && keys.end <= n, "keys {keys:?} of {n}");
    assert!(some.is_err() || some.is_ok_and(|some| some.shape() == KeyGradientShape { keys: keys.len(), ..shape }));
    let of_both = spoiled(rng, [[b, g, n, d], [b, g, n, dv]]);
    let fits = |[batch, heads, keys, dim]: At, expected: usize| {
        let shared = heads == h || heads > 0 && h.is_multiple_of(heads);
        shared && [batch, keys, dim] == [b, n, expected]
    };
    let fits = fits(of_both[0], d) && fits(of_both[1], dv);
    let (mut dk, mut dv, wrong) = (blank(rng, of_both[0]), blank(rng, of_both[1]), rng.one_in(4));
    let mut other = [7.0f32; 2];
    let gradients = Gradients::new().k(dk.view_mut()).v(dv.view_mut());
    let gradients = if wrong { gradients.sinks(&mut other) } else { gradients };
    let written = sums.write(&Attention::new().scale(1.0), gradients, Exec::serial());
    let what = format!("{of_both:?} of {shape:?}: {written:?}");
    assert_eq!(written.is_ok(), fits && !wrong, "{what}");
    assert_eq!(other, [7.0; 2], "{what}");
    for mut x in [dk, dv] {
        if written.is_ok() {
            // Each sum is of two halves, and of the heads that share a key.
            let all = x.take("gradients");
            let expected = 2.0 * h.checked_div(all.shape[1]).unwrap_or(0) as f32;
            assert!(all.data.iter().all(|&bits| f32::from_bits(bits) == expected), "{what}: not {expected}");
        } else {
            assert!(x.is_blank(), "{what}: a refused write wrote");
        }
    }
}

/// What states cannot know.
fn needs(rng: &mut Rng) {
    let [b, h, l, n] = [1 + rng.below(2), 1 + rng.below(2), 1 + rng.below(3), rng.pick(&[1, 256, 300])];
    let (q, kv) = (view([b, h, l, 2]), view([b, h, n, 2]));
    let plain = Inputs::new(q, kv, kv);
    let (late, ends) = (Attention::new().align(Alignment::BottomRight), [[0, l], [0, n]]);
    let own = vec![0i32; l];
    let own: Vec<&[i32]> = vec![&own; b];
    let dropped = BlockStates::new().compute(&Attention::new().dropout(0.5, 1, 2), plain, 0, Exec::serial());
    assert!(matches!(dropped, Err(Error::Needs { .. })), "{dropped:?}");
    let cases = [
        (late, plain),
        (
            Attention::new(),
            Inputs::new(view([1, h, l, 2]), view([1, h, n, 2]), view([1, h, n, 2])).ragged(&ends[0], &ends[1]),
        ),
        (Attention::new(), plain.bias_suffix(view([1, 1, 1, 1]))),
        (Attention::new(), plain.row_positions(&own)),
    ];
    let saved = Saved::new(view([b, h, l, 2]), view([b, h, l, 1]), view([b, h, l, 2]));
    let case = rng.below(cases.len());
    let (attention, inputs) = cases[case];
    let refused = [
        AttnState::from_inputs(attention, inputs, Exec::serial()).err(),
        BackwardState::new(attention, inputs, saved, Exec::serial()).err(),
        // Ragged rows fit states of blocks.
        if case == 1 { None } else { BlockStates::new().compute(&attention, inputs, 0, Exec::serial()).err() },
    ];
    for (n, refused) in refused.into_iter().enumerate().filter(|(n, _)| *n < 2 || case != 1) {
        assert!(matches!(refused, Some(Error::Needs { .. })), "case {case}, state {n}: {refused:?}");
    }
    let heavy = Mods::new().weight(|w: f32, _: Position| w);
    let forward = AttnState::from_inputs(Attention::new(), plain, Exec::serial()).expect("a good state").mods(&heavy);
    let back = || BackwardState::new(Attention::new(), plain, saved, Exec::serial()).expect("a good state");
    let underived = Mods::new().score(|s: f32, _: Position| s);
    let refused = [forward.err(), back().mods(&heavy).err(), back().mods(&underived).err()];
    assert!(refused.iter().all(|e| matches!(e, Some(Error::Needs { .. }))), "{refused:?}");
    let shape = KeyGradientShape { batch: b, heads: h, keys: n, head_dim: 2, value_dim: 2 };
    let (mut sums, mut dbias) = (KeyGradientSums::new(shape).expect("small"), blank(rng, [1, 1, 1, n]));
    let mut state = back();
    let refused = state.push_biased(kv, kv, &mut sums, dbias.view_mut());
    assert!(matches!(refused, Err(Error::Needs { .. })) && dbias.is_blank() && state.is_empty(), "{refused:?}");
    assert!(sums.as_slice().iter().all(|&x| x == 0.0), "a refused push changed sums");
    state.push(kv, kv, &mut sums).expect("they fit");
    let late = state.starting_at(96).err();
    assert!(matches!(late, Some(Error::Needs { .. })), "{late:?}");
    shaped_bias(rng, [b, h, l, n], saved);
}

/// Settings and options in which states must agree.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Agreed {
    scale: Option<f32>,
    softcap: Option<f32>,
    causal: bool,
    left: Option<usize>,
    offset: isize,
    slope: Option<f32>,
    options: [bool; 3],
}

impl Agreed {
    fn draw(rng: &mut Rng) -> Self {
        let left = rng.pick(&[None, None, Some(1)]);
        let options = [(); 3].map(|()| rng.one_in(4));
        // A head of four numbers has the scale ½.
        let (scale, softcap) = (rng.pick(&[None, Some(0.5), Some(0.25)]), rng.pick(&[None, None, Some(2.0)]));
        let slope = rng.pick(&[None, None, Some(0.5), Some(0.25)]);
        Self { scale, softcap, causal: rng.one_in(3), left, offset: rng.pick(&[0, 0, 3]), slope, options }
    }

    /// The same effect in the same words.
    fn by_effect(self) -> Self {
        let measures = self.causal || self.left.is_some() || self.slope.is_some();
        Self { scale: Some(self.scale.unwrap_or(0.5)), offset: if measures { self.offset } else { 0 }, ..self }
    }
}

/// A later state of other settings or kinds of options is refused.
fn merges(rng: &mut Rng) {
    let mut both = [Agreed::draw(rng); 2];
    if rng.one_in(2) {
        let Agreed { scale, softcap, causal, left, offset, slope, options } = Agreed::draw(rng);
        match rng.below(7) {
            0 => both[1].scale = scale,
            1 => both[1].softcap = softcap,
            2 => both[1].causal = causal,
            3 => both[1].left = left,
            4 => both[1].offset = offset,
            5 => both[1].slope = slope,
            _ => both[1].options = options,
        }
    }
    let (q, kv, byte, lens) = (view([1, 1, 1, 4]), view([1, 1, 0, 4]), [1u8], [300]);
    let mask = Mask::keep(View::bhld(&byte, [1, 1, 1, 1]).expect("dense"));
    let slopes = both.map(|agreed| [agreed.slope.unwrap_or(0.0)]);
    let mut states = [0, 1].map(|n| {
        let Agreed { scale, softcap, causal, left, offset, slope, options } = both[n];
        let mut attention = Attention::new().align(Alignment::Offset(offset));
        attention = scale.map_or(attention, |x| attention.scale(x));
        attention = softcap.map_or(attention, |x| attention.softcap(x));
        attention = left.map_or(attention, |left| attention.window(Window::inclusive(Some(left), None)));
        attention = if causal { attention.causal() } else { attention };
        let mut inputs = Inputs::new(q, kv, kv);
        inputs = if options[0] { inputs.bias(view([1, 1, 1, 1])) } else { inputs };
        inputs = if options[1] { inputs.mask(mask) } else { inputs };
        inputs = if options[2] { inputs.kv_lens(&lens) } else { inputs };
        inputs = slope.map_or(inputs, |_| inputs.alibi(&slopes[n]));
        AttnState::from_inputs(attention, inputs, Exec::serial()).expect("a good state")
    });
    states[0].push(view([1, 1, 256, 4]), view([1, 1, 256, 4])).expect("they fit");
    let [mut state, later] = states;
    let mut later = later.starting_at(256).expect("a whole block");
    later.push(view([1, 1, 5, 4]), view([1, 1, 5, 4])).expect("they fit");
    let (merged, fits) = (state.merge(&later), both[0].by_effect() == both[1].by_effect());
    assert!(if fits { merged.is_ok() } else { matches!(merged, Err(Error::Differs { .. })) }, "{both:?}: {merged:?}");
    assert_eq!(state.len(), if fits { 261 } else { 256 }, "{both:?}");
}

/// A gradient in the bias of any shape.
fn shaped_bias(rng: &mut Rng, [b, h, l, n]: At, saved: Saved<'_>) {
    let (q, kv) = (view([b, h, l, 2]), view([b, h, n, 2]));
    let bias = [rng.pick(&[1, b]), rng.pick(&[1, h]), rng.pick(&[1, l]), n + rng.below(2)];
    let inputs = Inputs::new(q, kv, kv).bias(view(bias));
    let mut state = BackwardState::new(Attention::new(), inputs, saved, Exec::serial()).expect("a good state");
    let shape = KeyGradientShape { batch: b, heads: h, keys: n, head_dim: 2, value_dim: 2 };
    let mut sums = KeyGradientSums::new(shape).expect("small");
    let good = [bias[0], bias[1], bias[2], n];
    let [given] = spoiled(rng, [good]);
    let mut dbias = blank(rng, given);
    let pushed = state.push_biased(kv, kv, &mut sums, dbias.view_mut());
    assert_eq!(pushed.is_ok(), given == good && bias[3] != 1, "{given:?} of a bias {bias:?}, {n} keys: {pushed:?}");
    if pushed.is_err() {
        assert!(dbias.is_blank() && state.is_empty() && sums.as_slice().iter().all(|&x| x == 0.0), "{given:?}");
    }
}
