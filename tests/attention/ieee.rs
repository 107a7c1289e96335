//! NaN, ±∞, and nothing at all: a test for each line of the table in `src/ieee.md`.

mod expect;

use crate::options::{Case, Wanted};
use crate::support::{Rng, Tensor, execs, indices};
use expect::{D, DV, FINITE, INF, Is, KEYS, NAN, NANS, ZEROS, causal, expect, flat, hidden, plain, same_row, set_key};
use expect::{special, with};
use sdpa::{Attention, AttnState, Exec, Inputs, KvShape, Outputs, View, ViewMut};

#[test]
fn nan_in_a_query() {
    let make = with(plain, |case, _| case.q.set([0, 0, 1, 2], NAN));
    expect(&make, 1, NANS, Is::Nan, true);
    same_row(0, &make, plain);
    same_row(2, &make, plain);
}

#[test]
fn nan_in_a_key() {
    let make = with(causal, |case, keys| case.k.set([0, 0, special(keys), 1], NAN));
    expect(&make, 1, NANS, Is::Nan, true);
    same_row(0, &make, causal);
}

#[test]
fn nan_in_a_value() {
    let make = with(causal, |case, keys| case.v.set([0, 0, special(keys), 1], NAN));
    expect(&make, 1, [Is::Finite, Is::Nan, Is::Finite], Is::Finite, true);
    same_row(0, &make, causal);
}

#[test]
fn a_score_of_plus_infinity() {
    let make = with(causal, |case, keys| set_key(case, special(keys), INF));
    expect(&make, 1, NANS, Is::Nan, true);
    same_row(0, &make, causal);
}

#[test]
fn a_score_that_overflows() {
    // Finite in f64, so the oracle has no say.
    let make = with(plain, |case, keys| set_key(case, special(keys), 3e38));
    expect(make, 1, NANS, Is::Nan, false);
}

#[test]
fn a_score_of_minus_infinity_among_others() {
    let make = with(plain, |case, keys| set_key(case, special(keys), -INF));
    expect(&make, 1, FINITE, Is::Finite, true);
    // As if the key were not there.
    let masked = with(plain, |case, keys| case.mask = Some(case.mask_by(true, |at| at[3] != special(keys))));
    same_row(1, make, masked);
}

#[test]
fn a_score_of_minus_infinity_and_a_nan_value() {
    for x in [NAN, INF, -INF] {
        let make = with(plain, |case, keys| {
            set_key(case, special(keys), -INF);
            case.v.fill_row(special(keys), x);
        });
        expect(&make, 1, FINITE, Is::Finite, true);
        same_row(1, make, with(plain, |case, keys| set_key(case, special(keys), -INF)));
    }
}

#[test]
fn all_scores_minus_infinity() {
    let make = with(plain, |case, keys| (0..keys).for_each(|j| set_key(case, j, -INF)));
    expect(make, 1, ZEROS, Is::MinusInf, true);
}

#[test]
fn all_keys_hidden() {
    expect(hidden, 1, ZEROS, Is::MinusInf, true);
    for x in [NAN, INF, -INF] {
        let make = with(hidden, |case, keys| (0..keys).for_each(|j| case.v.fill_row(j, x)));
        expect(make, 1, ZEROS, Is::MinusInf, true);
    }
}

#[test]
fn no_keys() {
    expect(|_| plain(0), 1, ZEROS, Is::MinusInf, true);
    expect(with(plain, |case, _| case.kv_lens = Some(vec![0])), 1, ZEROS, Is::MinusInf, true);
}

#[test]
fn no_rows_or_no_batch() {
    for sizes in [[1, 2, 1, 0, 5, D, DV], [0, 2, 1, 3, 5, D, DV], [0, 2, 1, 0, 0, D, DV]] {
        let case = Case::plain(&mut Rng::new(0), sizes);
        for (_, exec) in execs() {
            let full = case.run(exec, Wanted::ALL);
            assert!(full.out.data.is_empty() && full.lse.data.is_empty(), "{sizes:?}");
            // Keys without rows have no mass.
            assert!(full.mass.unwrap().data.iter().all(|&x| x.to_bits() == 0), "{sizes:?}");
        }
    }
}

#[test]
fn a_scale_of_zero() {
    let make = |keys| Case { scale: Some(0.0), ..plain(keys) };
    expect(make, 1, FINITE, Is::Finite, true);
    let full = make(5).run(Exec::serial(), Wanted::LEAST);
    assert!((full.lse.data[0] - 5f32.ln()).abs() < 1e-6);
    // 0·∞ is NaN, as everywhere.
    let make = with(plain, |case, keys| {
        case.scale = Some(0.0);
        set_key(case, special(keys), INF);
    });
    expect(make, 1, NANS, Is::Nan, true);
}

#[test]
fn a_negative_scale() {
    let make = |keys| Case { scale: Some(-0.7), ..plain(keys) };
    expect(make, 1, FINITE, Is::Finite, true);
    let turned = |keys| {
        let mut case = plain(keys);
        indices(case.q.shape).for_each(|at| case.q.set(at, -case.q.get(at)));
        Case { scale: Some(0.7), ..case }
    };
    same_row(1, make, turned);
    // −(−∞) is +∞.
    let make = with(plain, |case, keys| {
        case.scale = Some(-0.7);
        set_key(case, special(keys), -INF);
    });
    expect(make, 1, NANS, Is::Nan, true);
}

#[test]
fn softcap_of_infinities() {
    for x in [INF, -INF] {
        // ±c, and visible.
        let make = with(plain, |case, keys| {
            case.softcap = Some(2.0);
            set_key(case, special(keys), x);
        });
        expect(make, 1, FINITE, Is::Finite, true);
    }
    let make = with(plain, |case, keys| {
        case.softcap = Some(2.0);
        set_key(case, special(keys), -INF);
        case.v.fill_row(special(keys), NAN);
    });
    expect(make, 1, NANS, Is::Finite, true);
}

#[test]
fn softcap_of_nan() {
    let make = with(plain, |case, keys| {
        case.softcap = Some(2.0);
        case.k.set([0, 0, special(keys), 0], NAN);
    });
    expect(make, 1, NANS, Is::Nan, true);
}

fn sink(make: fn(usize) -> Case, x: f32) -> impl Fn(usize) -> Case {
    move |keys| Case { sinks: Some(vec![x]), ..make(keys) }
}

#[test]
fn a_row_of_nothing_but_a_sink() {
    for x in [0.0, -3.25, 88.5, -1000.0] {
        expect(sink(hidden, x), 1, ZEROS, Is::This(x), true);
        expect(|_| sink(plain, x)(0), 1, ZEROS, Is::This(x), true);
    }
}

#[test]
fn a_sink_of_minus_infinity() {
    same_row(1, sink(plain, -INF), plain);
    expect(sink(plain, -INF), 1, FINITE, Is::Finite, true);
    expect(sink(hidden, -INF), 1, ZEROS, Is::MinusInf, true);
}

#[test]
fn a_sink_of_plus_infinity_or_nan() {
    for x in [INF, NAN, -NAN, f32::from_bits(0xffc0_1234)] {
        expect(sink(plain, x), 1, NANS, Is::Nan, true);
    }
}

fn bias(make: fn(usize) -> Case, x: f32) -> impl Fn(usize) -> Case {
    move |keys| {
        let at_special = |[.., j]: [usize; 4]| if j == special(keys) { x } else { 0.25 };
        Case { bias: Some(Tensor::from_fn([1, 1, 1, keys], at_special).into()), ..make(keys) }
    }
}

#[test]
fn a_bias_of_plus_infinity_or_nan() {
    for x in [INF, NAN] {
        expect(bias(causal, x), 1, NANS, Is::Nan, true);
        // Behind another mask it is nothing.
        same_row(0, bias(causal, x), bias(causal, 0.25));
    }
}

#[test]
fn a_bias_of_minus_infinity() {
    for x in [INF, -INF, NAN] {
        // Hides whatever the score was: NaN and +∞ too.
        let make = move |keys| {
            let mut case = bias(plain, -INF)(keys);
            set_key(&mut case, special(keys), x);
            case.v.fill_row(special(keys), x);
            case
        };
        expect(make, 1, FINITE, Is::Finite, true);
        same_row(1, make, bias(plain, -INF));
    }
}

#[test]
fn a_bias_of_the_smallest_number() {
    expect(bias(plain, f32::MIN), 1, FINITE, Is::Finite, true);
    // Alone it decides nothing: every weight is the same, the row is not empty.
    let make = |_| Case { bias: Some(Tensor::filled([1; 4], f32::MIN).into()), ..plain(1) };
    expect(make, 1, FINITE, Is::This(f32::MIN), true);
    let make = |keys| Case { bias: Some(Tensor::filled([1, 1, 1, keys], f32::MIN).into()), ..plain(keys) };
    expect(make, 1, FINITE, Is::This(f32::MIN), true);
}

#[test]
fn an_infinite_value() {
    for (x, is) in [(INF, Is::PlusInf), (-INF, Is::MinusInf)] {
        let make = with(causal, |case, keys| case.v.set([0, 0, special(keys), 2], x));
        expect(&make, 1, [Is::Finite, Is::Finite, is], Is::Finite, true);
        same_row(0, make, causal);
    }
    let both = with(plain, |case, keys| {
        case.v.set([0, 0, special(keys), 0], INF);
        case.v.set([0, 0, 0, 0], -INF);
    });
    expect(both, 1, [Is::Nan, Is::Finite, Is::Finite], Is::Finite, true);
}

#[test]
fn an_infinite_value_beside_sums_that_overflow() {
    // What overflows lies in the block of the infinite value, in another, or in both; of either sign.
    let last = KEYS[0].max(KEYS[1]) - 1;
    for places in [[0, 1], [0, 1_000], [1_000, 2_000]] {
        for (x, is, finite) in [(-INF, Is::MinusInf, f32::MAX), (INF, Is::PlusInf, -f32::MAX)] {
            let make = with(flat, |case, keys| {
                for at in places {
                    case.v.set([0, 0, at.min(keys - 2), 1], finite);
                }
                case.v.set([0, 0, last.min(keys - 1), 1], x);
            });
            expect(make, 1, [Is::Finite, is, Is::Finite], Is::Finite, true);
        }
    }
    // Whoever gathers: few rows by blocks of keys, many by rows, a state piece by piece; states that are merged.
    let (zeros, mut data) = ([0.0; 512], [0.0; 512]);
    (data[50], data[366], data[501]) = (f32::MAX, f32::MAX, -INF);
    let keys = |x| View::bhld(x, [1, 1, 512, 1]).unwrap();
    for (rows, (isa, exec)) in [1, 16, 17, 40].into_iter().flat_map(|rows| execs().map(move |exec| (rows, exec))) {
        let q = View::bhld(&zeros[..rows], [1, 1, rows, 1]).unwrap();
        let mut outs = [const { Vec::new() }; 3].map(|_: Vec<f32>| vec![0.0; rows]);
        let [whole, pieces, merged] =
            outs.each_mut().map(|out| Outputs::new(ViewMut::bhld(out, [1, 1, rows, 1]).unwrap()));
        Attention::new().problem(Inputs::new(q, keys(&zeros), keys(&data)), whole).unwrap().run_once(exec);
        let shape = KvShape { kv_heads: 1, head_dim: 1, value_dim: 1 };
        let state = |first| AttnState::new(Attention::new(), q, shape, exec).unwrap().starting_at(first).unwrap();
        let (mut all, mut earlier, mut later) = (state(0), state(0), state(256));
        let part = |x, rows| keys(x).rows(rows).unwrap();
        for rows in [0..100, 100..300, 300..512] {
            all.push(part(&zeros, rows.clone()), part(&data, rows)).unwrap();
        }
        earlier.push(part(&zeros, 0..256), part(&data, 0..256)).unwrap();
        later.push(part(&zeros, 256..512), part(&data, 256..512)).unwrap();
        all.read(pieces).unwrap();
        earlier.merge(&later).unwrap();
        earlier.read(merged).unwrap();
        assert!(outs.iter().flatten().all(|&x| x == -INF), "{isa}, {rows} rows: {outs:?}");
    }
}

#[test]
fn an_infinite_value_of_weight_zero() {
    // Visible, its weight underflowed to 0: 0·∞.
    let first = with(plain, |case, keys| {
        set_key(case, special(keys), -2000.0);
        case.v.set([0, 0, special(keys), 2], INF);
    });
    expect(first, 1, [Is::Finite, Is::Finite, Is::Nan], Is::Finite, true);
    // In an earlier block than the large scores.
    let earlier = with(plain, |case, _| {
        set_key(case, 0, -2000.0);
        case.v.set([0, 0, 0, 2], INF);
    });
    expect(earlier, 1, [Is::Finite, Is::Finite, Is::Nan], Is::Finite, true);
}

/// As many lines as tests, this one not counted.
#[test]
fn the_table_has_a_line_for_each_test() {
    let lines = include_str!("../../src/ieee.md").lines().filter(|line| line.starts_with("| ")).count();
    let tests = include_str!("ieee.rs").lines().filter(|line| *line == "#[test]").count();
    assert_eq!(lines - 1, tests - 1, "lines of the table, and tests");
}
