//! States with keys that come in parts: with every option that can be cut by keys, the bits of one call.

mod functions;
mod selected;

use crate::half::short::{DTYPES, Short};
use crate::kv_support::cuts;
use crate::options::mods::{Functions, with_mods};
use crate::options::{Case, Wanted};
use crate::positions::of_state;
use crate::support::{Rng, Tensors, assert_same_bits, execs};
use core::ops::Range;
use sdpa::{
    Alignment, Attention, AttnState, BlockClass, BlockPosition, Bound, Error, Exec, Inputs, KvCache, KvShape, Mask,
    MaskMod, Mods, Outputs, Position, Precision, View, ViewMut, Window,
    masks::{Documents, MaskError, PrefixLm, Tree},
};

/// A random case that a state can say: no ragged sequences, no weight function, an alignment by name.
fn stateful(rng: &mut Rng, most: usize) -> Case {
    loop {
        let case = Case::random(rng, most);
        if case.ragged.is_some() || case.alignment == Some(Alignment::BottomRight) && case.kv_lens.is_some() {
            continue;
        }
        let offset = if case.alignment == Some(Alignment::BottomRight) {
            Alignment::Offset(case.k.shape[2] as isize - case.q.shape[2] as isize)
        } else {
            case.alignment.expect("cases have one")
        };
        let functions = Functions { prob: None, ..case.functions };
        let case = Case { alignment: Some(offset), functions, ..case };
        return if rng.below(4) == 0 { of_state(rng, &case) } else { case };
    }
}

/// Pushes keys, or skips those that the state says no row sees.
fn push(state: &mut AttnState<'_>, short: &Short, keys: Range<usize>) {
    if state.sees(keys.clone()) {
        let [_, k, v] = short.qkv.each_ref().map(|x| x.view());
        state.push(k.rows_in(keys.clone()).unwrap(), v.rows_in(keys).unwrap()).unwrap();
    } else {
        state.skip(keys.len()).unwrap();
    }
}

#[test]
fn pieces_of_any_size_have_the_bits_of_one_call() {
    let mut functions = 0;
    for seed in 0..150 {
        let mut rng = Rng::new(77_000 + seed);
        let mut case = stateful(&mut rng, 600_000);
        case.precision = rng.pick(&[Precision::Exact, Precision::Exact, Precision::Native]);
        functions += usize::from(case.functions != Functions::default());
        let short = Short::new(case, [0; 3].map(|_| rng.pick(&DTYPES)));
        let parts = cuts(short.case.k.shape[2], &mut rng);
        for (isa, exec) in execs() {
            let inputs = short.case.inputs_over(short.source());
            let mut whole = short.case.unwritten(Wanted::LEAST);
            short.case.run_outputs(inputs, exec, whole.outputs(), &mut sdpa::Workspace::new());
            let state = AttnState::from_inputs(short.case.attention(), inputs, exec).unwrap();
            let mut got = short.case.unwritten(Wanted::LEAST);
            with_mods!(short.case, |mods| {
                let mut state = state.mods(&mods).unwrap();
                for keys in &parts {
                    push(&mut state, &short, keys.clone());
                    // Reading on the way changes nothing.
                    state.read(got.outputs()).unwrap();
                }
                assert_eq!(state.len(), short.case.k.shape[2]);
                state.read(got.outputs()).unwrap();
            });
            let what = format!("seed {seed}, {isa}, {parts:?}");
            assert_same_bits(&what, &got.out, &whole.out);
            assert_same_bits(&what, &got.lse, &whole.lse);
        }
    }
    assert!(functions > 30, "only {functions} cases with functions");
}

/// Rows and their parts of options, each in a state of its own, as ranks of several machines have them.
#[test]
fn stretches_of_rows_have_the_bits_of_one_call() {
    for seed in 0..60 {
        let mut rng = Rng::new(78_000 + seed);
        let case = stateful(&mut rng, 300_000);
        let case = case.sequence(rng.below(case.batch()));
        let exec = Exec::default();
        let whole = case.run(exec, Wanted::LEAST);
        for rows in cuts(case.q.shape[2], &mut rng) {
            // Functions are those of the whole call: the state tells them which rows these are.
            let some = Case { place: case.place, ..case.some_rows(rows.clone()) };
            let some = Short::new(some, [0; 3].map(|_| sdpa::Dtype::F32));
            let state = AttnState::from_inputs(some.case.attention(), some.case.inputs(), exec).unwrap();
            let state = state.rows_from(rows.start).unwrap();
            let mut got = some.case.unwritten(Wanted::LEAST);
            with_mods!(some.case, |mods| {
                let mut state = state.mods(&mods).unwrap();
                cuts(case.k.shape[2], &mut rng).into_iter().for_each(|keys| push(&mut state, &some, keys));
                state.read(got.outputs()).unwrap();
            });
            let heads = 0..case.heads();
            assert_same_bits(&format!("seed {seed}"), &got.out, &whole.out.part(0..1, heads.clone(), rows.clone()));
            assert_same_bits(&format!("seed {seed}"), &got.lse, &whole.lse.part(0..1, heads, rows));
        }
    }
}

/// Mask that hides everything and records the keys of the blocks that it is asked about.
struct Recorder<'a>(&'a std::sync::Mutex<Vec<Range<usize>>>);

impl MaskMod for Recorder<'_> {
    fn keep(&self, _: Position) -> bool {
        false
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        self.0.lock().unwrap().push(block.keys);
        BlockClass::None
    }
}

#[test]
fn keys_that_rules_hide_need_not_come() {
    let attention = Attention::new().causal().align(Alignment::Offset(300));
    let q = [0.0f32; 4];
    let state = |attention, lens: Option<&'static [usize]>| {
        let none = View::<f32>::bhld(&[], [1, 1, 0, 1]).unwrap();
        let inputs = Inputs::new(View::bhld(&q, [1, 1, 4, 1]).unwrap(), none, none);
        let inputs = lens.map_or(inputs, |lens| inputs.kv_lens(lens));
        AttnState::from_inputs(attention, inputs, Exec::serial()).unwrap()
    };
    let plain = state(attention, None);
    assert!(plain.sees(0..1) && plain.sees(303..304) && !plain.sees(304..9000) && !plain.sees(7..7));
    let window = Window::inclusive(Some(10), None).keep_first(3);
    let windowed = state(attention.window(window), None);
    assert!(!windowed.sees(2..2) && windowed.sees(2..3) && windowed.sees(290..291) && !windowed.sees(304..305));
    assert!(!state(attention.window(Window::inclusive(Some(10), None)), None).sees(0..290));
    let short = state(attention, Some(&[20]));
    assert!(short.sees(19..400) && !short.sees(20..400));
    // A mask and a mask function that hide whole blocks, or all but one key.
    let shown: Vec<bool> = (0..4 * 600).map(|n| n % 600 == 599).collect();
    let none = View::<f32>::bhld(&[], [1, 1, 0, 1]).unwrap();
    let inputs = Inputs::new(View::bhld(&q, [1, 1, 4, 1]).unwrap(), none, none);
    for mask in [Mask::keep, Mask::drop] {
        let mask: Mask<'_> = mask(View::bhld(&shown, [1, 1, 4, 600]).unwrap());
        let keeps = matches!(mask, Mask::Keep(_));
        let sees = |inputs: Inputs<'_>, keys| {
            AttnState::from_inputs(Attention::new(), inputs, Exec::serial()).unwrap().sees(keys)
        };
        assert_eq!([0..599, 599..600].map(|keys| sees(inputs.mask(mask), keys)), [!keeps, keeps]);
        assert_eq!([0..599, 600..900].map(|keys| sees(inputs.mask_prefix(mask), keys)), [!keeps, false]);
        assert!(sees(inputs.mask(mask), 599..601), "there will be an error");
    }
    let documents = Mods::new().mask(Documents::by_ends(&[300, 700]).unwrap());
    let in_second = AttnState::from_inputs(attention, inputs, Exec::serial()).unwrap().mods(&documents).unwrap();
    assert!(!in_second.sees(0..300) && in_second.sees(299..301) && !in_second.sees(304..305));
    // States without rows, heads or sequences see nothing.
    for shape in [[0, 1, 4, 1], [1, 0, 4, 1], [1, 1, 0, 1]] {
        let (q, kv) = (View::<f32>::bhld(&[], shape).unwrap(), [shape[0], shape[1], 0, 1]);
        let none = View::<f32>::bhld(&[], kv).unwrap();
        let state = AttnState::from_inputs(Attention::new(), Inputs::new(q, none, none), Exec::serial()).unwrap();
        assert!(!state.sees(0..9), "{shape:?}");
    }
    // Functions are asked about the keys of one block at a time.
    let asked = std::sync::Mutex::new(Vec::new());
    let recorded = Mods::new().mask(Recorder(&asked));
    let recording = AttnState::from_inputs(Attention::new(), inputs, Exec::serial()).unwrap().mods(&recorded).unwrap();
    assert!(!recording.sees(200..800));
    drop(recording);
    assert_eq!(*asked.lock().unwrap(), [200..256, 256..512, 512..768, 768..800]);
    let mut state = state(attention, Some(&[20]));
    assert_eq!(state.skip(1).unwrap_err().to_string(), "skip: needs keys that no row sees");
    let ones = [1.0; 20];
    let ones = View::bhld(&ones, [1, 1, 20, 1]).unwrap();
    state.push(ones, ones).unwrap();
    state.skip(isize::MAX as usize - 20).unwrap();
    assert!(
        matches!(state.skip(1), Err(Error::TooLarge { .. }))
            && matches!(state.push(ones, ones), Err(Error::TooLarge { .. }))
    );
    assert_eq!(state.len(), isize::MAX as usize);
    let mut out = [0.0; 4];
    state.read(Outputs::new(ViewMut::bhld(&mut out, [1, 1, 4, 1]).unwrap())).unwrap();
    assert_eq!(out, [1.0; 4]);
}

#[test]
fn keys_without_positions_and_rows_with_other_ones_are_refused() {
    let (q, places) = ([0.0f32; 4], (0..200).collect::<Vec<i32>>());
    let none = View::<f32>::bhld(&[], [1, 1, 0, 1]).unwrap();
    let (lists, of_rows, shown) = ([&places[..]], [&places[..4]], [true; 100]);
    let inputs = Inputs::new(View::bhld(&q, [1, 1, 4, 1]).unwrap(), none, none).key_positions(&lists);
    let inputs = inputs.mask_prefix(Mask::keep(View::bhld(&shown, [1, 1, 1, 100]).unwrap()));
    let attention = Attention::new().causal().align(Alignment::Offset(0));
    let state = |inputs| AttnState::from_inputs(attention, inputs, Exec::serial()).unwrap();
    let says = |error: Error, words: &str| assert_eq!(error.to_string(), words);
    // The mask hides all that would be skipped.
    let mut first = state(inputs);
    first
        .push(View::bhld(&[0.0; 100], [1, 1, 100, 1]).unwrap(), View::bhld(&[0.0; 100], [1, 1, 100, 1]).unwrap())
        .unwrap();
    says(first.skip(101).unwrap_err(), "k: rows is 101, but must be at most 100, the key positions that are left");
    assert_eq!(first.len(), 100);
    first.skip(100).unwrap();
    // Positions end before the keys that a length allows.
    let few = [&places[..5]];
    let error = state(inputs.key_positions(&few).kv_lens(&[9])).skip(6).unwrap_err();
    says(error, "k: rows is 6, but must be at most 5, the key positions that are left");
    let error = state(inputs).merge(&state(inputs.row_positions(&of_rows))).unwrap_err();
    says(error, "later state: list of row positions is given, but this state has none");
}

#[test]
fn what_a_state_refuses() {
    let (q, k) = (vec![0.0f32; 2 * 3 * 8], vec![0.0f32; 2 * 300 * 8]);
    let (q, k) = (View::bhld(&q, [1, 2, 3, 8]).unwrap(), View::bhld(&k, [1, 2, 300, 8]).unwrap());
    let inputs = Inputs::new(q, k, k);
    let state = |inputs| AttnState::from_inputs(Attention::new(), inputs, Exec::serial());
    let says = |error: Option<Error>, words: &str| assert_eq!(error.expect("an error").to_string(), words);
    let cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 }).unwrap();
    says(state(Inputs::cached(q, &cache)).err(), "cache: needs a call over all keys, not a state");
    says(state(inputs.ragged(&[0, 3], &[0, 300])).err(), "ragged: needs a call over all keys, not a state");
    says(state(inputs.kv_lens(&[3, 3])).err(), "kv_lens: length is 2, but the batch has 1");
    let bias = [0.0f32; 2 * 299];
    let narrow = View::bhld(&bias, [1, 2, 1, 299]).unwrap();
    says(state(inputs.bias(View::bhld(&bias, [1, 1, 2, 299]).unwrap())).err(), "bias: rows is 2, but the call has 3");
    let mut narrow = state(inputs.bias(narrow)).unwrap();
    narrow.push(k.rows(0..100).unwrap(), k.rows(0..100).unwrap()).unwrap();
    let error = narrow.push(k.rows(0..200).unwrap(), k.rows(0..200).unwrap()).unwrap_err();
    assert!(matches!(error, Error::Range { got: 200, bound: Bound::AtMost, limit: 199, .. }));
    assert_eq!(error.to_string(), "k: rows is 200, but must be at most 199, the columns of the bias that are left");
    assert_eq!(narrow.len(), 100);
    let mask = [true; 2];
    let mut masked = state(inputs.mask(Mask::keep(View::bhld(&mask, [1, 1, 1, 2]).unwrap()))).unwrap();
    says(masked.push(k, k).err(), "k: rows is 300, but must be at most 2, the columns of the mask that are left");
    let weight = Mods::new().weight(|weight: f32, _: Position| weight);
    let plain = || state(inputs).unwrap();
    says(plain().mods(&weight).err(), "weight function: needs a call over all keys, not a state");
    let mut outs = vec![7.0; 2 * 3 * 9];
    let outputs = Outputs::new(ViewMut::bhld(&mut outs, [1, 2, 3, 9]).unwrap());
    says(plain().check(&outputs).err(), "out: value_dim is 9, but v has 8");
    let mask = Mods::new().mask(PrefixLm::new(3));
    let mut pushed = plain();
    pushed.push(k, k).unwrap();
    says(pushed.mods(&mask).err(), "functions: needs a state without keys");
    let mut first = plain();
    says(
        first.merge(&plain().mods(&mask).unwrap()).err(),
        "later state: set of functions is given, but this state has none",
    );
    // Nothing is allocated for rows that are not there; what is there must fit.
    let none = View::<f32>::bhld(&[], [1, 2, 0, 8]).unwrap();
    let one = [0.0f32];
    let many = View::from_strides(&one, 0, [1, 2, 1 << 58, 8], [0; 4]).unwrap();
    says(
        state(Inputs::new(many, none, none)).err(),
        "state: sizes [1, 2, 288230376151711744, 8] do not fit the address space",
    );
    let wide = View::from_strides(&one, 0, [1, 1 << 50, 0, 8], [0; 4]).unwrap();
    let heads = View::from_strides(&one, 0, [1, 1 << 50, 1, 8], [0; 4]).unwrap();
    assert!(matches!(state(Inputs::new(heads, wide, wide)), Err(Error::TooLarge { .. } | Error::Memory { .. })));
}

#[test]
fn rows_of_one_ragged_sequence_are_inputs_of_a_state_and_what_does_not_fit_is_refused() {
    let (x, ends, mask) = (vec![0.5f32; 2 * 9 * 8], [0, 4, 9], vec![true; 2 * 3 * 5]);
    let of = |rows: usize| View::bhld(&x[..2 * rows * 8], [1, 2, rows, 8]).unwrap();
    // Rows 3, 4 and 5; row 3 is of the first sequence.
    let inputs = Inputs::new(of(3), of(9), of(9)).ragged(&ends, &ends);
    let mask_of = |shape: [usize; 4]| {
        let len = shape.iter().product::<usize>();
        inputs.mask(Mask::keep(View::bhld(&mask[..len], shape).unwrap()))
    };
    let second = mask_of([1, 2, 3, 5]).of_sequence(1, 1..3).unwrap();
    assert_eq!(second.bias_and_mask().1.unwrap().shape(), [1, 2, 2, 5]);
    assert_eq!(mask_of([2, 1, 1, 5]).of_sequence(1, 1..3).unwrap().bias_and_mask().1.unwrap().shape(), [1, 1, 1, 5]);
    AttnState::from_inputs(Attention::new(), second, Exec::serial()).unwrap();
    let says = |inputs: Inputs<'_>, sequence, rows, message: &str| {
        let error = inputs.of_sequence(sequence, rows).expect_err(message).to_string();
        assert!(error.contains(message), "{error}, not {message}");
    };
    let cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 8, value_dim: 8 }).unwrap();
    let needs = "sequence: needs sequences of a batch, or laid end to end, in tensors";
    says(Inputs::cached(of(3), &cache), 0, 0..1, needs);
    says(inputs, 2, 0..1, "sequence: number up to it is 3, but must be at most 2, the sequences of the call");
    says(inputs, 0, 0..4, "rows: end is 4, but must be at most 3, the rows of q");
    says(inputs.kv_lens(&[1]), 0, 0..1, "kv_lens: length is 1, but the batch has 2");
    says(inputs.kv_lens(&[4, 6]), 1, 1..3, "6");
    says(mask_of([1, 1, 2, 5]), 0, 0..1, "mask: rows is 2, but q has 3");
    says(mask_of([2, 1, 3, 5]), 0, 0..1, "mask: batch is 2, but the call has 1");
    says(mask_of([1, 1, 3, 4]), 0, 0..1, "mask: columns is 4, but k (keys of the longest sequence) has 5");
}

#[test]
fn rows_of_one_sequence_of_a_batch_are_inputs_of_a_state_with_the_bits_of_the_batch() {
    let ([batch, heads, rows, keys, dim], lens) = ([2, 2, 6, 9, 8], [4, 9]);
    let tensors = Tensors::normal([batch, heads, heads, rows, keys, dim, dim], 7);
    let (q, k, v) = (tensors.q.view(), tensors.k.view(), tensors.v.view());
    let mask: Vec<bool> = (0..batch * rows * keys).map(|n| n % 5 != 0).collect();
    let mask = Mask::keep(View::bhld(&mask, [batch, 1, rows, keys]).unwrap());
    let inputs = Inputs::new(q, k, v).kv_lens(&lens).mask(mask);
    let attention = Attention::new().causal();
    let mut all = vec![f32::NAN; batch * heads * rows * dim];
    let outputs = Outputs::new(ViewMut::bhld(&mut all, [batch, heads, rows, dim]).unwrap());
    sdpa::attention(&attention.align(Alignment::BottomRight), inputs, outputs).unwrap();
    for (sequence, &len) in lens.iter().enumerate() {
        let (some, shape) = (2..6, [1, heads, 4, dim]);
        let first = len as isize - rows as isize + 2;
        let part = inputs.of_sequence(sequence, some).unwrap();
        let attention = attention.align(Alignment::Offset(first));
        let mut state = AttnState::from_inputs(attention, part, Exec::serial()).unwrap();
        let [k, v] = [k, v].map(|x| x.batch(sequence..sequence + 1).unwrap());
        state.push(k, v).unwrap();
        let mut out = vec![f32::NAN; heads * 4 * dim];
        state.read(Outputs::new(ViewMut::bhld(&mut out, shape).unwrap())).unwrap();
        for (head, out) in out.chunks_exact(4 * dim).enumerate() {
            let expected = &all[((sequence * heads + head) * rows + 2) * dim..][..4 * dim];
            assert!(out.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{sequence}, {head}");
        }
    }
    let says = |inputs: Inputs<'_>, sequence, message: &str| {
        let error = inputs.of_sequence(sequence, 0..1).expect_err(message).to_string();
        assert!(error.contains(message), "{error}, not {message}");
    };
    says(inputs, 2, "sequence: number up to it is 3, but must be at most 2, the sequences of the call");
    says(inputs.kv_lens(&[4]), 0, "kv_lens: length is 1, but the batch has 2");
    says(inputs.batch_period(3), 0, "batch period: number of sequences is 2, but must be a multiple of 3, the period");
    let long = [true; 3 * 9];
    says(inputs.mask(Mask::keep(View::bhld(&long, [3, 1, 1, 9]).unwrap())), 0, "mask: batch is 3, but the call has 2");
}

/// A mask function is asked whether it fits the call, before keys come.
#[test]
fn a_mask_function_that_does_not_fit_is_refused() {
    let x = [0.5f32; 16];
    let view = |rows| View::from_strides(&x, 0, [1, 1, rows, 8], [0, 0, 0, 1]).unwrap();
    let mods = Mods::new().mask(Tree::new(300, &[None, Some(0)]).unwrap());
    for (attention, fits) in [
        (Attention::new(), Ok(())),
        (
            Attention::new().align(Alignment::TopLeft).window(Window::inclusive(Some(3), None)),
            Err(Error::Mask(MaskError::Distance { option: "window" })),
        ),
    ] {
        let state = AttnState::from_inputs(attention, Inputs::new(view(2), view(0), view(0)), Exec::serial()).unwrap();
        let pushed = state.mods(&mods).and_then(|mut state| state.push(view(302), view(302)));
        assert_eq!(pushed, fits);
    }
}

/// A bias with a column for the first key alone hides the others, wherever the pieces end.
#[test]
fn a_bias_for_the_first_key_alone_hides_the_others() {
    let tensors = Tensors::normal([1, 2, 1, 3, 600, 16, 16], 5);
    let (q, k, v, bias) = (tensors.q.view(), tensors.k.view(), tensors.v.view(), [2.5f32]);
    let first = View::from_strides(&bias, 0, [1, 2, 3, 1], [0; 4]).unwrap();
    let inputs = Inputs::new(q, k, v).bias_prefix(first);
    fn outputs(out: &mut [f32]) -> Outputs<'_> {
        Outputs::new(ViewMut::bhld(out, [1, 2, 3, 16]).unwrap())
    }
    let (mut whole, mut pieces) = (vec![f32::NAN; 2 * 3 * 16], vec![f32::NAN; 2 * 3 * 16]);
    sdpa::attention(&Attention::new(), inputs, outputs(&mut whole)).unwrap();
    let mut state = AttnState::from_inputs(Attention::new(), inputs, Exec::default()).unwrap();
    for keys in [0..300, 300..600] {
        state.push(k.rows(keys.clone()).unwrap(), v.rows(keys).unwrap()).unwrap();
    }
    state.read(outputs(&mut pieces)).unwrap();
    assert!(whole.iter().zip(&pieces).all(|(a, b)| a.to_bits() == b.to_bits()));
}
