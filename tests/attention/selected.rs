//! Rows that select keys: the oracle's numbers, the bits of calls over the selected keys alone, every source, refusals.

mod refusals;

use crate::kv_support::{append_tokens, cache_of, empty_cache, every_format, picked, same_full};
use crate::options::{Case, Full, Wanted, check_against_oracle, kept};
use crate::positions::{random_case, random_positions};
use crate::support::{Rng, Tensor, assert_same_bits, execs, fewer, indices};
use core::ops::Range;
use sdpa::{Exec, Inputs, Rectangle, SelectedKeys, SelectionError, SelectionShape, View, Workspace};

/// Random lists for the rows of a case: of any shape, some empty, some of all keys.
pub(crate) fn random_lists(rng: &mut Rng, case: &Case) -> SelectedKeys {
    let heads = rng.pick(&[1, case.kv_heads(), case.heads()]);
    lists_of_heads(rng, case, heads)
}

fn lists_of_heads(rng: &mut Rng, case: &Case, heads: usize) -> SelectedKeys {
    let q_lens: Vec<usize> = (0..case.batch()).map(|b| case.rows(b)).collect();
    let unit = rng.pick(&[1, 1, 1, 3, 16, 64, 256]);
    let rows = rng.pick(&[1, 1, 2, 16, 128, 1000]);
    let (mut starts, mut numbers, mut asked) = (vec![0], Vec::new(), Vec::new());
    let share = rng.pick(&[1, 2, 4, 16]);
    for (b, &q_len) in q_lens.iter().enumerate() {
        let units = case.kv_len(b).div_ceil(unit);
        for _ in 0..heads * q_len.div_ceil(rows) {
            match rng.below(8) {
                0 => {}
                1 => numbers.extend(0..units as u32),
                _ => numbers.extend((0..units as u32).filter(|_| rng.below(share) == 0)),
            }
            asked.resize_with(numbers.len(), || rng.below(2) == 0);
            starts.push(numbers.len());
        }
    }
    let asked = (rng.below(2) == 0).then_some(&asked[..]);
    let mut selected = SelectedKeys::new();
    let shape = SelectionShape { q_lens: &q_lens, heads, rows, unit };
    selected.fill(shape, &starts, &numbers, asked).expect("good lists");
    selected
}

/// A random case whose rows select keys.
fn selecting(rng: &mut Rng, seed: u64) -> Case {
    let case = random_case(rng, seed);
    let case = if rng.below(4) == 0 { random_positions(rng, &case) } else { case };
    let selected = Some(random_lists(rng, &case));
    Case { selected, ..case }
}

#[test]
fn lists_agree_with_the_oracle() {
    for seed in 0..fewer(300) {
        let rng = &mut Rng::new(seed ^ 0x5e1ec7);
        let case = selecting(rng, seed);
        let (oracle, wanted) = (case.oracle::<f64>(), rng.pick(&[Wanted::LEAST, Wanted::MASS, Wanted::ALL]));
        let mut first: Option<Full> = None;
        for (isa, exec) in execs() {
            let full = case.run(exec, wanted);
            check_against_oracle(&format!("seed {seed}, {isa}"), &case, &full, &oracle);
            if isa.has_fma() {
                same_full(&format!("seed {seed}, {isa}"), &full, first.get_or_insert_with(|| full.clone()));
            }
        }
    }
}

/// A list of one head: its rows, and the keys that it names.
struct List {
    b: usize,
    head: usize,
    rows: Range<usize>,
    keys: Vec<usize>,
}

fn lists(case: &Case) -> Vec<List> {
    let selected = case.selected.as_ref().expect("a case with lists");
    let mut all = Vec::new();
    for (b, head) in (0..case.batch()).flat_map(|b| (0..selected.heads()).map(move |head| (b, head))) {
        for first in (0..case.rows(b)).step_by(selected.rows()) {
            let units = selected.numbers(b, head, first).expect("a row");
            let keys = units.flat_map(|n| n * selected.unit()..(n + 1) * selected.unit());
            let keys = keys.filter(|&key| key < case.kv_len(b)).collect();
            let rows = first..case.rows(b).min(first + selected.rows());
            all.push(List { b, head, rows, keys });
        }
    }
    all
}

/// The case of one query head's rows of a list over the keys that it names, at their own positions.
fn alone(case: &Case, list: &List, head: usize) -> Case {
    let (b, kv_head) = (list.b, head * case.kv_heads() / case.heads());
    let gather = |x: &Tensor| {
        let [.., dim] = x.shape;
        Tensor::from_fn([1, 1, list.keys.len(), dim], |[_, _, j, d]| x.get([b, kv_head, list.keys[j], d]))
    };
    let positions = |which: usize, i: usize| case.positions[which].map(|positions| positions[b][i]);
    let row = |i: usize| positions(0, i).unwrap_or(case.offset(b) as i32 + i as i32);
    let keys = list.keys.iter().map(|&key| positions(1, key).unwrap_or(key as i32)).collect();
    Case {
        q: case.q.part(b..b + 1, head..head + 1, list.rows.clone()),
        k: gather(&case.k),
        v: gather(&case.v),
        alibi: case.alibi.as_ref().map(|slopes| vec![slopes[head]]),
        sinks: case.sinks.as_ref().map(|sinks| vec![sinks[head]]),
        positions: [Some(kept(vec![list.rows.clone().map(row).collect()])), Some(kept(vec![keys]))],
        alignment: None,
        kv_lens: None,
        selected: None,
        ..case.clone()
    }
}

/// A case without options by column or key number, and without ragged sequences.
fn by_positions(rng: &mut Rng, seed: u64) -> Case {
    loop {
        let case = random_case(rng, seed);
        if case.ragged.is_none() {
            let case = if rng.below(4) == 0 { random_positions(rng, &case) } else { case };
            return Case { bias: None, mask: None, period: None, functions: Default::default(), ..case };
        }
    }
}

#[test]
fn a_list_has_the_bits_of_a_call_over_its_keys() {
    for seed in 0..fewer(60) {
        let rng = &mut Rng::new(seed ^ 0xa10e);
        let case = by_positions(rng, seed);
        let case = Case { selected: Some(random_lists(rng, &case)), ..case };
        for (isa, exec) in execs() {
            let full = case.run(exec, Wanted::LEAST);
            for list in lists(&case) {
                let of_list = case.heads() / case.selected.as_ref().map_or(1, SelectedKeys::heads);
                for head in list.head * of_list..(list.head + 1) * of_list {
                    let expected = alone(&case, &list, head).run(exec, Wanted::LEAST);
                    let part = |x: &Tensor| x.part(list.b..list.b + 1, head..head + 1, list.rows.clone());
                    let what = format!("seed {seed}, {isa}, sequence {}, head {head}, rows {:?}", list.b, list.rows);
                    assert_same_bits(&what, &part(&full.out), &expected.out);
                    assert_same_bits(&what, &part(&full.lse), &expected.lse);
                }
            }
        }
    }
}

/// A call on NaN, with enough rows for keys and values to be packed.
fn call_on_nan() -> Case {
    let nan = |shape| Tensor::filled(shape, f32::from_bits(u32::MAX));
    let (q, k, v) = (nan([1, 1, 17, 300]), nan([1, 1, 260, 300]), nan([1, 1, 260, 301]));
    Case { q, k, v, ..Case::plain(&mut Rng::new(0), [1, 1, 1, 17, 260, 300, 301]) }
}

/// Memory in which a call has left NaN.
fn used_workspace(call: &Case, exec: Exec) -> Workspace {
    let (mut full, mut workspace) = (call.unwritten(Wanted::LEAST), Workspace::new());
    call.run_over_into(call.inputs(), exec, &mut full, &mut workspace);
    workspace
}

/// In every format: whatever is gathered, copied or read in place has the bits of a cache of the listed tokens alone, whatever
/// calls used the workspace before.
#[test]
fn lists_over_caches_are_caches_of_the_listed_tokens() {
    let nan = call_on_nan();
    for seed in 0..fewer(24) {
        let rng = &mut Rng::new(seed ^ 0xcac4e);
        let [d, dv] = rng.pick(&[[64, 64], [32, 80], [17, 5], [96, 48]]);
        let (rows, keys) = (rng.pick(&[1, 3, 40]), rng.pick(&[9, 200, 300, 700, 1100]));
        let case = Case::plain(rng, [2, 4, 2, rows, keys, d, dv]);
        let case = Case { selected: Some(lists_of_heads(rng, &case, 1)), ..case };
        let tokens_of = |b: usize| [&case.k, &case.v].map(|x| x.part(b..b + 1, 0..2, 0..keys));
        let lists = lists(&case);
        let rows_of = |list: &List, x: &Tensor| x.part(list.b..list.b + 1, 0..4, list.rows.clone());
        let alone = lists.iter().map(|list| Case { q: rows_of(list, &case.q), selected: None, ..case.clone() });
        let alone: Vec<_> = alone.collect();
        for (format, empty) in every_format(&empty_cache(&case)) {
            let mut cache = empty.clone();
            (0..2).for_each(|b| append_tokens(&mut cache, b, &tokens_of(b)));
            let of_list = |list: &List| {
                let mut own = empty.clone();
                append_tokens(&mut own, 0, &picked(&tokens_of(list.b), &list.keys));
                own
            };
            let caches: Vec<_> = lists.iter().map(of_list).collect();
            for (isa, exec) in execs() {
                let (mut full, mut workspace) = (case.unwritten(Wanted::LEAST), used_workspace(&nan, exec));
                case.run_over_into(Inputs::cached(case.q.view(), &cache), exec, &mut full, &mut workspace);
                for ((list, alone), cache) in lists.iter().zip(&alone).zip(&caches) {
                    let what = format!("seed {seed}, {format}, {isa}, {} {:?}", list.b, list.rows);
                    let inputs = Inputs::cached(alone.q.view(), cache).sequences(&[0]);
                    let expected = alone.run_over(inputs, exec, Wanted::LEAST);
                    assert_same_bits(&what, &rows_of(list, &full.out), &expected.out);
                    assert_same_bits(&what, &rows_of(list, &full.lse), &expected.lse);
                }
            }
        }
    }
}

/// Everything beside lists, over a cache: the bits that tensors have.
#[test]
fn a_cache_has_the_bits_of_tensors() {
    for seed in 0..fewer(60) {
        let rng = &mut Rng::new(seed ^ 0x7e45);
        let case = random_case(rng, seed).side_by_side();
        let case = Case { selected: Some(random_lists(rng, &case)), ..case };
        let (cache, wanted) = (cache_of(&case, rng), rng.pick(&[Wanted::LEAST, Wanted::ALL]));
        for (isa, exec) in execs() {
            let full = case.run_over(Inputs::cached(case.q.view(), &cache), exec, wanted);
            same_full(&format!("seed {seed}, {isa}"), &full, &case.run(exec, wanted));
        }
    }
}

/// Whatever lies where no list of a row points, the row has the same bits.
#[test]
fn memory_that_no_list_names_is_not_seen() {
    for seed in 0..fewer(40) {
        let rng = &mut Rng::new(seed ^ 0x901);
        let case = by_positions(rng, seed);
        let case = Case { selected: Some(random_lists(rng, &case)), ..case };
        let named = lists(&case);
        let (heads, kv_heads) = (case.selected.as_ref().map_or(1, SelectedKeys::heads), case.kv_heads());
        let mut poisoned = case.clone();
        for [b, head, j, _] in indices([case.k.shape[0], kv_heads, case.k.shape[2], 1]) {
            let of_head = |list: &List| heads == 1 || list.head * kv_heads / heads == head;
            if !named.iter().any(|list| list.b == b && of_head(list) && list.keys.contains(&j)) {
                (0..case.k.shape[3]).for_each(|d| poisoned.k.set([b, head, j, d], f32::NAN));
                (0..case.v.shape[3]).for_each(|d| poisoned.v.set([b, head, j, d], f32::INFINITY));
            }
        }
        for (isa, exec) in execs() {
            let expected = case.run(exec, Wanted::LEAST);
            same_full(&format!("seed {seed}, {isa}"), &poisoned.run(exec, Wanted::LEAST), &expected);
        }
    }
}

/// What is refused leaves a selection of nothing, even before there are lists; so is one by default.
#[test]
fn a_refused_selection_is_empty() {
    let huge = [usize::MAX >> 9];
    let shape = |q_lens| SelectionShape { q_lens, heads: 1, rows: 1, unit: 1 };
    let number = [0i32];
    let repeated = View::from_strides(&number, 0, [1, 1, huge[0], 1], [0; 4]).expect("one number for all");
    let mut selected = SelectedKeys::default();
    assert!(!selected.names(0, 0, 0, 0) && selected.first_in(0, 0..9).is_none());
    let without_memory = selected.fill_padded(shape(&huge), &[1], Rectangle::new(repeated), None);
    assert_eq!(without_memory, Err(SelectionError::Memory { units: huge[0] }));
    assert!(selected.sequences() == 0 && selected.numbers(0, 0, 0).is_none());
    // Sizes are checked before there is memory for the lists.
    let size = SelectionError::Size { what: "number of starts", got: 1, expected: huge[0] + 1 };
    assert_eq!(selected.fill(shape(&huge), &[0], &[], None), Err(size));
    assert!(selected.sequences() == 0 && selected.bytes() < 1000);
}

/// A rectangle may have any number of places, if few count; and a unit too large is told by its own end.
#[test]
fn places_that_do_not_count_need_no_memory() {
    let number = [2i32];
    let wide = View::from_strides(&number, 0, [1, 1, 1, usize::MAX >> 9], [0; 4]).expect("one number for all");
    let (mut selected, one) = (SelectedKeys::new(), Rectangle::new(wide).lens(&[1]));
    let shape = SelectionShape { q_lens: &[1], heads: 1, rows: 1, unit: 1 };
    selected.fill_padded(shape, &[5], one, None).expect("one place");
    assert_eq!(selected.numbers(0, 0, 0).into_iter().flatten().collect::<Vec<_>>(), [2]);
    let too_large = selected.fill_padded(SelectionShape { unit: 1 << 31, ..shape }, &[5], one, None);
    assert_eq!(too_large, Err(SelectionError::TooLarge { sequence: 0, keys: 1 << 31 }));
}

#[test]
fn keys_are_counted_below_any_length() {
    let shape = SelectionShape { q_lens: &[1], heads: 1, rows: 1, unit: 3 };
    let mut selected = SelectedKeys::new();
    selected.fill(shape, &[0, 3], &[0, 2, 5], None).expect("good lists");
    for kv_len in 0..25 {
        let expected = (0..kv_len).filter(|&key| selected.names(0, 0, 0, key)).count();
        assert_eq!(selected.key_count(0, 0, 0, kv_len), expected, "{kv_len}");
    }
    assert_eq!(selected.key_count(0, 0, 1, 9), 0);
}
