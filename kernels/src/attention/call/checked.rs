//! Checked call: inputs, outputs and tiling that fit together.

use crate::attention::call::Call;
use crate::attention::call::outputs::{Outputs, Shared};
use crate::attention::call::tiling::Tiling;

/// Call with outputs and tiling that fit together. It is made only by a check ([`Self::new`], [`Self::reading`]): the
/// unsafe code of the forward pass relies on that.
pub(crate) struct CheckedCall<'a> {
    call: Call<'a>,
    outputs: Shared<'a>,
    tiling: Tiling,
}

impl<'a> CheckedCall<'a> {
    /// Checks a call.
    ///
    /// # Panics
    /// If shapes do not fit together. `sdpa` reports such calls as errors before it makes a launch.
    pub(crate) fn new(call: Call<'a>, outputs: Outputs<'a>, tiling: Tiling) -> Self {
        assert_outputs(&call, &outputs);
        Self { outputs: outputs.into_shared(), ..Self::reading(call, tiling) }
    }

    /// Checks a call without outputs, of which only the inputs are read.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub(crate) fn reading(call: Call<'a>, tiling: Tiling) -> Self {
        assert_inputs(&call);
        assert_lengths(&call);
        assert_options(&call);
        let (head_dim, value_dim) = (call.q.shape()[3], call.kv.v_shape()[3]);
        let fits = (tiling.head_dim, tiling.value_dim) == (head_dim, value_dim) && tiling.holds(call.longest().1);
        assert!(fits, "the tiling is for other sizes");
        Self { call, outputs: Shared::NOTHING, tiling }
    }

    #[inline(always)]
    pub(crate) fn call(&self) -> &Call<'a> {
        &self.call
    }

    #[inline(always)]
    pub(crate) fn outputs(&self) -> &Shared<'a> {
        &self.outputs
    }

    #[inline(always)]
    pub(crate) fn tiling(&self) -> &Tiling {
        &self.tiling
    }
}

/// Asserts that q, k and v fit together.
fn assert_inputs(call: &Call<'_>) {
    let [b, h, _, d] = call.q.shape();
    let ([kb, hkv, lk, kd], [vb, vh, lv, dv]) = (call.kv.k_shape(), call.kv.v_shape());
    assert!(d > 0 && dv > 0, "queries and values need a length");
    assert!(kd == d && (vb, vh, lv) == (kb, hkv, lk), "q, k and v do not fit together");
    // Tensors have the batch of q; a cache or pages have the call's sequences.
    let tensors = call.kv.tensors().is_some();
    match call.options.sequences {
        None => assert!(kb == if tensors { b } else { call.sequences() }, "q, k and v do not fit together"),
        Some(sequences) => {
            assert!(!tensors && sequences.len() == call.sequences(), "sequences do not fit the queries");
            assert!(sequences.iter().all(|&sequence| sequence < kb), "no such sequence");
        }
    }
    assert!(if hkv == 0 { h == 0 } else { h % hkv == 0 }, "query heads are no multiple of key/value heads");
}

/// Asserts that the sequences' lengths fit the tensors.
fn assert_lengths(call: &Call<'_>) {
    let ([b, _, lq, _], [.., lk, _]) = (call.q.shape(), call.kv.k_shape());
    if let Some(ragged) = call.options.ragged {
        let cumulative =
            |ends: &[usize], total: usize| ends.first() == Some(&0) && ends.last() == Some(&total) && ends.is_sorted();
        assert!(b == 1 && cumulative(ragged.q, lq), "cumulative lengths do not fit q");
        assert!(call.kv.tensors().is_some() == ragged.k.is_some(), "cumulative key lengths are those of two tensors");
        let fits = ragged.k.is_none_or(|k| k.len() == ragged.q.len() && cumulative(k, lk));
        assert!(fits, "cumulative lengths do not fit k");
    }
    assert!(call.kv.lens().is_none() || call.options.kv_lens.is_none(), "key lengths twice");
    if let Some(lens) = call.options.kv_lens {
        assert!(lens.len() == call.sequences(), "key lengths do not fit the batch");
        let inside = lens.iter().enumerate().all(|(i, &len)| len <= call.keys_of(i).len());
        assert!(inside, "a key length is beyond its tensor");
    }
}

/// Asserts that bias, mask, slopes and sinks fit the sequences and heads.
fn assert_options(call: &Call<'_>) {
    let (options, h) = (&call.options, call.q.shape()[1]);
    let (n, (rows, _)) = (call.sequences(), call.longest());
    let shapes = [options.bias.map(|v| v.shape()), options.mask.map(|m| m.view().shape())];
    for shape in shapes.into_iter().flatten() {
        assert!(shape[..3] == [n, h, rows], "a bias or mask does not fit");
    }
    for per_head in [options.alibi, options.sinks].into_iter().flatten() {
        assert!(per_head.len() == h, "slopes or sinks do not fit the heads");
    }
}

/// Asserts that every output fits the inputs.
fn assert_outputs(call: &Call<'_>, outputs: &Outputs<'_>) {
    let ([b, h, lq, _], [.., dv]) = (call.q.shape(), call.kv.v_shape());
    let (n, (rows, keys)) = (call.sequences(), call.longest());
    match &outputs.out {
        Some(out) => assert!(out.shape() == [b, h, lq, dv], "the output does not fit q and v"),
        None => {
            let Outputs { lse, points, key_weight_sums, state, .. } = outputs;
            let alone = points.iter().all(Option::is_none) && key_weight_sums.is_none() && lse.is_none();
            assert!(state.is_some() && alone, "without an output there can be a state and nothing else");
        }
    }
    assert!(outputs.lse.as_ref().is_none_or(|lse| lse.shape() == [b, h, lq, 1]), "the LSE does not fit q");
    for view in outputs.points.iter().flatten() {
        assert!(view.shape() == [n, h, rows, keys], "a score output does not fit");
    }
    if let Some(state) = &outputs.state {
        let shapes = [state.max.shape(), state.sum.shape(), state.out.shape()];
        assert!(shapes == [[b, h, lq, 1], [b, h, lq, 1], [b, h, lq, dv]], "a state does not fit q and v");
    }
    if let Some(sums) = &outputs.key_weight_sums {
        assert!(sums.shape() == call.key_weight_sums_shape(), "key_weight_sums does not fit k");
    }
}
