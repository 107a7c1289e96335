//! What the bits of linear attention depend on: the form. Not threads, layout, batch, shared heads, what memory held
//! before, nor where a sequence is cut. And that a warm call allocates nothing.

use crate::linear_attention_support::{Case, FORMS, Outcome, RULES, Rule, execs};
use crate::support::{LAYOUTS, Layout, Tensor, UNWRITTEN, assert_same_bits};
use sdpa::{Exec, Isa, ViewMut};
use sdpa_layers::{Compute, FeatureMap, Form, LinearAttention, LinearInputs, Normaliser, Reach, Update};

#[track_caller]
fn assert_same(what: &str, got: &Outcome, expected: &Outcome) {
    assert_same_bits(what, &got.out, &expected.out);
    let bits = |outcome: &Outcome| outcome.state.as_slice().iter().map(|s| s.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(got), bits(expected), "{what}: states differ");
}

/// Every rule, form and normaliser that go together.
fn every(mut check: impl FnMut(&str, Rule, Normaliser, LinearAttention)) {
    for (rule, form) in RULES.into_iter().flat_map(|rule| FORMS.map(|form| (rule, form))) {
        let adds = matches!(rule, Rule::Linear | Rule::Gated);
        for normaliser in [Normaliser::None, Normaliser::KeySum].into_iter().take(1 + adds as usize) {
            let layer = LinearAttention::new().form(form).normaliser(normaliser);
            let map = if normaliser == Normaliser::None { FeatureMap::Identity } else { FeatureMap::EluPlusOne };
            check(&format!("{rule:?} {form:?} {normaliser:?}"), rule, normaliser, layer.feature_map(map));
        }
    }
}

/// The call cut at these tokens, state carried along.
fn in_pieces(case: &Case, layer: LinearAttention, cuts: &[usize], exec: Exec) -> Outcome {
    let (mut state, mut compute) = (case.state.clone(), Compute::new(exec));
    let mut out = Tensor::filled(case.out_shape(), f32::from_bits(UNWRITTEN));
    for ends in cuts.windows(2) {
        let piece = case.map(|tensor| tensor.rows(ends[0]..ends[1]));
        let shape = piece.out_shape();
        let mut part = Tensor::filled(shape, f32::from_bits(UNWRITTEN));
        let view = ViewMut::bhld(&mut part.data, shape).unwrap();
        layer.forward(piece.inputs(), &mut state, view, &mut compute).unwrap();
        for [b, h, t, m] in crate::support::indices(shape) {
            out.set([b, h, ends[0] + t, m], part.get([b, h, t, m]));
        }
    }
    Outcome { out, state }
}

#[test]
fn pieces_give_the_whole() {
    let n = 49;
    every(|what, rule, normaliser, layer| {
        let case = Case::new(rule, normaliser, [2, 2, 2, n, n, 20, 33], 1);
        for (isa, exec) in execs() {
            let whole = case.run(layer, exec);
            // Any cut if recurrent; ends of chunks if chunked.
            let cuts: Vec<Vec<usize>> = match FORMS.into_iter().find(|&form| layer == layer.form(form)).unwrap() {
                Form::Recurrent => {
                    vec![vec![0, 0, 1, 2, 17, 17, 48, n], (0..=n).collect(), vec![0, 13, n]]
                }
                Form::Chunked(chunk) => {
                    let all: Vec<usize> = (0..n).step_by(chunk).chain([n]).collect();
                    vec![vec![0, (n / chunk * chunk).min(chunk), n], all]
                }
                form => panic!("a new form: {form:?}"),
            };
            for cuts in cuts {
                assert_same(&format!("{what} {isa} cut at {cuts:?}"), &in_pieces(&case, layer, &cuts, exec), &whole);
            }
        }
    });
}

#[test]
#[cfg(feature = "rayon")]
fn threads_do_not_show() {
    // Enough work that it is shared out.
    let n = 300;
    every(|what, rule, normaliser, layer| {
        if !matches!(
            FORMS.into_iter().find(|&form| layer == layer.form(form)),
            Some(Form::Recurrent | Form::Chunked(16))
        ) {
            return;
        }
        let case = Case::new(rule, normaliser, [2, 3, 2, n, n, 48, 64], 2);
        let serial = case.run(layer, Exec::serial());
        for threads in [2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for asked in [1, 2, threads, 100] {
                let got = pool.install(|| case.run(layer, Exec::default().threads(asked)));
                assert_same(&format!("{what} on {asked} of {threads}"), &got, &serial);
            }
        }
    });
}

#[test]
fn layouts_do_not_show() {
    every(|what, rule, normaliser, layer| {
        let case = Case::new(rule, normaliser, [2, 2, 2, 19, 19, 9, 18], 3);
        let plain = case.run(layer, Exec::serial());
        for (i, layout) in LAYOUTS.into_iter().enumerate() {
            // Each tensor in a layout of its own.
            let mut turn = i;
            let laid_out = case.map(|tensor| {
                turn += 1;
                tensor.laid_out(LAYOUTS[turn % LAYOUTS.len()])
            });
            let mut state = case.state.clone();
            let blank = Tensor::filled(case.out_shape(), f32::from_bits(UNWRITTEN));
            let mut out = blank.laid_out(layout);
            let view = ViewMut::from_strides(&mut out.data, out.offset, out.shape, out.strides).unwrap();
            layer.forward(laid_out.inputs(), &mut state, view, &mut Compute::new(Exec::serial())).unwrap();
            let between = out.data.iter().filter(|x| x.to_bits() == UNWRITTEN).count();
            assert_eq!(between, 0, "{what} {layout:?}: elements of the output were not written");
            let got = Outcome { out: out.part(0..2, 0..4, 0..19), state };
            assert_same(&format!("{what} {layout:?}"), &got, &plain);
            let others = out.data.len() - blank.data.len();
            assert_eq!(out.data.iter().filter(|x| x.is_nan()).count(), others, "{what} {layout:?}: wrote outside");
        }
    });
}

/// Heads that share a state, and the same keys once for each.
#[test]
fn shared_and_repeated_heads_are_the_same() {
    every(|what, rule, normaliser, layer| {
        for group in [2, 3, 5] {
            let shared = Case::new(rule, normaliser, [2, 2, group, 21, 21, 10, 19], 4);
            let mut repeated = Case::new(rule, normaliser, [2, 2 * group, 1, 21, 21, 10, 19], 4);
            let heads = |tensor: &Tensor| {
                let [b, h, l, d] = tensor.shape;
                Tensor::from_fn([b, h * group, l, d], |[b, h, l, d]| tensor.get([b, h / group, l, d]))
            };
            (repeated.q, repeated.k, repeated.v) = (shared.q.clone(), heads(&shared.k), heads(&shared.v));
            (repeated.log_decay, repeated.beta) =
                (shared.log_decay.as_ref().map(heads), shared.beta.as_ref().map(heads));
            let size = shared.state.as_slice().len() / 4;
            let states = shared.state.as_slice().chunks_exact(size).flat_map(|one| core::iter::repeat_n(one, group));
            repeated.state.as_mut_slice().copy_from_slice(&states.collect::<Vec<_>>().concat());
            let (got, expected) = (shared.run(layer, Exec::serial()), repeated.run(layer, Exec::serial()));
            assert_same_bits(&format!("{what} {group}"), &got.out, &expected.out);
            for (i, state) in expected.state.as_slice().chunks_exact(size).enumerate() {
                assert_eq!(state, &got.state.as_slice()[i / group * size..][..size], "{what} {group}: state {i}");
            }
        }
    });
}

/// One decay or strength for many, and the same written out.
#[test]
fn broadcast_and_written_out_are_the_same() {
    let (sizes, n) = ([2, 3, 2, 18, 18, 8, 16], 18);
    for form in FORMS {
        let layer = LinearAttention::new().form(form);
        let case = Case::new(Rule::GatedDelta, Normaliser::None, sizes, 6);
        for which in 0..16 {
            let ones = |full: [usize; 4]| core::array::from_fn(|i| if which >> i & 1 == 1 { 1 } else { full[i] });
            let some = |tensor: &Option<Tensor>, full| {
                let from = tensor.as_ref().unwrap();
                Tensor::from_fn(ones(full), |at| from.get(at))
            };
            let spread = |tensor: &Tensor, full| {
                Tensor::from_fn(full, |at| tensor.get(core::array::from_fn(|i| at[i].min(tensor.shape[i] - 1))))
            };
            let (mut short, mut full) = (case.clone(), case.clone());
            let (log_decay, beta) = (some(&case.log_decay, [2, 3, n, 8]), some(&case.beta, [2, 3, n, 1]));
            (full.log_decay, full.beta) = (Some(spread(&log_decay, [2, 3, n, 8])), Some(spread(&beta, [2, 3, n, 1])));
            (short.log_decay, short.beta) = (Some(log_decay), Some(beta));
            let (got, expected) = (short.run(layer, Exec::serial()), full.run(layer, Exec::serial()));
            assert_same(&format!("{form:?} {which:04b}"), &got, &expected);
        }
    }
}

/// Batches and heads do not know of each other, and rows do not know how many come after.
#[test]
fn neighbours_do_not_show() {
    every(|what, rule, normaliser, layer| {
        let case = Case::new(rule, normaliser, [2, 2, 2, 20, 20, 9, 17], 8);
        let all = case.run(layer, Exec::serial());
        let size = all.state.as_slice().len() / 4;
        for (b, h) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut one = Case::new(rule, normaliser, [1, 1, 2, 20, 20, 9, 17], 8);
            let cut = |tensor: &Tensor| tensor.part(b..b + 1, h..h + 1, 0..20);
            (one.q, one.k, one.v) = (case.q.part(b..b + 1, 2 * h..2 * h + 2, 0..20), cut(&case.k), cut(&case.v));
            (one.log_decay, one.beta) = (case.log_decay.as_ref().map(cut), case.beta.as_ref().map(cut));
            let states = (2 * b + h) * size..(2 * b + h + 1) * size;
            one.state.as_mut_slice().copy_from_slice(&case.state.as_slice()[states.clone()]);
            let got = one.run(layer, Exec::serial());
            assert_same_bits(what, &got.out, &all.out.part(b..b + 1, 2 * h..2 * h + 2, 0..20));
            assert_eq!(got.state.as_slice(), &all.state.as_slice()[states], "{what}");
        }
        if layer != layer.form(Form::Recurrent) {
            return;
        }
        let fewer = case.map(|tensor| tensor.rows(0..11)).run(layer, Exec::serial());
        assert_same_bits(what, &fewer.out, &all.out.rows(0..11));
    });
}

/// Products are never fused with sums, so only the exponential of a decay can differ, and not where there is FMA.
#[test]
fn instruction_sets_do_not_show() {
    every(|what, rule, normaliser, layer| {
        let case = Case::new(rule, normaliser, [1, 2, 2, 37, 37, 20, 70], 9);
        let without_exp = case.log_decay.is_none() && normaliser == Normaliser::None;
        let results: Vec<(Isa, Outcome)> = execs().map(|(isa, exec)| (isa, case.run(layer, exec))).collect();
        let (widest, expected) = results.last().unwrap();
        for (isa, got) in &results {
            if without_exp || isa.has_fma() == widest.has_fma() {
                assert_same(&format!("{what}: {isa} and {widest}"), got, expected);
            }
        }
    });
}

/// Memory left over from other calls changes nothing, and is enough for the next.
#[test]
fn a_warm_call_allocates_nothing() {
    let mut compute = Compute::new(Exec::serial());
    // NaN left behind everywhere.
    let mut dirty = Case::new(Rule::GatedDelta, Normaliser::None, [1, 2, 3, 50, 50, 40, 50], 10);
    dirty.q.data.fill(f32::NAN);
    dirty.k.data.fill(f32::NAN);
    every(|what, rule, normaliser, layer| {
        let case = Case::new(rule, normaliser, [2, 2, 3, 21, 21, 20, 33], 11);
        let clean = case.run(layer, Exec::serial());
        dirty.run_with(layer.normaliser(Normaliser::None), &mut compute);
        assert_same(what, &case.run_with(layer, &mut compute), &clean);
        let whole = layer.reach(Reach::Whole);
        let mut reaches = vec![layer];
        reaches.extend((rule == Rule::Linear).then_some(whole));
        for layer in reaches {
            let (shape, mut state) = (case.out_shape(), case.state.clone());
            let mut out = Tensor::filled(shape, 0.0);
            let mut run = || {
                let view = ViewMut::blhd(&mut out.data, [shape[0], shape[2], shape[1], shape[3]]).unwrap();
                layer.forward(case.inputs(), &mut state, view, &mut compute).unwrap();
            };
            run();
            assert_eq!(crate::counting::counted(run), (0, 0), "{what}");
        }
    });
}

/// Views into one packed projection, as layers have them: rows of a token hold queries, keys and values side by side.
#[test]
fn packed_rows_need_no_copy() {
    let (b, n, h, kv, d) = (2, 13, 4, 2, 8);
    let mut rng = crate::support::Rng::new(12);
    let packed: Vec<f32> = (0..b * n * (h + 2 * kv) * d).map(|_| rng.normal() / 4.0).collect();
    let [q, k, v] = sdpa::View::packed_qkv(&packed, [b, n, h, d], kv).unwrap();
    let dense = |view: sdpa::View<'_>| Tensor::from_fn(view.shape(), |at| *view.get(at).unwrap());
    let mut case = Case::new(Rule::Linear, Normaliser::None, [b, kv, h / kv, n, n, d, d], 12);
    (case.q, case.k, case.v) = (dense(q), dense(k), dense(v));
    assert_eq!(case.q.laid_out(Layout::Bhld).data, case.q.data);
    for form in FORMS {
        let layer = LinearAttention::new().form(form);
        let expected = case.run(layer, Exec::serial());
        let (mut state, mut out) = (case.state.clone(), Tensor::filled(case.out_shape(), 0.0));
        let (view, inputs) =
            (ViewMut::bhld(&mut out.data, case.out_shape()).unwrap(), LinearInputs::new(q, k, v, Update::Linear));
        layer.forward(inputs, &mut state, view, &mut Compute::new(Exec::serial())).unwrap();
        assert_same(&format!("{form:?}"), &Outcome { out, state }, &expected);
    }
}
