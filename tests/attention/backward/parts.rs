//! Rows and keys of a call in parts, as ranks of several machines have them: the gradients have the bits of one call.

use super::support::Back;
use crate::options::Case;
use crate::options::elements::{DTYPES, Rounded};
use crate::options::mods::{Functions, with_mods};
use crate::positions::of_state;
use crate::support::{Rng, Tensor, UNWRITTEN, assert_same_bits, execs};
use core::ops::Range;
use sdpa::parts::{BackwardState, KeyGradientShape, KeyGradientSums};
use sdpa::{
    Alignment, Attention, Dropout, Error, Exec, Gradients, Inputs, Mods, Position, Run, Saved, View, ViewMut,
    WithDerivative,
};

const KEY_BLOCK: usize = 256;

/// A random case that states can say.
fn stateful(rng: &mut Rng) -> Case {
    loop {
        let (heads, kv_heads) = rng.pick(&[(1, 1), (2, 1), (2, 2), (4, 2), (6, 2)]);
        let dims = [rng.pick(&[8, 20, 64]), rng.pick(&[16, 33, 64])];
        let sizes = [1 + rng.below(2), heads, kv_heads, rng.below(400), rng.below(900), dims[0], dims[1]];
        let case = Case::of_sizes(rng, sizes);
        let bottom_right = case.alignment == Some(Alignment::BottomRight);
        if case.ragged.is_some() || bottom_right && case.kv_lens.is_some() {
            continue;
        }
        let at_end = Alignment::Offset(case.k.shape[2] as isize - case.q.shape[2] as isize);
        let alignment = if bottom_right { Some(at_end) } else { case.alignment };
        let case = Case { alignment, functions: Functions { prob: None, ..case.functions }, ..case };
        return if rng.below(4) == 0 { of_state(rng, &case) } else { case };
    }
}

/// Cuts `0..n` at random multiples of `block`.
fn cuts(n: usize, block: usize, rng: &mut Rng) -> Vec<Range<usize>> {
    let (mut at, mut parts) = (0, Vec::new());
    while at < n {
        let end = n.min(at + block * (1 + rng.below(3)));
        parts.push(at..end);
        at = end;
    }
    parts
}

fn blank(shape: [usize; 4]) -> Tensor {
    Tensor::filled(shape, f32::from_bits(UNWRITTEN))
}

fn view(x: &mut Tensor) -> ViewMut<'_> {
    ViewMut::bhld(&mut x.data, x.shape).unwrap()
}

/// Gradients that are sums over the rows of a state: of sinks, slopes and scale.
type OfRows = [Tensor; 3];

/// Computes the gradients of a stretch of rows, and adds to the sums of each part of the keys.
fn stretch(
    back: &Back,
    [out, lse]: [&Tensor; 2],
    rows: Range<usize>,
    parts: &mut [(Range<usize>, KeyGradientSums)],
    (exec, qkv): (Exec, &[Rounded; 3]),
) -> (Tensor, Option<Tensor>, OfRows) {
    // Functions are those of the whole call: the state tells them which rows these are.
    let case = Case { place: back.case.place, ..back.case.stretch(rows.clone()) };
    let [q, k, v] = qkv.each_ref().map(Rounded::view);
    let (first, some) = (rows.start, |x: &Tensor| x.rows(rows.clone()));
    let (out, lse, d_out) = (some(out), some(lse), some(&back.d_out));
    let d_lse = back.d_lse.as_ref().map(some);
    let saved = Saved::new(out.view(), lse.view(), d_out.view());
    let saved = d_lse.as_ref().map_or(saved, |d_lse| saved.d_lse(d_lse.view()));
    let inputs = case.inputs_over(Inputs::new(q.rows_in(rows).unwrap(), k, v));
    let inputs = case.kv_lens.as_ref().map_or(inputs, |lens| inputs.kv_lens(lens));
    let list = |list: &Option<Vec<f32>>| blank([1, 1, 1, list.as_ref().map_or(0, Vec::len)]);
    // A bias of one column is of all keys.
    let bias = case.bias.as_ref().map(|bias| bias.wide.shape).filter(|shape| shape[3] != 1);
    let mut dbias = bias.map(|shape| Tensor::filled(shape, 0.0));
    let (mut dq, mut of_rows) = (blank(case.q.shape), [list(&case.sinks), list(&case.alibi), blank([1; 4])]);
    let [sinks, slopes, scale] = &mut of_rows;
    let gradients = Gradients::new().q(view(&mut dq)).scale(&mut scale.data[0]);
    let gradients = if case.sinks.is_some() { gradients.sinks(&mut sinks.data) } else { gradients };
    let gradients = if case.alibi.is_some() { gradients.alibi(&mut slopes.data) } else { gradients };
    with_mods!(case, |mods| {
        let attention = Back { case: case.clone(), ..back.clone() }.attention();
        let state = BackwardState::new(attention, inputs, saved, exec).unwrap();
        let mut state = state.starting_at(first).unwrap().mods(&mods).unwrap();
        for (keys, sums) in parts {
            // Sums that hold something go through all later rows.
            if state.sees(keys.clone()) || sums.as_slice().iter().any(|&sum| sum != 0.0) {
                let [k, v] = [k, v].map(|x| x.rows_in(keys.clone()).unwrap());
                match &mut dbias {
                    Some(dbias) => state.push_biased(k, v, sums, columns_mut(dbias, keys)).unwrap(),
                    None => state.push(k, v, sums).unwrap(),
                }
            } else {
                state.skip(keys.len()).unwrap();
            }
        }
        state.check(&gradients).unwrap();
        state.write(gradients).unwrap();
    });
    (dq, dbias, of_rows)
}

/// The columns of some keys, as far as there are.
fn columns_mut<'a>(x: &'a mut Tensor, keys: &Range<usize>) -> ViewMut<'a> {
    let [batch, heads, rows, columns] = x.shape;
    let (first, end) = (keys.start.min(columns), keys.end.min(columns));
    let offset = if first == end { 0 } else { first };
    let strides = [heads * rows * columns, rows * columns, columns, 1].map(|stride| stride as isize);
    ViewMut::from_strides(&mut x.data, offset, [batch, heads, rows, end - first], strides).unwrap()
}

#[test]
fn rows_cut_anywhere_and_keys_between_blocks_have_the_bits_of_one_call() {
    let (mut cut, mut grouped, mut biased) = (0, 0, 0);
    for seed in 0..60 {
        let mut rng = Rng::new(91_000 + seed);
        let mut case = stateful(&mut rng);
        let qkv = [&case.q, &case.k, &case.v].map(|x| Rounded::new(x, rng.pick(&DTYPES)));
        [case.q, case.k, case.v] = qkv.each_ref().map(|x| x.wide.clone());
        let mut back = Back::of(&mut rng, case);
        back.dropout = (seed % 4 == 1).then_some(Dropout { p: 0.3, seed, offset: 2 });
        let ([batch, heads, n, dim], [_, kv_heads, keys, value_dim]) = (back.case.q.shape, back.case.v.shape);
        let rows = cuts(n, rng.pick(&[96, 33, 64, 1 + n / 3, n.max(1)]), &mut rng);
        let keys = cuts(keys, KEY_BLOCK, &mut rng);
        (cut, grouped) = (cut + usize::from(rows.len() > 1), grouped + usize::from(heads > kv_heads));
        for (isa, exec) in execs() {
            let what = format!("seed {seed}, {isa}, rows {rows:?}, keys {keys:?}");
            let [out, lse] = back.forward_columns(exec, 2);
            let whole = back.run(exec);
            let shape = |keys| KeyGradientShape { batch, heads, keys, head_dim: dim, value_dim };
            let sums = |keys: &Range<usize>| KeyGradientSums::new(shape(keys.len())).unwrap();
            let mut parts: Vec<_> = keys.iter().map(|keys| (keys.clone(), sums(keys))).collect();
            for rows in &rows {
                let (dq, dbias, of_rows) = stretch(&back, [&out, &lse], rows.clone(), &mut parts, (exec, &qkv));
                assert_same_bits(&format!("{what}: q of {rows:?}"), &dq, &whole.q.rows(rows.clone()));
                if let Some(dbias) = dbias.filter(|dbias| rows.len() == n || dbias.shape[2] != 1 && rows.len() > 1) {
                    biased += 1;
                    let expected = if rows.len() == n { whole.bias.clone() } else { whole.bias.rows(rows.clone()) };
                    assert_same_bits(&format!("{what}: bias of {rows:?}"), &dbias, &expected);
                }
                if rows.len() == n {
                    for (got, expected) in of_rows.iter().zip([&whole.sinks, &whole.slopes, &whole.scale]) {
                        assert_same_bits(&format!("{what}: of rows"), got, expected);
                    }
                }
            }
            for (keys, sums) in parts {
                let [mut dk, mut dv] = [dim, value_dim].map(|dim| blank([batch, kv_heads, keys.len(), dim]));
                let gradients = Gradients::new().k(view(&mut dk)).v(view(&mut dv));
                sums.write(&back.case.attention(), gradients, exec).unwrap();
                assert_same_bits(&format!("{what}: k of {keys:?}"), &dk, &whole.k.rows(keys.clone()));
                assert_same_bits(&format!("{what}: v of {keys:?}"), &dv, &whole.v.rows(keys));
            }
        }
    }
    assert!(cut > 15 && grouped > 15, "{cut} cases with cut rows, {grouped} with grouped heads");
    assert!(biased > 15, "{biased} gradients of biases");
}

#[test]
fn what_does_not_fit_a_state_is_refused() {
    let x = vec![0.5f32; 2 * 300 * 8];
    let of = |heads: usize, rows| View::bhld(&x[..heads * rows * 8], [1, heads, rows, 8]).unwrap();
    let lse = View::bhld(&x[..2 * 96], [1, 2, 96, 1]).unwrap();
    let saved = Saved::new(of(2, 96), lse, of(2, 96));
    let inputs = Inputs::new(of(2, 96), of(1, 300), of(1, 300));
    let state = |attention| BackwardState::new(attention, inputs, saved, Exec::serial());
    let shape = |heads, keys| KeyGradientShape { batch: 1, heads, keys, head_dim: 8, value_dim: 8 };
    let sums = |heads, keys| KeyGradientSums::new(shape(heads, keys)).unwrap();
    for (attention, word) in
        [(Attention::new().causal(), "causal"), (Attention::new().align(Alignment::BottomRight), "bottom-right")]
    {
        assert!(matches!(state(attention), Err(Error::Needs { argument, .. }) if argument == word), "{word}");
    }
    let mut good = state(Attention::new()).unwrap();
    for (heads, keys, error) in [(1, 300, "heads is 1"), (2, 299, "keys is 299")] {
        let error = (error, good.push(of(1, 300), of(1, 300), &mut sums(heads, keys)).unwrap_err().to_string());
        assert!(error.1.contains(error.0), "{error:?}");
    }
    assert!(matches!(good.skip(256), Err(Error::Needs { argument: "skip", .. })));
    good.push(of(1, 300), of(1, 300), &mut sums(2, 300)).unwrap();
    let more = good.push(of(1, 20), of(1, 20), &mut sums(2, 20));
    assert_eq!(more, Err(Error::Multiple { argument: "keys before", got: 300, of: KEY_BLOCK }));
    let words = "keys before: 300, but must be a multiple of 256: push small pieces together, in their order, with sums for \
                 all their keys; KeyGradientSums::keys cuts these";
    assert_eq!(more.unwrap_err().to_string(), words);
    let (mut dk, mut short) = (vec![7.0f32; 300 * 8], vec![7.0f32; 95 * 2 * 8]);
    let gradients = Gradients::new().k(ViewMut::bhld(&mut dk, [1, 1, 300, 8]).unwrap());
    assert!(matches!(good.check(&gradients), Err(Error::Needs { argument: "dk and dv", .. })));
    let mut parameters = [7.0];
    let gradients = Gradients::new().parameters(&mut parameters);
    assert!(matches!(good.check(&gradients), Err(Error::Needs { argument: "dparameters", .. })));
    let error = sums(2, 300).write(&Attention::new(), gradients, Exec::serial());
    assert!(matches!(error, Err(Error::Needs { argument: "gradients", .. })));
    let other = state(Attention::new()).unwrap().write(Gradients::new().parameters(&mut parameters));
    assert!(matches!(other, Err(Error::Needs { argument: "dparameters", .. })));
    let gradients = Gradients::new().q(ViewMut::bhld(&mut short, [1, 2, 95, 8]).unwrap());
    assert!(matches!(good.write(gradients), Err(Error::Mismatch { argument: "dq", got: 95, expected: 96, .. })));
    let no_derivative = Mods::new().score(|score: f32, _: Position| score);
    assert!(matches!(
        state(Attention::new()).unwrap().mods(&no_derivative),
        Err(Error::Needs { argument: "score function", .. })
    ));
    let gradients = Gradients::new().k(ViewMut::bhld(&mut dk, [1, 3, 100, 8]).unwrap());
    let error = sums(4, 100).write(&Attention::new(), gradients, Exec::serial());
    assert_eq!(error, Err(Error::Heads { q_heads: 4, kv_heads: 3, of: "dk" }));
    let gradients = Gradients::new().v(ViewMut::bhld(&mut dk, [1, 1, 300, 8]).unwrap());
    let error = sums(2, 299).write(&Attention::new(), gradients, Exec::serial());
    assert!(matches!(error, Err(Error::Mismatch { argument: "dv", got: 300, expected: 299, .. })));
    assert!(dk.iter().chain(&short).chain(&parameters).all(|&x| x == 7.0), "gradients were written");
}

/// Functions of row, key, distance, batch and head see the positions of one call, whatever names the place of the rows among the
/// keys, if anything does.
#[test]
fn functions_of_rows_in_parts_see_positions_among_all() {
    let mut rng = Rng::new(93_000);
    let (shape, rows) = ([2, 2, 9, 8], 300);
    let [q, k, v] = [9, rows, rows].map(|rows| Tensor::normal([shape[0], shape[1], rows, 8], &mut rng));
    let seen = std::sync::Mutex::new(Vec::new());
    let record = |score: f32, at: Position| {
        seen.lock().unwrap().push((at.batch, at.head, at.row, at.key, at.position, at.distance));
        score
    };
    let sorted = || {
        let mut all = core::mem::take(&mut *seen.lock().unwrap());
        all.sort_unstable();
        all
    };
    let mods = Mods::new().score(WithDerivative::new(record, |_: f32, _: Position| 1.0));
    let (out, lse) = (Tensor::filled(shape, 0.5), Tensor::filled([2, 2, 9, 1], 1.0));
    for (alignment, offset) in [(None, 0), (Some(Alignment::TopLeft), 0), (Some(Alignment::Offset(-4)), -4)] {
        let with = |alignment: Option<Alignment>| alignment.map_or(Attention::new(), |at| Attention::new().align(at));
        let saved = |rows: Range<usize>| [&out, &lse, &out].map(|x| x.view().rows(rows.clone()).unwrap());
        let [o, l, d] = saved(0..9);
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let problem = with(alignment).backward(inputs, Saved::new(o, l, d), Gradients::new()).unwrap();
        problem.run_once_with(Exec::serial(), Run::new().mods(&mods)).unwrap();
        let expected = sorted();
        for rows in [0..2, 2..9] {
            // An offset is that of the first of these rows.
            let attention = match alignment {
                Some(Alignment::Offset(_)) => with(Some(Alignment::Offset(offset + rows.start as isize))),
                _ => with(alignment),
            };
            let [o, l, d] = saved(rows.clone());
            let inputs = Inputs::new(q.view().rows(rows.clone()).unwrap(), k.view(), v.view());
            let state = BackwardState::new(attention, inputs, Saved::new(o, l, d), Exec::serial()).unwrap();
            let mut state = state.mods(&mods).unwrap().starting_at(rows.start).unwrap();
            for keys in [0..256, 256..300] {
                let [k, v] = [&k, &v].map(|x| x.view().rows(keys.clone()).unwrap());
                let (batch, heads, dim) = (2, 2, 8);
                let shape = KeyGradientShape { batch, heads, keys: keys.len(), head_dim: dim, value_dim: dim };
                state.push(k, v, &mut KeyGradientSums::new(shape).unwrap()).unwrap();
            }
        }
        assert!(sorted() == expected, "{alignment:?}: other positions");
    }
}
