//! Merging of results and of states: a side that saw no key counts for nothing, whatever its output holds.

use crate::support::{LAYOUTS, Rng, Tensor, assert_same, assert_same_bits, execs};
use sdpa::{Alignment, Attention, AttnState, KvShape, Outputs, ViewMut, merge};

const HIDDEN: f32 = f32::NEG_INFINITY;
/// What other libraries leave in rows that saw nothing.
const LEFT: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3.0];

/// Output and log-sum-exp over some keys.
type Side = crate::support::Answer;

/// Rows of which all, none or some have seen keys; the output of the others is what is left there.
fn side(rng: &mut Rng, dim: usize, seen: impl Fn(usize) -> bool) -> Side {
    let mut side = Side { out: Tensor::normal([2, 3, 5, dim], rng), lse: Tensor::normal([2, 3, 5, 1], rng) };
    for (row, lse) in side.lse.data.iter_mut().enumerate().filter(|(row, _)| !seen(*row)) {
        *lse = HIDDEN;
        side.out.data[row * dim..][..dim].fill_with(|| rng.pick(&LEFT));
    }
    side
}

fn view_mut(x: &mut Tensor) -> ViewMut<'_> {
    ViewMut::from_strides(&mut x.data, x.offset, x.shape, x.strides).unwrap()
}

fn merged(mine: &Side, other: &Side) -> Side {
    let mut all = mine.clone();
    let to = (view_mut(&mut all.out), view_mut(&mut all.lse));
    merge(to, (other.out.view(), other.lse.view())).unwrap();
    all
}

#[test]
fn a_side_that_saw_no_key_counts_for_nothing_whatever_its_output_holds() {
    for (seed, dim) in [1, 3, 16, 65].into_iter().enumerate() {
        let mut rng = Rng::new(seed as u64);
        let (seen, unseen) = (side(&mut rng, dim, |_| true), side(&mut rng, dim, |_| false));
        assert_same("into what saw keys", &merged(&seen, &unseen), &seen);
        assert_same("into what saw none", &merged(&unseen, &seen), &seen);
        let none = merged(&unseen, &side(&mut rng, dim, |_| false));
        let empty = [Tensor::filled(none.out.shape, 0.0), Tensor::filled(none.lse.shape, HIDDEN)];
        assert_same_bits("both saw none: out", &none.out, &empty[0]);
        assert_same_bits("both saw none: lse", &none.lse, &empty[1]);
    }
}

#[test]
fn of_many_sides_those_that_saw_keys_alone_are_merged() {
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let rule = |number: usize| move |row: usize| (row + number).is_multiple_of(3);
        let sides: Vec<Side> = (0..7).map(|number| side(&mut rng, 20, rule(number))).collect();
        let all = sides[1..].iter().fold(sides[0].clone(), |all, next| merged(&all, next));
        for row in 0..30 {
            let mut seen = sides.iter().filter(|side| side.lse.data[row] != HIDDEN);
            let first = seen.next().unwrap().clone();
            let expected = seen.fold(first, |all, next| merged(&all, next));
            assert_eq!(all.lse.data[row].to_bits(), expected.lse.data[row].to_bits(), "row {row}");
            assert_eq!(all.out.data[row * 20..][..20], expected.out.data[row * 20..][..20], "row {row}");
        }
    }
}

#[test]
fn merging_gives_the_bits_of_the_formula_in_every_layout() {
    for (seed, dim) in [1, 7, 16, 33, 128].into_iter().enumerate() {
        let mut rng = Rng::new(seed as u64);
        let (mine, other) = (side(&mut rng, dim, |row| row % 5 > 0), side(&mut rng, dim, |row| row % 7 > 0));
        let plain = merged(&mine, &other);
        for row in (0..30).filter(|row| row % 5 > 0 && row % 7 > 0) {
            let [a, b] = [&mine, &other].map(|side| f64::from(side.lse.data[row]));
            let (wa, wb) = ((a - a.max(b)).exp(), (b - a.max(b)).exp());
            assert_eq!(plain.lse.data[row], (a.max(b) + (wa + wb).ln()) as f32);
            for at in row * dim..(row + 1) * dim {
                let [x, y] = [&mine, &other].map(|side| f64::from(side.out.data[at]));
                assert_eq!(plain.out.data[at], ((x * wa + y * wb) / (wa + wb)) as f32);
            }
        }
        for (mine_as, other_as) in LAYOUTS.into_iter().flat_map(|a| LAYOUTS.map(|b| (a, b))) {
            let laid = |side: &Side, layout| Side { out: side.out.laid_out(layout), lse: side.lse.laid_out(layout) };
            let got = merged(&laid(&mine, mine_as), &laid(&other, other_as));
            assert_same(&format!("{mine_as:?}, {other_as:?}"), &got, &plain);
        }
    }
}

/// Rows 0 to 4 see no key from 256 on, whose values are not finite; rows −3 to 1 see none at all of the first.
#[test]
fn states_of_keys_that_a_row_does_not_see_count_for_nothing() {
    let mut rng = Rng::new(5);
    let (q, k) = (Tensor::normal([1, 2, 5, 16], &mut rng), Tensor::normal([1, 2, 768, 16], &mut rng));
    for (poison, offset) in LEFT.into_iter().flat_map(|x| [0, 250, 256, 300, 510, 600, -3].map(|n| (x, n))) {
        let mut v = Tensor::normal([1, 2, 768, 20], &mut rng);
        let last = (offset + 4).max(0) as usize;
        (last + 1..768).for_each(|key| v.fill_row(key, poison));
        let attention = Attention::new().causal().align(Alignment::Offset(offset));
        for (isa, exec) in execs() {
            let of = |keys: core::ops::Range<usize>| {
                let state =
                    AttnState::new(attention, q.view(), KvShape { kv_heads: 2, head_dim: 16, value_dim: 20 }, exec)
                        .unwrap();
                let mut state = state.starting_at(keys.start).unwrap();
                state.push(k.view().rows(keys.clone()).unwrap(), v.view().rows(keys).unwrap()).unwrap();
                state
            };
            let mut merged = of(0..256);
            [256..512, 512..768].into_iter().for_each(|keys| merged.merge(&of(keys)).unwrap());
            let what = format!("{poison} behind, rows from {offset}, {isa}");
            assert_same(&what, &read(&mut merged), &read(&mut of(0..768)));
            assert!(read(&mut merged).out.data.iter().all(|x| x.is_finite()), "{what}");
        }
    }
}

fn read(state: &mut AttnState<'_>) -> Side {
    let unwritten = |dim| Tensor::filled([1, 2, 5, dim], f32::from_bits(crate::support::UNWRITTEN));
    let mut side = Side { out: unwritten(20), lse: unwritten(1) };
    state.read(Outputs::new(view_mut(&mut side.out)).lse(view_mut(&mut side.lse))).unwrap();
    side
}

#[test]
fn infinite_log_sum_exps_make_the_row_nan() {
    for [mine, other] in [[f32::INFINITY, 0.0], [0.0, f32::INFINITY], [f32::NAN, 0.0], [0.0, f32::NAN]] {
        let mut a = Side { out: Tensor::filled([1, 1, 1, 3], 1.0), lse: Tensor::filled([1; 4], mine) };
        let b = Side { out: Tensor::filled([1, 1, 1, 3], 2.0), lse: Tensor::filled([1; 4], other) };
        a = merged(&a, &b);
        assert!(a.out.data.iter().chain(&a.lse.data).all(|x| x.is_nan()), "{mine}, {other}: {a:?}");
    }
}
