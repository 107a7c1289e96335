//! Merging of results and of states: a side that saw no key counts for nothing, whatever its output holds.

use crate::support::{LAYOUTS, Rng, Tensor, assert_same, assert_same_bits, execs};
use sdpa::parts::{BlockStates, RowStates};
use sdpa::{Alignment, Attention, AttnState, Exec, Inputs, KvShape, Outputs, View, ViewMut, merge};

const HIDDEN: f32 = f32::NEG_INFINITY;
/// What other libraries leave in rows that saw nothing.
const LEFT: [f32; 4] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3.0];

/// Output and log-sum-exp over some keys.
type Side = crate::support::Answer;

/// Rows, if all, none or some have seen keys; the output of the others is what is left there.
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

/// Rows 0 to 4 see no key from 256 on (their values are not finite); rows −3 to 1 see none at all of the first.
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

/// Numbers that all scores of a row share.
const SHARED: [f32; 8] = [0.0, 3.5, 300.0, -1e4, 1e7, 1e9, -1e30, f32::MIN];

/// A call with one number for all scores, by a bias of one column.
struct Flat {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: [f32; 1],
    sinks: Option<[f32; 2]>,
}

impl Flat {
    fn new(shared: f32, rows: usize, v: Tensor) -> Self {
        let k = Tensor::filled(v.shape, 1.0);
        Self { q: Tensor::filled([1, 2, rows, v.shape[3]], 0.0), k, v, bias: [shared], sinks: None }
    }

    fn inputs(&self) -> Inputs<'_> {
        let bias = View::bhld(&self.bias, [1, 1, 1, 1]).unwrap();
        let bias = bias.broadcast([1, 1, self.q.shape[2], 1]).unwrap();
        let inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view()).bias(bias);
        self.sinks.as_ref().map_or(inputs, |sinks| inputs.sinks(sinks))
    }

    fn side(&self, columns: usize, write: impl FnOnce(Outputs<'_>)) -> Side {
        let [_, h, rows, dim] = self.q.shape;
        let [out, lse] = [dim, columns].map(|columns| Tensor::filled([1, h, rows, columns], f32::NAN));
        let mut side = Side { out, lse };
        write(Outputs::new(view_mut(&mut side.out)).lse(view_mut(&mut side.lse)));
        side
    }

    fn run(&self, columns: usize, exec: Exec) -> Side {
        self.side(columns, |outputs| Attention::new().problem(self.inputs(), outputs).unwrap().run_once(exec))
    }

    /// Panics unless the second column is what is left of the first, and all else has the bits of one column.
    #[track_caller]
    fn check(&self, what: &str, one: &Side, two: &Side) {
        let column = |column| Tensor::from_fn(one.lse.shape, |[b, h, l, _]| two.lse.get([b, h, l, column]));
        assert_same_bits(what, &two.out, &one.out);
        assert_same_bits(what, &column(0), &one.lse);
        let shared = f64::from(self.bias[0]);
        for [b, h, l, _] in crate::support::indices(one.lse.shape) {
            let lse = f64::from(one.lse.get([b, h, l, 0]));
            let sink = self.sinks.map_or(0.0, |sinks| (f64::from(sinks[h]) - shared).exp());
            let expected = (shared - lse) + (self.v.shape[2] as f64 + sink).ln();
            let got = f64::from(two.lse.get([b, h, l, 1]));
            assert!((got - expected).abs() < 1e-6, "{what}: {got} is left, expected {expected}");
        }
    }
}

#[test]
fn the_second_column_of_a_log_sum_exp_is_what_rounding_leaves() {
    let mut rng = Rng::new(5);
    for (rows, keys) in [(1, 5), (3, 300), (1, 3000), (40, 700)] {
        for shared in SHARED {
            let mut flat = Flat::new(shared, rows, Tensor::normal([1, 2, keys, 16], &mut rng));
            for (isa, exec) in execs() {
                let what = format!("{isa}, {shared:e}, {rows} rows, {keys} keys");
                let (one, two) = (flat.run(1, exec), flat.run(2, exec));
                flat.check(&what, &one, &two);
                let mut state = AttnState::from_inputs(Attention::new(), flat.inputs(), exec).unwrap();
                state.push(flat.k.view(), flat.v.view()).unwrap();
                flat.check(&what, &one, &flat.side(2, |outputs| state.read(outputs).unwrap()));
                let (mut blocks, mut states) = (BlockStates::new(), RowStates::new([1, 2, rows, 16]).unwrap());
                blocks.compute(&Attention::new(), flat.inputs(), 0, exec).unwrap();
                states.fold(&blocks).unwrap();
                flat.check(&what, &one, &flat.side(2, |outputs| states.write(None, outputs, exec).unwrap()));
                flat.sinks = Some([shared, shared - 1e-3 * shared.abs()]);
                flat.check(&what, &flat.run(1, exec), &flat.run(2, exec));
                flat.sinks = None;
            }
        }
    }
    // Without a key there is nothing to round.
    let none = Flat::new(1.0, 2, Tensor::filled([1, 2, 0, 16], 0.0)).run(2, Exec::serial());
    assert_eq!(none.lse.data, [HIDDEN, 0.0].repeat(4));
}

/// 300 keys count for 300, and one for one, wherever their scores are.
#[test]
fn results_far_from_zero_are_merged_by_both_columns() {
    let mut rng = Rng::new(6);
    for shared in SHARED {
        let v = Tensor::normal([1, 2, 301, 16], &mut rng);
        let part = |keys| Flat::new(shared, 3, v.rows(keys));
        let (whole, [first, second]) = (part(0..301), [0..300, 300..301].map(part));
        for (isa, exec) in execs() {
            let what = format!("{isa}, {shared:e}");
            let (mut all, expected) = (first.run(2, exec), whole.run(2, exec));
            let other = second.run(2, exec);
            merge((view_mut(&mut all.out), view_mut(&mut all.lse)), (other.out.view(), other.lse.view())).unwrap();
            let exact: Vec<f64> = expected.out.data.iter().map(|&x| x.into()).collect();
            crate::support::assert_close(&what, &all.out, &exact, 1e-6);
            for (got, expected) in all.lse.data.chunks(2).zip(expected.lse.data.chunks(2)) {
                let apart = (f64::from(got[0]) - f64::from(expected[0])) + (f64::from(got[1]) - f64::from(expected[1]));
                assert!(apart.abs() < 2e-6, "{what}: {got:?}, expected {expected:?}");
            }
        }
    }
}

/// Whichever of two sides is merged into the other, also where one saw nothing and with rounding errors of log-sum-exps.
#[test]
fn the_order_of_two_sides_changes_no_bit() {
    for (seed, dim) in [1, 3, 16, 65].into_iter().enumerate() {
        let mut rng = Rng::new(seed as u64 ^ 0x02de2);
        let (mine, other) = (side(&mut rng, dim, |row| row % 5 > 0), side(&mut rng, dim, |row| row % 7 > 0));
        let far = |side: &Side, rng: &mut Rng| {
            let lse = Tensor::from_fn([2, 3, 5, 2], |[b, h, l, column]| match column {
                0 => side.lse.get([b, h, l, 0]) * 1e6,
                _ => rng.normal() * 0.01,
            });
            Side { lse, ..side.clone() }
        };
        let (far_mine, far_other) = (far(&mine, &mut rng), far(&other, &mut rng));
        for [a, b] in [[&mine, &other], [&far_mine, &far_other]] {
            assert_same("the other order", &merged(a, b), &merged(b, a));
        }
    }
}
