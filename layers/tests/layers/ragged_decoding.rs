//! Steps of a server: prompts, parts of prompts and single rows of some sequences in one call.

use crate::counting::counted;
use crate::generation::{LEN, WIDTH, assert_same, lens, stacks, whole};
use crate::support::Rng;
use crate::vectors::{bits, normal, unwritten};
use core::sync::atomic::{AtomicUsize, Ordering};
use sdpa::{Error, Exec, LayerCaches};
use sdpa_layers::{Compute, NextRows, Transformer};

/// A sequence in the making: its place in the caches, its rows, and those of the answer that are there.
struct Text {
    place: usize,
    x: Vec<f32>,
    out: Vec<f32>,
    done: usize,
}

impl Text {
    fn new(place: usize, rows: usize) -> Self {
        Self { place, x: normal(rows * WIDTH, 7 + place as u64), out: unwritten(rows * WIDTH), done: 0 }
    }

    fn left(&self) -> usize {
        self.x.len() / WIDTH - self.done
    }
}

/// A step of these texts, in this order, with a number of rows of each.
fn step(
    stack: &Transformer,
    texts: &mut [Text],
    parts: &[(usize, usize)],
    caches: &mut LayerCaches,
    compute: &mut Compute,
) -> Result<(), Error> {
    let (mut x, mut sequences, mut ends) = (Vec::new(), Vec::new(), vec![0]);
    for &(text, rows) in parts {
        let text = &texts[text];
        x.extend_from_slice(&text.x[text.done * WIDTH..][..rows * WIDTH]);
        sequences.push(text.place);
        ends.push(x.len() / WIDTH);
    }
    let mut out = unwritten(x.len());
    let done = stack.decode_ragged(NextRows::new(&x, &sequences, &ends), caches, &mut out, compute);
    if done.is_err() {
        assert_eq!(bits(&out), bits(&unwritten(x.len())), "written by a call that failed");
        return done;
    }
    for (&(text, rows), ends) in parts.iter().zip(ends.windows(2)) {
        let text = &mut texts[text];
        text.out[text.done * WIDTH..][..rows * WIDTH].copy_from_slice(&out[ends[0] * WIDTH..ends[1] * WIDTH]);
        text.done += rows;
    }
    Ok(())
}

/// Some texts that are not done, in random order, with rows of each: one, none, or a part of a prompt.
fn parts(texts: &[Text], rng: &mut Rng) -> Vec<(usize, usize)> {
    let mut order: Vec<usize> = (0..texts.len()).filter(|&text| texts[text].left() > 0).collect();
    for i in 1..order.len() {
        order.swap(i, rng.below(i + 1));
    }
    order.truncate(1 + rng.below(order.len()));
    order.iter().map(|&text| (text, rng.pick(&[0, 1, 1, 3, 70, 300]).min(texts[text].left()))).collect()
}

#[test]
fn mixed_steps_have_the_bits_of_whole_sequences() {
    for (number, stack) in stacks().iter().enumerate() {
        for exec in [Exec::serial(), Exec::default()] {
            let (compute, mut rng) = (&mut Compute::new(exec), Rng::new(3 + number as u64));
            let mut texts = [(4, LEN), (0, 40), (2, 257), (3, 1)].map(|(place, rows)| Text::new(place, rows));
            let mut caches = stack.caches(5).unwrap();
            while texts.iter().any(|text| text.left() > 0) {
                let parts = parts(&texts, &mut rng);
                step(stack, &mut texts, &parts, &mut caches, compute).unwrap();
            }
            assert_eq!(lens(&caches), [40, 0, 257, 1, LEN]);
            for text in &texts {
                let expected = whole(stack, &text.x, 1, compute);
                assert_same(&format!("stack {number}, place {}", text.place), &text.out, &expected);
            }
        }
    }
}

#[test]
fn a_call_that_is_stopped_anywhere_leaves_no_row() {
    let [stack, ..] = stacks();
    for exec in [Exec::serial(), Exec::default()] {
        let (asked, limit) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
        let stop = || asked.fetch_add(1, Ordering::Relaxed) >= limit.load(Ordering::Relaxed);
        let compute = &mut Compute::new(exec).until(&stop);
        let mut texts = [(1, 300), (0, 40)].map(|(place, rows)| Text::new(place, rows));
        let mut caches = stack.caches(2).unwrap();
        step(&stack, &mut texts, &[(0, 290), (1, 3)], &mut caches, compute).unwrap();
        // Later and later, until the call comes to its end.
        let mut stopped = 0;
        while {
            asked.store(0, Ordering::Relaxed);
            limit.store(stopped, Ordering::Relaxed);
            let done = step(&stack, &mut texts, &[(1, 37), (0, 10)], &mut caches, compute);
            assert!(matches!(done, Ok(()) | Err(Error::Stopped)), "{done:?}");
            done.is_err()
        } {
            assert_eq!(lens(&caches), [3, 290]);
            stopped += 1;
        }
        assert!(stopped > 1, "two layers ask, but only {stopped} calls were stopped");
        limit.store(usize::MAX, Ordering::Relaxed);
        for text in &texts {
            assert_same("after stops", &text.out, &whole(&stack, &text.x, 1, compute));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let [stack, ..] = stacks();
    let compute = &mut Compute::default();
    let mut caches = stack.caches(3).unwrap();
    caches.remove_sequence(1).unwrap();
    let x = normal(5 * WIDTH, 1);
    let mut decode = |sequences: &[usize], ends: &[usize]| {
        let mut out = unwritten(x.len());
        let next = NextRows::new(&x, sequences, ends);
        let error = stack.decode_ragged(next, &mut caches, &mut out, compute).unwrap_err();
        assert_eq!((bits(&out), lens(&caches)), (bits(&unwritten(x.len())), &[0, 0, 0][..]));
        error
    };
    assert_eq!(decode(&[0, 3], &[0, 2, 5]), Error::Sequence { argument: "sequences", got: 3, sequences: 3 });
    assert_eq!(decode(&[0, 1], &[0, 2, 5]), Error::Removed { argument: "sequences", sequence: 1 });
    assert_eq!(decode(&[2, 2], &[0, 2, 5]), Error::Repeated { argument: "sequences", sequence: 2 });
    assert!(matches!(decode(&[0, 2], &[0, 5]), Error::Mismatch { argument: "ends", got: 1, expected: 2, .. }));
    for ends in [&[0, 2, 4][..], &[0, 3, 2, 5], &[1, 5], &[]] {
        let error = decode(&[0, 2][..ends.len().saturating_sub(1).min(2)], ends);
        assert!(error.to_string().starts_with("sequences: "), "{ends:?}: {error}");
    }
}

#[test]
fn a_warm_step_allocates_nothing() {
    let [stack, ..] = stacks();
    let compute = &mut Compute::new(Exec::serial());
    let mut caches = stack.caches(3).unwrap();
    let (x, mut out) = (normal(41 * WIDTH, 1), unwritten(41 * WIDTH));
    stack.decode_ragged(NextRows::new(&x, &[2, 0], &[0, 40, 41]), &mut caches, &mut out, compute).unwrap();
    let two = &x[..2 * WIDTH];
    let mut two_rows = || {
        let next = NextRows::new(two, &[0, 2], &[0, 1, 2]);
        stack.decode_ragged(next, &mut caches, &mut out[..2 * WIDTH], compute).unwrap();
    };
    two_rows();
    let (count, _) = counted(two_rows);
    assert_eq!(count, 0);
}
