//! States and merges with parts that do not fit together.

use crate::fuzzer::array::At;
use crate::fuzzer::bits::{Recorder, settle, sizes};
use crate::fuzzer::compare::Written;
use crate::fuzzer::draw::{Home, draw_of, numbers};
use crate::fuzzer::parts;
use crate::fuzzer::place::Placed;
use crate::fuzzer::rng::Rng;
use sdpa::{Alignment, Attention, AttnState, Dtype, Error, Exec, KvShape, View, ViewMut, merge};

const ONE: [f32; 1] = [0.25];

fn view(shape: At) -> View<'static> {
    View::from_strides(&ONE, 0, shape, [0; 4]).expect("one element for all")
}

/// One of the sizes that is another than it should be, if any is.
fn spoiled(rng: &mut Rng, good: At) -> At {
    let mut shape = good;
    if rng.one_in(2) {
        let dim = rng.below(4);
        shape[dim] = rng.pick(&[0, shape[dim] + 1, shape[dim].saturating_sub(1)]);
    }
    shape
}

pub(super) fn check(rng: &mut Rng) {
    if rng.one_in(2) {
        merges(rng);
        return;
    }
    let [b, g, l, n] = [rng.below(3), rng.below(3), rng.below(4), rng.pick(&[0, 1, 5, 255, 256, 300])];
    let [h, d, dv] = [g * rng.up_to(2), 1 + rng.below(3), 1 + rng.below(3)];
    let attention = Attention::new().causal();
    let exec = Exec::serial();
    let late = attention.align(Alignment::BottomRight);
    for attention in [attention, late] {
        let refused =
            AttnState::new(attention, view([b, h, l, d]), KvShape { kv_heads: g, head_dim: d, value_dim: dv }, exec);
        assert!(matches!(refused, Err(Error::Needs { .. })), "nobody knows where the rows stand");
    }
    let attention = attention.align(Alignment::Offset(3));
    let [q, k, v] = [[b, h, l, d], [b, g, n, d], [b, g, n, dv]].map(|shape| spoiled(rng, shape));
    let what = format!("{q:?} {k:?} {v:?}, {g} heads, values of {dv}");
    let keys = KvShape { kv_heads: g, head_dim: if rng.one_in(4) { d } else { q[3] }, value_dim: dv };
    let fits = q[3] > 0 && q[3] == keys.head_dim && (q[1] == g || g > 0 && q[1].is_multiple_of(g));
    let state = AttnState::new(attention, view(q), keys, exec);
    assert_eq!(state.is_ok(), fits, "{what}, {keys:?}");
    let Ok(mut state) = state else { return };
    let fits = k == [q[0], g, k[2], q[3]] && v == [q[0], g, k[2], dv];
    let pushed = state.push(view(k), view(v));
    assert_eq!(pushed.is_ok(), fits, "{what}: {pushed:?}");
    assert_eq!(state.len(), if fits { k[2] } else { 0 }, "{what}");
    let first = rng.pick(&[0, 256, 512]);
    let later = AttnState::new(attention, view(q), keys, exec).and_then(|state| state.starting_at(first));
    let merged = state.merge(&later.expect("a good state"));
    assert_eq!(merged.is_ok(), first == if fits { k[2] } else { 0 }, "{what}, then from {first}: {merged:?}");
}

/// What a state gives if its keys come in pieces, or one merged of others; or what two results are merged to.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    if rng.one_in(4) {
        return bits_of_merged(rng, recorder);
    }
    let sizes = sizes(rng);
    let mut case = draw_of(rng, Home::Tensors, sizes);
    settle(rng, &mut case);
    let Some(case) = parts::for_a_state(rng, &case) else { return };
    recorder.describe(&case, Home::Tensors);
    let pieces = parts::Pieces::draw(rng, case.keys(0));
    recorder.say(format!("{pieces:?}"));
    recorder.each(rng, |rng, exec| pieces.gather(rng, &case, exec).all());
}

fn bits_of_merged(rng: &mut Rng, recorder: &mut Recorder) {
    let [b, h, l, dim] = [1 + rng.below(2), 1 + rng.below(3), rng.pick(&[1, 2, 17, 40]), 1 + rng.below(130)];
    recorder.say(format!("two results of {:?} merged", [b, h, l, dim]));
    let [outs, sums] = [dim, 1].map(|dim| [(); 2].map(|()| numbers(rng, [b, h, l, dim], Dtype::F32)));
    recorder.each(rng, |rng, _| {
        let [mut out, mut sum] = [&outs[0], &sums[0]].map(|x| Placed::<f32>::of_its_own(rng, x));
        let [other, other_sum] = [&outs[1], &sums[1]].map(|x| Placed::<f32>::of(rng, x));
        merge((out.view_mut(), sum.view_mut()), (other.view(), other_sum.view())).expect("they fit");
        [out, sum].map(|mut x| {
            let mut bits = x.take("merged");
            // Which NaN it is depends on the machine.
            bits.data.iter_mut().filter(|bits| f32::from_bits(**bits).is_nan()).for_each(|bits| *bits = 0x7fc0_0000);
            Some(Written { bits, dtype: Dtype::F32 })
        })
    });
}

/// Results over parts of the keys: shapes that fit, and untouched where they do not.
fn merges(rng: &mut Rng) {
    let good = [rng.below(3), rng.below(3), rng.below(3), rng.below(3)];
    let with_one = |[b, h, l, _]: At| [b, h, l, 1];
    let lse = spoiled(rng, with_one(good));
    let [other, other_lse] = [good, with_one(good)].map(|shape| spoiled(rng, shape));
    let (mut mine, mut mine_lse) = (vec![7.0; good.iter().product()], vec![0.25; lse.iter().product()]);
    let views = (ViewMut::bhld(&mut mine, good), ViewMut::bhld(&mut mine_lse, lse));
    let merged = merge((views.0.expect("dense"), views.1.expect("dense")), (view(other), view(other_lse)));
    // A second column has the rounding error of the first.
    let fits = other == good && [1, 2].contains(&lse[3]) && with_one(lse) == with_one(good) && other_lse == lse;
    assert_eq!(merged.is_ok(), fits, "{good:?} {lse:?} {other:?} {other_lse:?}: {merged:?}");
    // Both weigh the same.
    let (out, more) = if fits { (3.625, core::f32::consts::LN_2) } else { (7.0, 0.0) };
    let total = 0.25 * lse[3] as f32 + more;
    let mut rows = mine_lse.chunks(lse[3].max(1)).map(|row| row.iter().sum::<f32>());
    assert!(mine.iter().all(|&x| x == out) && rows.all(|x| (x - total).abs() < 1e-6), "{mine:?} {mine_lse:?}");
}
