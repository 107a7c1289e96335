//! Masks at extreme numbers: an error or the right answer, and never a panic.

use crate::functions::run_as;
use crate::support::{Tensors, execs, run_inputs};
use core::num::NonZeroUsize;
use sdpa::masks::{Documents, MaskError, PerSequence, PrefixLm, Tree};
use sdpa::{
    Alignment, Attention, BlockPosition, Error, Exec, MaskMod, Mods, Outputs, Position, Run, ViewMut, Window, naive,
};

/// Numbers near 0, near the largest position, and near the largest number.
const NUMBERS: [usize; 9] = [0, 1, 5, MAX - 1, MAX, MAX + 1, usize::MAX - 2, usize::MAX - 1, usize::MAX];
const MAX: usize = isize::MAX as usize;
const POSITIONS: [isize; 9] = [isize::MIN, isize::MIN + 1, -1, 0, 1, 5, isize::MAX - 2, isize::MAX - 1, isize::MAX];

/// Asserts what a mask says of pairs at extreme positions and keys, and that its classes agree.
#[track_caller]
fn check(what: &str, mask: &dyn MaskMod, sees: impl Fn(i128, i128) -> bool) {
    for (position, key) in POSITIONS.into_iter().flat_map(|p| NUMBERS.map(|key| (p, key))) {
        let at = Position { batch: 0, head: 0, row: 0, key, position, distance: position.saturating_sub_unsigned(key) };
        assert_eq!(mask.keep(at), sees(position as i128, key as i128), "{what}: {at:?}");
        for rows in 1..4 {
            let keys = key.saturating_sub(2)..key.saturating_add(1);
            let block = BlockPosition { batch: 0, head: 0, rows: 0..rows, keys, position };
            if !block.keys.is_empty() {
                let expected = block.pairs().map(|at| mask.keep(at)).collect();
                assert_eq!(mask.class(block.clone()), expected, "{what}: {block:?}");
            }
        }
    }
}

#[test]
fn stock_masks_are_right_at_extreme_numbers() {
    for n in NUMBERS {
        let end = n as i128;
        check(&format!("prefix {n}"), &PrefixLm::new(n), |p, key| key < end || key <= p);
        let tree = Tree::new(n, &[None, Some(0), Some(0)]).expect("parents in front");
        let drafted = |p: i128, key: i128| match (p - end, key - end) {
            (_, ..0) => key <= p,
            (row @ 0..3, key) => key == 0 || key == row,
            _ => false,
        };
        check(&format!("tree behind {n}"), &tree, drafted);
        for more in NUMBERS {
            let ends = [n, n.saturating_add(more)];
            let document = |key: i128| ends.iter().position(|&end| key < end as i128);
            let documents = Documents::by_ends(&ends).expect("in order");
            check(&format!("{ends:?}"), &documents, |p, key| p >= 0 && document(p) == document(key));
        }
    }
}

/// Memory goes with the number of documents, not with their lengths.
#[test]
fn huge_documents_take_no_memory() {
    let documents = Documents::by_ends(&[3, 1_000_000_000, usize::MAX]).expect("in order");
    let sees = |position, key| {
        documents.keep(Position {
            batch: 0,
            head: 0,
            row: 0,
            key,
            position,
            distance: position.saturating_sub_unsigned(key),
        })
    };
    assert!(sees(5, 999_999_999) && !sees(5, 2) && !sees(5, 1_000_000_000) && sees(isize::MAX, 1_000_000_000));
}

/// Calls at extreme offsets, windows and masks have the answers of the oracle.
#[test]
fn calls_at_extreme_numbers_are_right() {
    let tensors = Tensors::normal([1, 2, 1, 3, 20, 8, 8], 1);
    let far = [isize::MIN, isize::MIN + 1, -2, 0, 3, isize::MAX - 1, isize::MAX];
    let sides = [None, Some(0), Some(2), Some(usize::MAX)];
    let close = |what: &str, got: &[f32], attention: &Attention, mods: &Mods<(), &dyn MaskMod>| {
        let oracle: naive::Answer<f64> = naive::answer(attention, &tensors.inputs(), mods).expect("a good call");
        let off = got.iter().zip(&oracle.out).map(|(&x, y)| (f64::from(x) - y).abs()).fold(0.0, f64::max);
        assert!(off < 1e-5, "{what}: {off}");
    };
    for offset in far {
        let plain = Attention::new().align(Alignment::Offset(offset));
        let masks: [Box<dyn MaskMod>; 4] = [
            Box::new(Documents::by_ends(&[2, MAX, usize::MAX]).expect("in order")),
            Box::new(PrefixLm::new(usize::MAX)),
            Box::new(Tree::new(usize::MAX, &[None]).expect("parents in front")),
            Box::new(PrefixLm::new(2).and(Documents::by_ends(&[9]).expect("in order").not())),
        ];
        for (n, mask) in masks.iter().enumerate() {
            let mods = Mods::new().mask(&**mask);
            for (isa, exec) in execs() {
                let got = run_as(&plain, tensors.inputs(), exec, &mods);
                close(&format!("{n}, {offset}, {isa}"), &got.out.data, &plain, &mods);
            }
        }
        let none = Mods::new().mask(&() as &dyn MaskMod);
        let windows = sides.into_iter().flat_map(|left| sides.map(|right| Window::inclusive(left, right)));
        for window in windows.chain([Window::last_tokens(NonZeroUsize::MAX)]) {
            for (keep, causal) in [0, 1, usize::MAX].into_iter().flat_map(|keep| [(keep, false), (keep, true)]) {
                let windowed = plain.window(window.keep_first(keep));
                let attention = if causal { windowed.causal() } else { windowed };
                let got = run_inputs(&attention, tensors.inputs(), Exec::default());
                close(&format!("{window:?}, {keep}, {offset}"), &got.out.data, &attention, &none);
            }
        }
    }
}

/// Windows at positions near the largest show the keys that they say, or the call is refused.
#[test]
fn windows_at_the_largest_positions_are_right_or_refused() {
    const KEYS: usize = 20;
    let tensors = Tensors::normal([1, 1, 1, 3, KEYS, 8, 8], 1);
    let lefts = [0, 7, MAX - KEYS - 1, MAX - KEYS, MAX - KEYS + 1, MAX - 1, MAX, MAX + 1, MAX + 2, usize::MAX];
    let mut refused = 0;
    for (offset, left) in [MAX - 3, MAX - 2, MAX - 1, MAX].into_iter().flat_map(|o| lefts.map(|left| (o, left))) {
        let window = Window::inclusive(Some(left), None);
        let attention = Attention::new().scale(0.0).align(Alignment::Offset(offset as isize)).window(window);
        let (mut out, mut lse) = (vec![42.0; 3 * 8], vec![42.0; 3]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 8]).expect("dense"));
        let outputs = outputs.lse(ViewMut::bhld(&mut lse, [1, 1, 3, 1]).expect("dense"));
        match sdpa::attention(&attention, tensors.inputs(), outputs) {
            // With a scale of 0 the LSE is the logarithm of the number of visible keys.
            Ok(()) => (0..3).zip(lse).for_each(|(row, lse)| {
                let first = offset as i128 + row - left as i128;
                let seen = (KEYS as i128 - first).clamp(0, KEYS as i128);
                assert_eq!(lse.exp().round() as i128, seen, "{offset} − {left}, row {row}");
            }),
            Err(error) => {
                refused += 1;
                let words = format!(
                    "window: left is {left}, but must be at most {}, the largest position less the number of keys, as rows \
                     go beyond the largest position",
                    MAX - KEYS
                );
                assert_eq!(error.to_string(), words);
                assert!(out.iter().chain(&lse).all(|&x| x == 42.0));
                assert!(offset + 2 > MAX && left > MAX - KEYS, "{offset} − {left} is no matter of positions");
            }
        }
    }
    assert!(refused > 0);
}

#[test]
fn as_many_masks_as_sequences_or_nothing_is_written() {
    let tensors = Tensors::normal([2, 2, 1, 3, 3, 8, 8], 1);
    for masks in [0, 1, 3] {
        let mask = PerSequence::new(vec![PrefixLm::new(1); masks]);
        let mut out = vec![42.0; 2 * 2 * 3 * 8];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 2, 3, 8]).expect("dense"));
        let mods = Mods::new().mask(mask.clone());
        let refused = Error::Mask(MaskError::Sequences { masks, sequences: 2 });
        let words = format!("mask function: PerSequence has {masks} masks, but the call has 2 sequences");
        assert_eq!(refused.to_string(), words);
        let plain = Attention::new();
        assert_eq!(
            sdpa::attention_with(&plain, tensors.inputs(), outputs, Run::new().mods(&mods)),
            Err(refused.clone())
        );
        assert!(out.iter().all(|&x| x == 42.0), "{masks}");
        let nested = Mods::new().mask(PerSequence::new(vec![mask; 2]));
        let answer = naive::answer::<f64, _, _, _>(&plain, &tensors.inputs(), &nested);
        assert_eq!(answer.unwrap_err(), refused);
    }
}
