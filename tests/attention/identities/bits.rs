//! The same attention said in different ways has the same bits, whatever the options.

use crate::options::elements::Rounded;
use crate::options::mods::{Functions, Keep, Score};
use crate::options::{Case, Full, MaskData, Wanted, same_rows};
use crate::support::{LAYOUTS, Rng, Tensor, assert_same_bits, execs};
use sdpa::{Alignment, AttnState, Exec, Isa, KvShape, View, ViewMut, Window, merge};
use std::num::NonZeroUsize;

/// Products of a case, at most.
const MOST: usize = 1_500_000;

/// So many random cases on every instruction set.
fn every(seed: u64, cases: usize, mut check: impl FnMut(&str, &mut Rng, &Case, Exec)) {
    for n in 0..cases as u64 {
        let case = Case::random(&mut Rng::new(seed + n), MOST);
        for (isa, exec) in execs() {
            check(&format!("seed {}, {isa}", seed + n), &mut Rng::new(!n), &case, exec);
        }
    }
}

fn same(what: &str, (case, got): (&Case, &Full), (other, expected): (&Case, &Full)) {
    same_rows(what, (case, got), (other, expected), Some);
    if let (Some(got), Some(expected)) = (&got.mass, &expected.mass) {
        assert_same_bits(&format!("{what}: key weight sums"), got, expected);
    }
}

/// Everything but the scores before they are hidden: those differ where one case hides what the other never computes.
const AFTER: Wanted = Wanted { points: [false, false, false, true], mass: true };

#[test]
fn causal_in_seven_ways() {
    every(10_000, 60, |what, _, case, exec| {
        let mut plain = case.clone();
        (plain.bias, plain.mask, plain.ragged, plain.causal) = (None, None, None, false);
        plain.functions = Functions::default();
        if case.ragged.is_some() {
            plain.kv_lens = None;
            (plain.alignment, plain.sinks) = (Some(Alignment::TopLeft), None);
        }
        let sees = |[b, _, i, j]: [usize; 4]| j as isize <= i as isize + plain.offset(b);
        let with = |change: &dyn Fn(&mut Case)| {
            let mut case = plain.clone();
            change(&mut case);
            case
        };
        let flag = with(&|case| case.causal = true);
        let shape = [plain.batch(), plain.heads(), plain.longest().0, plain.longest().1];
        let hiding = Tensor::from_fn(shape, |at| if sees(at) { 0.0 } else { f32::NEG_INFINITY });
        let mut ways = vec![
            ("keep mask", with(&|case| case.mask = Some(plain.mask_by(true, sees)))),
            ("drop mask", with(&|case| case.mask = Some(plain.mask_by(false, sees)))),
            ("bias", with(&|case| case.bias = Some(hiding.clone().into()))),
        ];
        // The closures take one offset for all sequences.
        if (1..plain.batch()).all(|b| plain.offset(b) == plain.offset(0)) && plain.batch() > 0 {
            let offset = plain.offset(0);
            let mask = |hint| Functions { mask: Some((Keep::Causal(offset), hint)), ..Functions::default() };
            let score = Functions { score: Some(Score::Causal(offset)), ..Functions::default() };
            ways.push(("mask function", with(&|case| case.functions = mask(false))));
            ways.push(("mask function with a hint", with(&|case| case.functions = mask(true))));
            ways.push(("score function", with(&|case| case.functions = score)));
        }
        for wanted in [Wanted::MASS, AFTER] {
            let expected = flag.run(exec, wanted);
            for (way, case) in &ways {
                same(&format!("{what}: {way}"), (case, &case.run(exec, wanted)), (&flag, &expected));
            }
        }
    });
}

#[test]
fn a_row_alone_and_rows_apart() {
    every(20_000, 50, |what, rng, case, exec| {
        let whole = case.run(exec, Wanted::ALL);
        for b in 0..case.batch() {
            let one = case.sequence(b);
            let result = one.run(exec, Wanted::LEAST);
            same_rows(&format!("{what}: sequence {b}"), (&one, &result), (case, &whole), |[_, h, i]| Some([b, h, i]));
            let rows = one.rows(0);
            if rows == 0 {
                continue;
            }
            let cut = rng.below(rows + 1);
            let alone = rng.below(rows);
            for part in [0..cut, cut..rows, alone..alone + 1] {
                let some = one.some_rows(part.clone());
                let result = some.run(exec, Wanted::ALL);
                let what = format!("{what}: sequence {b}, rows {part:?}");
                same_rows(&what, (&some, &result), (case, &whole), |[_, h, i]| Some([b, h, part.start + i]));
            }
        }
    });
}

#[test]
fn the_order_of_a_batch_does_not_show() {
    every(30_000, 50, |what, _, case, exec| {
        if case.ragged.is_some() || case.batch() < 2 {
            return;
        }
        let order: Vec<usize> = (0..case.batch()).map(|b| (b + 1) % case.batch()).collect();
        let moved = case.reordered(&order);
        let (whole, other) = (case.run(exec, Wanted::ALL), moved.run(exec, Wanted::ALL));
        same_rows(what, (&moved, &other), (case, &whole), |[b, h, i]| Some([order[b], h, i]));
        let (mass, others) = (whole.mass.unwrap(), other.mass.unwrap());
        for (to, &from) in order.iter().enumerate() {
            let heads = 0..case.kv_heads();
            let keys = 0..case.keys(from);
            let part = |x: &Tensor, b: usize| x.part(b..b + 1, heads.clone(), keys.clone());
            assert_same_bits(&format!("{what}: key weight sums"), &part(&others, to), &part(&mass, from));
        }
    });
}

#[test]
fn ragged_is_padded_is_one_by_one() {
    let mut ragged = 0;
    every(40_000, 120, |what, _, case, exec| {
        if case.ragged.is_none() {
            return;
        }
        ragged += 1;
        let whole = case.run(exec, Wanted::ALL);
        for b in 0..case.batch() {
            let one = case.sequence(b);
            let result = one.run(exec, Wanted::ALL);
            same_rows(&format!("{what}: alone {b}"), (&one, &result), (case, &whole), |[_, h, i]| Some([b, h, i]));
            let first = case.key_at(b, 0).1;
            let mass = whole.mass.as_ref().unwrap().part(0..1, 0..case.kv_heads(), first..first + case.keys(b));
            assert_same_bits(&format!("{what}: key weight sums alone {b}"), &result.mass.unwrap(), &mass);
        }
        let mut case = case.clone();
        if case.alignment == Some(Alignment::BottomRight) {
            case.alignment = Some(Alignment::Offset(3));
        }
        let whole = case.run(exec, Wanted::ALL);
        for fill in [0.0, f32::NAN] {
            let padded = case.padded(fill);
            let result = padded.run(exec, Wanted::ALL);
            same_rows(&format!("{what}: padded with {fill}"), (&case, &whole), (&padded, &result), Some);
        }
    });
    assert!(ragged > 20, "only {ragged} ragged cases");
}

#[test]
fn layouts_hints_and_kinds_of_masks_do_not_show() {
    every(55_000, 60, |what, rng, case, exec| {
        let expected = case.run(exec, Wanted::MASS);
        let mut other = case.clone();
        for tensor in [&mut other.q, &mut other.k, &mut other.v] {
            *tensor = tensor.laid_out(rng.pick(&LAYOUTS));
        }
        other.bias = case.bias.as_ref().map(|x| Rounded::new(&x.wide.laid_out(rng.pick(&LAYOUTS)), x.dtype()));
        other.mask = case.mask.as_ref().map(|mask| {
            let tensor = mask.tensor.laid_out(rng.pick(&LAYOUTS));
            MaskData::new(mask.keep, mask.bools.is_none(), tensor)
        });
        other.functions.mask = case.functions.mask.map(|(keep, hint)| (keep, !hint));
        same(what, (&other, &other.run(exec, Wanted::MASS)), (case, &expected));
        // The other polarity over the opposite bytes.
        other.mask = case.mask.as_ref().map(|mask| {
            let opposite = |at| if mask.tensor.get(at) == 0.0 { 1.0 } else { 0.0 };
            MaskData::new(!mask.keep, false, Tensor::from_fn(mask.tensor.shape, opposite))
        });
        same(what, (&other, &other.run(exec, Wanted::MASS)), (case, &expected));
    });
}

#[test]
fn shared_heads_are_repeated_heads() {
    every(50_000, 40, |what, _, case, exec| {
        let apart = case.repeated_heads();
        let wanted = Wanted { mass: false, ..Wanted::ALL };
        same(what, (&apart, &apart.run(exec, wanted)), (case, &case.run(exec, wanted)));
    });
}

#[test]
fn a_window_over_everything_is_none() {
    every(60_000, 40, |what, _, case, exec| {
        let far = Some(100_000);
        let none = Case { window: None, ..case.clone() };
        let expected = none.run(exec, Wanted::ALL);
        let mut windows =
            vec![(None, None), (far, None), (None, far), (far, far), (Some(usize::MAX), Some(usize::MAX))]
                .into_iter()
                .map(|(left, right)| Window::inclusive(left, right))
                .collect::<Vec<_>>();
        windows.push(Window::inclusive(Some(0), Some(0)).keep_first(usize::MAX));
        if case.causal {
            windows.push(Window::last_tokens(NonZeroUsize::new(100_000).unwrap()));
            windows.push(Window::inclusive(None, Some(0)));
        }
        for window in windows {
            let wide = Case { window: Some(window), ..case.clone() };
            let result = wide.run(exec, Wanted::ALL);
            same(&format!("{what}: {window:?}"), (&wide, &result), (&none, &expected));
        }
    });
}

#[test]
fn outputs_asked_for_do_not_show() {
    every(70_000, 60, |what, rng, case, exec| {
        let alone = case.run(exec, Wanted::LEAST);
        let some = Wanted { points: [(); 4].map(|()| rng.below(2) == 0), mass: rng.below(2) == 0 };
        let mass = case.run(exec, Wanted::MASS);
        for wanted in [some, Wanted::ALL] {
            let more = case.run(exec, wanted);
            same(&format!("{what}: {wanted:?}"), (case, &more), (case, &alone));
            same(&format!("{what}: {wanted:?}, mass"), (case, &more), (case, &mass));
        }
    });
}

#[test]
fn register_width_does_not_show() {
    for seed in 80_000..80_060 {
        let case = Case::random(&mut Rng::new(seed), MOST);
        let mut fused = Isa::available().filter(|isa| isa.has_fma()).map(|isa| (isa, Exec::serial().isa(isa)));
        let Some((first, exec)) = fused.next() else { return };
        let expected = case.run(exec, Wanted::ALL);
        for (isa, exec) in fused {
            let what = format!("seed {seed}: {isa} against {first}");
            same(&what, (&case, &case.run(exec, Wanted::ALL)), (&case, &expected));
        }
    }
}

#[test]
#[cfg(feature = "rayon")]
fn threads_do_not_show() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let mut most_workers = 0;
    for seed in 90_000..90_030 {
        let mut rng = Rng::new(seed);
        let sizes = [rng.pick(&[1, 2]), rng.pick(&[2, 4]), 2, rng.pick(&[257, 300]), rng.pick(&[255, 520]), 33, 40];
        let case = Case::of_sizes(&mut rng, sizes);
        for (isa, exec) in execs() {
            for wanted in [Wanted::MASS, Wanted::ALL] {
                let expected = case.run(exec, wanted);
                for threads in [1, 2, 3] {
                    let mut full = case.unwritten(wanted);
                    let exec = Exec::default().isa(isa).threads(threads);
                    let plan = pool.install(|| case.run_into(exec, &mut full, &mut sdpa::Workspace::new()));
                    most_workers = most_workers.max(plan.workers());
                    same(&format!("seed {seed}: {isa}, {threads} threads"), (&case, &full), (&case, &expected));
                }
            }
        }
    }
    assert_eq!(most_workers, 3);
}

/// What a state can take: no options of single keys, one length for all.
fn stateful(case: &Case) -> Option<Case> {
    let case = Case { bias: None, mask: None, kv_lens: None, functions: Functions::default(), ..case.clone() };
    let case = if case.batch() > 0 { case.sequence(0) } else { return None };
    let alignment = match case.alignment {
        Some(Alignment::BottomRight) | None => Alignment::Offset(case.offset(0)),
        Some(alignment) => alignment,
    };
    (case.rows(0) > 0).then_some(Case { alignment: Some(alignment), ..case })
}

fn state<'c>(case: &'c Case, exec: Exec<'c>) -> AttnState<'c> {
    let mut state = AttnState::new(
        case.attention(),
        case.q.view(),
        KvShape { kv_heads: case.kv_heads(), head_dim: case.k.shape[3], value_dim: case.v.shape[3] },
        exec,
    )
    .expect("good");
    if let Some(slopes) = &case.alibi {
        state = state.alibi(slopes).expect("good slopes");
    }
    if let Some(sinks) = &case.sinks {
        state = state.sinks(sinks).expect("good sinks");
    }
    state
}

fn read(state: &mut AttnState<'_>, case: &Case) -> Full {
    let mut full = case.unwritten(Wanted::LEAST);
    state.read(full.outputs()).expect("good outputs");
    full
}

#[test]
fn keys_in_any_chunks_are_keys_at_once() {
    every(100_000, 80, |what, rng, case, exec| {
        let Some(case) = stateful(case) else { return };
        let expected = case.run(exec, Wanted::LEAST);
        let (keys, mut state, mut next) = (case.keys(0), state(&case, exec), 0);
        while next < keys {
            let most = rng.pick(&[1, 17, 256, 300, 600]);
            let last = keys.min(next + 1 + rng.below(most));
            state.push(case.k.view().rows(next..last).unwrap(), case.v.view().rows(next..last).unwrap()).unwrap();
            next = last;
            if rng.below(3) == 0 {
                read(&mut state, &case);
            }
        }
        assert_eq!(state.len(), keys);
        same(&format!("{what}: pushed"), (&case, &read(&mut state, &case)), (&case, &expected));
    });
}

#[test]
fn states_of_blocks_merge_to_the_whole() {
    every(110_000, 60, |what, _, case, exec| {
        let Some(case) = stateful(case) else { return };
        let expected = case.run(exec, Wanted::LEAST);
        let mut whole = state(&case, exec);
        for first in (0..case.keys(0)).step_by(256) {
            let last = case.keys(0).min(first + 256);
            let mut block = state(&case, exec).starting_at(first).unwrap();
            block.push(case.k.view().rows(first..last).unwrap(), case.v.view().rows(first..last).unwrap()).unwrap();
            whole.merge(&block).unwrap();
        }
        same(&format!("{what}: merged"), (&case, &read(&mut whole, &case)), (&case, &expected));
    });
}

#[test]
fn results_over_parts_of_the_keys_merge_to_the_whole() {
    every(120_000, 60, |what, rng, case, exec| {
        let Some(mut case) = stateful(case) else { return };
        // Keys kept at the front are counted from the front.
        case.window = case.window.map(|window| window.keep_first(0));
        let whole = case.run(exec, Wanted::LEAST);
        let (keys, [_, hkv, ..]) = (case.keys(0), case.k.shape);
        let cut = rng.below(keys + 1);
        // The sink goes with the first part.
        let part = |from: usize, to: usize, sinks: Option<Vec<f32>>| Case {
            k: case.k.part(0..1, 0..hkv, from..to),
            v: case.v.part(0..1, 0..hkv, from..to),
            alignment: Some(Alignment::Offset(case.offset(0) - from as isize)),
            sinks,
            ..case.clone()
        };
        let mut first = part(0, cut, case.sinks.clone()).run(exec, Wanted::LEAST);
        let second = part(cut, keys, None).run(exec, Wanted::LEAST);
        let (shape, lse_shape) = (first.out.shape, first.lse.shape);
        let mine = (ViewMut::bhld(&mut first.out.data, shape).unwrap(), ViewMut::bhld(&mut first.lse.data, lse_shape));
        let others: (View<'_>, View<'_>) = (second.out.view(), second.lse.view());
        merge((mine.0, mine.1.unwrap()), others).unwrap();
        let bound = |x: &Tensor| 16.0 * f32::EPSILON as f64 * crate::support::largest(&x.data).max(1.0);
        let expected = |x: &Tensor| x.data.iter().map(|&x| x as f64).collect::<Vec<_>>();
        let what = format!("{what}: cut at {cut} of {keys}");
        crate::support::assert_close(&format!("{what}, lse"), &first.lse, &expected(&whole.lse), bound(&whole.lse));
        // An error of the LSEs is a relative error of the weights.
        let relative = bound(&whole.lse) * crate::support::largest(&case.v.data).max(1.0);
        crate::support::assert_close(&format!("{what}, out"), &first.out, &expected(&whole.out), relative);
    });
}
