//! Backward passes over rows and keys in pieces: the bits of one call.

use crate::fuzzer::array::{Array, Layout, indices};
use crate::fuzzer::compare::Written;
use crate::fuzzer::draw::{Home, SHARED};
use crate::fuzzer::kinds::attention::pool;
use crate::fuzzer::kinds::gradients::{All, Back, NAMES};
use crate::fuzzer::memory::{Flush, Memory};
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::pieces::{any_isa, draw, rows_of, stretches, whole_blocks};
use crate::fuzzer::place::{AnyPlaced, Placed, value};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::Stage;
use core::cell::Cell;
use core::ops::Range;
use sdpa::parts::{BackwardState, KeyGradientShape, KeyGradientSums};
use sdpa::{Dtype, Error, Exec, Gradients, Precision, Saved, TensorMut};

pub(super) fn check(rng: &mut Rng) {
    let case = draw(rng);
    let mut back = Back::draw(rng, case);
    // Nothing sums gradients in parameters, and pieces are exact.
    back.which[7] = false;
    back.case.settings.precision = Precision::Exact;
    let threads = if back.case.products() >= SHARED || rng.one_in(50) { 2 } else { 1 };
    let exec = Exec::serial().isa(any_isa(rng)).threads(threads);
    back.describing(|| {
        let rng = &mut rng.clone();
        pool().install(|| in_pieces(rng, &back, exec));
    });
}

/// Rows and keys in pieces, and where each piece's gradients go.
struct Pieces<'b> {
    back: &'b Back,
    exec: Exec<'b>,
    expected: All,
    /// Output and log-sum-exp of all rows.
    saved: [Array; 2],
    rows: Vec<Range<usize>>,
    keys: Vec<Range<usize>>,
    /// End of the last rows that pushed each stretch of keys.
    pushed: Vec<Cell<usize>>,
}

fn in_pieces(rng: &mut Rng, back: &Back, exec: Exec<'_>) {
    let case = &back.case;
    let stage = Stage::new(rng, case, Home::Tensors);
    let forward = stage.run("forward", &mut Outs::blank(rng, case, Wanted::LEAST).with_rests(rng, case), exec);
    let numbers = |x: Written| Array {
        shape: x.bits.shape,
        data: x.bits.data.iter().map(|&bits| f32::from_bits(bits)).collect(),
    };
    let mut lse = numbers(forward.lse.expect("it was asked for"));
    // States need the second column of rows that are far from 0.
    if rng.one_in(2) && lse.data.iter().step_by(2).all(|x| x.abs() < 256.0 || x.is_infinite()) {
        let [b, h, l, _] = lse.shape;
        lse = Array { shape: [b, h, l, 1], data: lse.data.into_iter().step_by(2).collect() };
    }
    let saved = [numbers(forward.out), lse];
    let expected = back.gradients(rng, "one call", exec);
    let (rows, keys) = (stretches(rng, case.q.shape[2]), whole_blocks(rng, case.k.shape[2]));
    let far = (0..case.batch()).any(|b| case.offset(b).unsigned_abs() > usize::MAX / 4);
    // A stretch of rows so far from the keys has no position.
    let rows = if far { core::iter::once(0..case.q.shape[2]).collect() } else { rows };
    let pushed = vec![Cell::new(0); keys.len()];
    Pieces { back, exec, expected, saved, rows, keys, pushed }.check(rng);
}

impl Pieces<'_> {
    fn check(&self, rng: &mut Rng) {
        let mut sums: Vec<KeyGradientSums> =
            self.keys.iter().map(|keys| KeyGradientSums::new(self.shape_of(keys)).expect("small")).collect();
        // What every stretch writes: dq, dbias, and the sums over its rows.
        let mut written: Vec<[Option<Written>; 7]> = Vec::new();
        for n in 0..self.rows.len() {
            written.push(self.stretch(rng, n, &mut sums));
            if rng.one_in(3) {
                sums = sums.iter().zip(&self.pushed).map(|(sums, rows)| sent(sums, rows.get())).collect();
            }
        }
        for (keys, sums) in self.keys.iter().zip(sums) {
            self.write_keys(rng, keys, sums);
        }
        for (n, name) in NAMES.iter().enumerate().take(7).skip(3) {
            let Some(expected) = &self.expected[n] else { continue };
            let parts: Vec<_> = written.iter().filter_map(|all| all[n].as_ref()).collect();
            self.same_sum(n, &format!("{name} of rows {:?}", self.rows), &parts, expected);
        }
    }

    fn shape_of(&self, keys: &Range<usize>) -> KeyGradientShape {
        let case = &self.back.case;
        let [batch, heads, _, head_dim] = case.q.shape;
        KeyGradientShape { batch, heads, keys: keys.len(), head_dim, value_dim: case.value_dim() }
    }

    /// Pushes all keys into a state of some rows, and holds what it writes for them against one call.
    fn stretch(&self, rng: &mut Rng, n: usize, sums: &mut [KeyGradientSums]) -> [Option<Written>; 7] {
        let (rows, back) = (self.rows[n].clone(), self.back);
        let some = back.case.stretch(rows.clone());
        let (stage, mods) = (Stage::new(rng, &some, Home::Tensors), back.case.piece_mods());
        let cut = |x: &Array| rows_of(x, rows.clone());
        let [out, lse] = self.saved.each_ref().map(|x| Placed::<f32>::of(rng, &cut(x)));
        let d_out = AnyPlaced::of(rng, &cut(&back.d_out.0), back.d_out.1);
        let d_lse = back.d_lse.as_ref().map(|x| Placed::<f32>::of(rng, &cut(x)));
        let mut saved = Saved::new(out.view(), lse.view(), d_out.view());
        saved = d_lse.as_ref().map_or(saved, |x| saved.d_lse(x.view()));
        let mut state = BackwardState::new(some.attention(), stage.inputs(), saved, self.exec).expect("a good state");
        if let Some(mods) = &mods {
            state = state.mods(mods).expect("good functions");
        }
        state = state.starting_at(rows.start).expect("it has no keys");
        let mut dbias = Vec::new();
        for (m, sums) in sums.iter_mut().enumerate() {
            let part = self.push(rng, &mut state, [n, m], sums);
            dbias.extend(part.map(|part| (self.keys[m].clone(), part)));
        }
        let mut all = self.write_rows(rng, state, &rows);
        all[3] = self.joined(&rows, &dbias);
        all
    }

    /// Pushes the next keys, or passes over them if `skip` allows it. Returns the gradient in their part of the bias, if it is asked
    /// for.
    fn push(
        &self,
        rng: &mut Rng,
        state: &mut BackwardState<'_>,
        [n, m]: [usize; 2],
        sums: &mut KeyGradientSums,
    ) -> Option<Array<u32>> {
        let (case, keys) = (&self.back.case, self.keys[m].clone());
        let some = case.stretch(self.rows[n].clone());
        let seen = |rows: &[Range<usize>]| rows.iter().any(|rows| case.stretch(rows.clone()).may_be_seen(keys.clone()));
        if self.expected[3].is_none() && rng.one_in(4) {
            assert_eq!(state.sees(keys.clone()), some.may_be_seen(keys.clone()), "keys {keys:?}");
            let beside = seen(&self.rows[..n]) && seen(&self.rows[n + 1..]);
            if !state.sees(keys.clone()) && !beside {
                state.skip(keys.len()).expect("nobody sees them");
                return None;
            }
        }
        self.pushed[m].set(self.rows[n].end);
        let [k, v] = case.pushed(rng, keys.clone());
        let shape = some.some_keys(keys.clone()).bias.map(|(x, _)| x.of.shape);
        let asked = self.expected[3].is_some() && shape.is_some();
        match shape.filter(|_| asked) {
            Some(shape) if !self.has_one_column() => {
                let mut dbias = blank(rng, shape, Dtype::F32);
                let AnyPlaced::F32(memory) = &mut dbias else { unreachable!("it is f32") };
                state.push_biased(k.view(), v.view(), sums, memory.view_mut()).expect("they fit");
                Some(taken("dbias", &mut dbias))
            }
            Some(shape) => {
                // The gradient of one column is a sum over all keys.
                let mut dbias = blank(rng, shape, Dtype::F32);
                let AnyPlaced::F32(memory) = &mut dbias else { unreachable!("it is f32") };
                let refused = state.push_biased(k.view(), v.view(), sums, memory.view_mut());
                assert!(matches!(refused, Err(Error::Needs { .. })), "{refused:?}");
                assert!(dbias.is_blank(), "a refused push wrote");
                state.push(k.view(), v.view(), sums).expect("they fit");
                None
            }
            None => {
                state.push(k.view(), v.view(), sums).expect("they fit");
                None
            }
        }
    }

    /// True if the bias has one column.
    fn has_one_column(&self) -> bool {
        self.back.case.bias.as_ref().is_some_and(|(x, _)| x.of.shape[3] == 1)
    }

    /// Writes the gradients of the rows. Returns those that are sums over them.
    fn write_rows(&self, rng: &mut Rng, state: BackwardState<'_>, rows: &Range<usize>) -> [Option<Written>; 7] {
        let ([b, h, _, d], dtype) = (self.back.case.q.shape, self.back.dtypes[0]);
        let mut dq = self.expected[0].as_ref().map(|_| blank(rng, [b, h, rows.len(), d], dtype));
        let mut lists: [Option<Memory<f32>>; 3] = core::array::from_fn(|n| {
            let expected = self.expected[n + 4].as_ref()?;
            Some(Memory::new(expected.bits.data.len(), if rng.one_in(2) { Flush::Low } else { Flush::High }))
        });
        let mut gradients = Gradients::new();
        if let Some(dq) = &mut dq {
            gradients = gradients.q(dq.view_mut());
        }
        let [sinks, slopes, scale] = &mut lists;
        gradients = if let Some(x) = sinks { gradients.sinks(x.slice_mut()) } else { gradients };
        gradients = if let Some(x) = slopes { gradients.alibi(x.slice_mut()) } else { gradients };
        gradients = if let Some(x) = scale { gradients.scale(&mut x.slice_mut()[0]) } else { gradients };
        state.check(&gradients).expect("good gradients");
        state.write(gradients).expect("good gradients");
        if let (Some(dq), Some(expected)) = (&mut dq, &self.expected[0]) {
            let got = taken("dq", dq);
            same_part(&format!("dq of rows {rows:?}"), &got, &rows_of(&expected.bits, rows.clone()));
        }
        let mut all = [const { None }; 7];
        for (n, list) in lists.into_iter().enumerate() {
            all[n + 4] = list.map(|list| {
                let data: Vec<u32> = list.slice().iter().map(|x| x.to_bits()).collect();
                Written { bits: Array { shape: [1, 1, 1, data.len()], data }, dtype: Dtype::F32 }
            });
        }
        all
    }

    /// The gradient in the bias of some rows, joined of those of all keys.
    fn joined(&self, rows: &Range<usize>, parts: &[(Range<usize>, Array<u32>)]) -> Option<Written> {
        let expected = self.expected[3].as_ref().filter(|_| !self.has_one_column())?;
        let [b, h, l, columns] = expected.bits.shape;
        let l = if l == 1 { 1 } else { rows.len() };
        // A bias has columns for keys that it hides, too; no push has those behind the last key.
        let mut bits = Array::from_fn([b, h, l, columns], |_| 0u32);
        for (keys, part) in parts {
            for at @ [b, h, l, j] in indices(part.shape) {
                bits.set([b, h, l, keys.start + j], part.get(at));
            }
        }
        Some(Written { bits, dtype: Dtype::F32 })
    }

    /// Writes the gradients of some keys, of all heads or of some keys of them, and holds them against one call.
    fn write_keys(&self, rng: &mut Rng, keys: &Range<usize>, sums: KeyGradientSums) {
        let case = &self.back.case;
        let mut parts = vec![(keys.clone(), sums)];
        if rng.one_in(4) {
            let (all, sums) = parts.pop().expect("it is there");
            for some in rng.cuts(all.len()) {
                let of_some = sums.keys(some.clone()).expect("they are there");
                parts.push((all.start + some.start..all.start + some.end, of_some));
            }
        }
        for (keys, sums) in parts {
            let ([b, g, _, d], dv) = (case.k.shape, case.value_dim());
            let mut slots = [(1, d), (2, dv)].map(|(n, dim)| {
                let asked = self.expected[n].is_some();
                asked.then(|| blank(rng, [b, g, keys.len(), dim], self.back.dtypes[n]))
            });
            let [dk, dv] = slots.each_mut().map(|x| x.as_mut().map(AnyPlaced::view_mut));
            sums.write(&case.attention(), key_gradients(dk, dv), self.exec).expect("good gradients");
            for (n, slot) in slots.iter_mut().enumerate() {
                let (Some(slot), Some(expected)) = (slot, &self.expected[n + 1]) else { continue };
                let what = format!("{} of keys {keys:?}", NAMES[n + 1]);
                same_part(&what, &taken(&what, slot), &rows_of(&expected.bits, keys.clone()));
            }
        }
    }

    /// Panics unless the parts are the whole: bit by bit if they share no row or there is one part, otherwise as a sum, up to
    /// rounding.
    fn same_sum(&self, n: usize, what: &str, parts: &[&Written], expected: &Written) {
        let [.., rows, _] = expected.bits.shape;
        if parts.is_empty() {
            return;
        }
        if n == 3 && rows != 1 {
            for (rows, part) in self.rows.iter().zip(parts) {
                same_part(what, &part.bits, &rows_of(&expected.bits, rows.clone()));
            }
        } else if parts.len() == 1 {
            same_part(what, &parts[0].bits, &expected.bits);
        } else if self.back.is_tame() {
            let noise = self.back.noise()[n];
            for (i, &bits) in expected.bits.data.iter().enumerate() {
                let each = parts.iter().map(|part| f64::from(value(part.bits.data[i], Dtype::F32)));
                let (sum, size) = each.fold((0.0, 0.0f64), |(sum, size), x| (sum + x, size + x.abs()));
                let expected = f64::from(value(bits, Dtype::F32));
                let bound = 1e-4 * (size + expected.abs()) + 4.0 * noise + 1e-6;
                assert!((sum - expected).abs() <= bound, "{what}: element {i} adds up to {sum:e}, not {expected:e}");
            }
        }
    }
}

fn key_gradients<'g>(dk: Option<TensorMut<'g>>, dv: Option<TensorMut<'g>>) -> Gradients<'g> {
    let gradients = match dk {
        Some(dk) => Gradients::new().k(dk),
        None => Gradients::new(),
    };
    match dv {
        Some(dv) => gradients.v(dv),
        None => gradients,
    }
}

/// The sums as another machine has them that was sent what need be sent.
fn sent(sums: &KeyGradientSums, rows: usize) -> KeyGradientSums {
    let (mut received, all) = (KeyGradientSums::new(sums.shape()).expect("small"), sums.as_slice());
    let (blocks, rest) = all.split_at(all.len() / 2);
    let n = if rows.is_multiple_of(96) { blocks.len() } else { all.len() };
    assert!(n == all.len() || rest.iter().all(|x| x.to_bits() == 0), "rows {rows}: an incomplete block of none");
    received.as_mut_slice()[..n].copy_from_slice(&all[..n]);
    received
}

fn blank(rng: &mut Rng, shape: [usize; 4], dtype: Dtype) -> AnyPlaced {
    let layout = Layout::draw(rng, shape);
    AnyPlaced::blank(rng, layout, dtype)
}

/// What was written, all of it.
fn taken(what: &str, x: &mut AnyPlaced) -> Array<u32> {
    let unwritten = if matches!(x, AnyPlaced::F32(_)) { u32::MAX } else { u32::from(u16::MAX) };
    let bits = x.take(what);
    assert!(!bits.data.contains(&unwritten), "{what}: not all was written");
    bits
}

fn same_part(what: &str, got: &Array<u32>, expected: &Array<u32>) {
    assert_eq!(got.shape, expected.shape, "{what}");
    for (at, (got, expected)) in indices(got.shape).zip(got.data.iter().zip(&expected.data)) {
        assert!(got == expected, "{what}: {at:?} is {got:#x}, expected {expected:#x}");
    }
}
