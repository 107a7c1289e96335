//! Lists that are refused, and calls that refuse lists.

use super::random_lists;
use crate::options::Case;
use crate::support::{Rng, Tensors, unwritten};
use core::num::NonZeroUsize;
use sdpa::{
    Attention, Error, Gradients, Inputs, KvCache, KvShape, ListPlace, Outputs, Rectangle, Saved, SelectedKeys,
    SelectionError, SelectionShape, View, ViewMut,
};

fn filled(shape: SelectionShape<'_>, starts: &[usize], numbers: &[u32]) -> Result<SelectedKeys, SelectionError> {
    let mut selected = SelectedKeys::new();
    selected.fill(shape, starts, numbers, None).map(|()| selected)
}

const TWO_ROWS: SelectionShape<'_> = SelectionShape { q_lens: &[2], heads: 1, rows: 1, unit: 1 };

#[test]
fn lists_that_are_none() {
    let list = |row| ListPlace { sequence: 0, head: 0, row };
    let expect = |starts: &[usize], numbers: &[u32], error: SelectionError| {
        assert_eq!(filled(TWO_ROWS, starts, numbers).unwrap_err(), error);
    };
    expect(&[0, 1], &[3], SelectionError::Size { what: "number of starts", got: 2, expected: 3 });
    expect(&[1, 1, 1], &[3], SelectionError::Starts { index: 0, got: 1, least: 0 });
    expect(&[0, 2, 1], &[3, 4], SelectionError::Starts { index: 2, got: 1, least: 2 });
    expect(&[0, 1, 1], &[3, 4], SelectionError::Size { what: "last start", got: 1, expected: 2 });
    expect(&[0, 1, 3], &[3, 4, 4], SelectionError::Repeated { list: list(1), places: [0, 1], got: 4 });
    expect(&[0, 1, 3], &[3, 4, 2], SelectionError::Order { list: list(1), place: 1, got: 2, before: 4 });
    expect(&[0, 1, 1], &[1 << 31], SelectionError::TooLarge { sequence: 0, keys: (1 << 31) + 1 });
    for (what, shape) in [
        ("heads", SelectionShape { heads: 0, ..TWO_ROWS }),
        ("rows", SelectionShape { rows: 0, ..TWO_ROWS }),
        ("unit", SelectionShape { unit: 0, ..TWO_ROWS }),
    ] {
        assert_eq!(filled(shape, &[0], &[]).unwrap_err(), SelectionError::Empty { what });
    }
    // What was there is gone, and the memory serves the next lists.
    let mut selected = filled(TWO_ROWS, &[0, 1, 2], &[3, 4]).unwrap();
    let bytes = selected.bytes();
    assert!(selected.fill(TWO_ROWS, &[0, 1, 3], &[3, 4, 4], None).is_err() && selected.sequences() == 0);
    selected.fill(TWO_ROWS, &[0, 0, 2], &[3, 4], None).unwrap();
    assert_eq!(selected.bytes(), bytes);
    assert!(selected.names(0, 0, 1, 3) && !selected.names(0, 0, 0, 3) && !selected.names(0, 0, 2, 3));
}

#[test]
fn rectangles() {
    let numbers = [4, -1, 0, 9, 7, 7, -1, 2];
    let view = View::bhld(&numbers, [1, 1, 2, 4]).unwrap();
    let mut selected = SelectedKeys::new();
    let list = ListPlace { sequence: 0, head: 0, row: 1 };
    let mut fill = |kv_len: usize, rectangle: Rectangle<'_>| selected.fill_padded(TWO_ROWS, &[kv_len], rectangle, None);
    let beyond = SelectionError::Beyond { list: ListPlace { row: 0, ..list }, place: 3, got: 9, units: 9 };
    assert_eq!(fill(9, Rectangle::new(view)), Err(beyond));
    let repeated = SelectionError::Repeated { list, places: [0, 1], got: 7 };
    assert_eq!(fill(10, Rectangle::new(view)), Err(repeated));
    assert_eq!(fill(10, Rectangle::new(view).lens(&[4, 5])), Err(SelectionError::Length { list, got: 5, places: 4 }));
    assert_eq!(fill(10, Rectangle::new(view).lens(&[4, 1])), Ok(()));
    assert_eq!(selected.numbers(0, 0, 0).unwrap().collect::<Vec<_>>(), [0, 4, 9]);
    assert_eq!(selected.numbers(0, 0, 1).unwrap().collect::<Vec<_>>(), [7]);
    let below = [-2; 8];
    let refused =
        selected.fill_padded(TWO_ROWS, &[10], Rectangle::new(View::bhld(&below, [1, 1, 2, 4]).unwrap()), None);
    assert!(matches!(refused, Err(SelectionError::Beyond { got: -2, place: 0, .. })), "{refused:?}");
}

/// Any order and any places: the lists that ascending numbers make.
#[test]
fn rectangles_are_lists() {
    for seed in 0..200 {
        let rng = &mut Rng::new(seed);
        let sizes = [1 + rng.below(3), 4, 2, 1 + rng.below(40), 1 + rng.below(300), 8, 8];
        let case = Case::plain(rng, sizes);
        let expected = random_lists(rng, &case);
        let (batch, rows) = (case.batch(), case.rows(0));
        let groups = rows.div_ceil(expected.rows());
        let numbers = |b, head, group: usize| expected.numbers(b, head, group * expected.rows()).unwrap();
        let every =
            || (0..batch).flat_map(|b| (0..expected.heads()).flat_map(move |h| (0..groups).map(move |g| (b, h, g))));
        let places = every().map(|(b, h, g)| numbers(b, h, g).len()).max().unwrap_or(0) + rng.below(4);
        let mut marked = [Vec::new(), Vec::new()];
        for (b, h, g) in every() {
            let mut row = [vec![-1; places], vec![-1; places]];
            for number in numbers(b, h, g) {
                let asked = expected.asks(b, h, g * expected.rows(), number * expected.unit());
                let row = &mut row[usize::from(asked)];
                let free: Vec<usize> = (0..places).filter(|&place| row[place] == -1).collect();
                row[rng.pick(&free)] = number as i32;
            }
            marked.iter_mut().zip(row).for_each(|(all, row)| all.extend(row));
        }
        let views = marked.each_ref().map(|all| View::bhld(all, [batch, expected.heads(), groups, places]).unwrap());
        let q_lens = vec![rows; batch];
        let shape =
            SelectionShape { q_lens: &q_lens, heads: expected.heads(), rows: expected.rows(), unit: expected.unit() };
        let mut selected = SelectedKeys::new();
        let [shown, asked] = views.map(Rectangle::new);
        selected.fill_padded(shape, &vec![case.keys(0); batch], shown, Some(asked)).unwrap();
        for (b, h, g) in every() {
            let row = g * expected.rows();
            assert!(selected.numbers(b, h, row).unwrap().eq(numbers(b, h, g)), "seed {seed}");
            let unit = expected.unit();
            assert!(numbers(b, h, g).all(|n| selected.asks(b, h, row, n * unit) == expected.asks(b, h, row, n * unit)));
        }
    }
}

#[test]
fn calls_that_lists_do_not_fit() {
    let tensors = Tensors::normal([1, 4, 2, 2, 6, 8, 8], 0);
    let refused = |selected: &SelectedKeys| {
        let mut answer = unwritten(&tensors.inputs());
        let untouched = answer.clone();
        let inputs = tensors.inputs().selected(selected);
        let error = sdpa::attention(&Attention::new(), inputs, crate::support::outputs(&mut answer)).unwrap_err();
        assert!(crate::support::same_bits(&answer.out.data, &untouched.out.data));
        error.to_string()
    };
    let shape = |q_lens, heads| SelectionShape { q_lens, heads, rows: 1, unit: 1 };
    let lists = |shape, n: usize, last| filled(shape, &(0..=n).collect::<Vec<_>>(), &vec![last; n]).unwrap();
    assert_eq!(refused(&lists(shape(&[2, 2], 1), 4, 0)), "selected keys: number of sequences is 2, but the call has 1");
    assert_eq!(refused(&lists(shape(&[3], 1), 3, 0)), "selected keys: rows of a sequence is 3, but q has 2");
    assert!(refused(&lists(shape(&[2], 3), 6, 0)).starts_with("selected keys: heads is 3, but q"));
    assert_eq!(
        refused(&lists(shape(&[2], 1), 2, 6)),
        "selected keys, one past the greatest number of each sequence: entry 0 is 7, but must be at most 6, the units of keys that \
         the sequence has"
    );
    let selected = lists(shape(&[2], 1), 2, 5);
    let inputs = tensors.inputs().selected(&selected);
    let needs = |error: Error| matches!(error, Error::Needs { argument: "selected keys", .. });
    let (q, lse) = (tensors.q.view(), [0.0; 8]);
    let saved = Saved::new(q, View::bhl(&lse, [1, 4, 2]).unwrap(), q);
    assert!(needs(Attention::new().backward(inputs, saved, Gradients::new()).unwrap_err()));
}

/// A sliding cache has evicted keys that a list names.
#[test]
fn keys_that_a_cache_has_evicted() {
    let shape = KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 };
    let mut cache = KvCache::sliding(1, shape, NonZeroUsize::new(100).unwrap(), 0).unwrap();
    let x = vec![0.5; 900 * 8];
    for _ in 0..2 {
        cache.append(View::bhld(&x, [1, 1, 900, 8]).unwrap(), View::bhld(&x, [1, 1, 900, 8]).unwrap()).unwrap();
    }
    let (q, mut out) = ([0.5; 8], [0.0; 8]);
    let one = SelectionShape { q_lens: &[1], heads: 1, rows: 1, unit: 1 };
    let mut call = |numbers: &[u32]| {
        let selected = filled(one, &[0, numbers.len()], numbers).unwrap();
        let inputs = Inputs::cached(View::bhld(&q, [1, 1, 1, 8]).unwrap(), &cache).selected(&selected);
        sdpa::attention(&Attention::new(), inputs, Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1, 8]).unwrap()))
    };
    assert_eq!(call(&[1790, 1799]), Ok(()));
    assert!(matches!(call(&[3, 1799]), Err(Error::Evicted { sequence: 0, row: 0, key: 3, .. })));
}
