//! Rows of one key/value head, in the form that the update rules need.

use super::call::Call;
use super::settings::{FeatureMap, Normaliser};
use sdpa::View;
use sdpa_kernels::{HeadsMut, exp_in_place};

/// Rows of one head of a view.
#[derive(Clone, Copy)]
struct HeadRows<'a> {
    view: View<'a>,
    batch: usize,
    head: usize,
    /// Head as a matrix with the strides of rows and columns, unless a stride is negative.
    matrix: Option<(&'a [f32], (usize, usize))>,
}

impl<'a> HeadRows<'a> {
    #[inline(always)]
    fn new(view: View<'a>, batch: usize, head: usize) -> Self {
        Self { view, batch, head, matrix: view.head(batch, head) }
    }

    /// Copies row `t` to `out`, which has its length.
    #[inline(always)]
    fn read(&self, t: usize, out: &mut [f32]) {
        match self.matrix {
            Some((data, (row, 1))) => out.copy_from_slice(&data[t * row..][..out.len()]),
            Some((data, (row, element))) => {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = data[t * row + i * element];
                }
            }
            None => {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = *self.view.get([self.batch, self.head, t, i]).expect("inside the shape");
                }
            }
        }
    }
}

/// One key/value head and its query heads.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) call: &'a Call<'a>,
    /// First token to process: 0, but for parts of a call.
    pub(super) first: usize,
    /// Number of tokens that are not padding, or the end of the part.
    pub(super) len: usize,
    first_query: (usize, usize),
    keys: HeadRows<'a>,
    values: HeadRows<'a>,
    log_decay: Option<HeadRows<'a>>,
    beta: Option<HeadRows<'a>>,
}

impl<'a> Head<'a> {
    #[inline(always)]
    pub(super) fn new(call: &'a Call<'a>, b: usize, h: usize) -> Self {
        // Of fewer heads than states, neighbouring states share one.
        let shared = |view: View<'a>| h / (call.kv_heads / view.shape()[1].min(call.kv_heads));
        Self {
            call,
            first: 0,
            len: call.lens.map_or(call.kv_len, |lens| lens[b]),
            first_query: (b, shared(call.q) * call.group),
            keys: HeadRows::new(call.k, b, shared(call.k)),
            values: HeadRows::new(call.v, b, shared(call.v)),
            log_decay: call.log_decay.map(|view| HeadRows::new(view, b, h)),
            beta: call.beta.map(|view| HeadRows::new(view, b, h)),
        }
    }

    /// Returns the head for tokens `first..end` alone.
    #[inline(always)]
    pub(super) fn part(&self, first: usize, end: usize) -> Self {
        Self { first, len: end, ..*self }
    }

    #[inline(always)]
    pub(super) fn decays(&self) -> bool {
        self.log_decay.is_some()
    }

    #[inline(always)]
    pub(super) fn corrects(&self) -> bool {
        self.beta.is_some()
    }

    /// Reads the key of token `t` and applies the feature map.
    #[inline(always)]
    pub(super) fn key(&self, t: usize, out: &mut [f32]) {
        self.keys.read(t, out);
        self.map(out);
    }

    /// Reads the value of token `t`, and appends the 1 that a normaliser sums up.
    #[inline(always)]
    pub(super) fn value(&self, t: usize, out: &mut [f32]) {
        let (value, one) = out.split_at_mut(self.call.width - self.call.normaliser.columns());
        self.values.read(t, value);
        one.fill(1.0);
    }

    /// Reads the decay of token `t`, the factor that is left of each row of the state, if the rule has decays.
    #[inline(always)]
    pub(super) fn decay(&self, t: usize, out: &mut [f32]) {
        let Some(rows) = &self.log_decay else { return };
        match rows.view.shape()[3] {
            1 => {
                let (first, rest) = out.split_at_mut(1);
                rows.read(t, first);
                exp(self.call, first);
                rest.fill(first[0]);
            }
            _ => {
                rows.read(t, out);
                exp(self.call, out);
            }
        }
    }

    /// Returns the strength of token `t`; 1 if the rule has none.
    #[inline(always)]
    pub(super) fn beta(&self, t: usize) -> f32 {
        let mut beta = [1.0];
        if let Some(rows) = &self.beta {
            rows.read(t, &mut beta);
        }
        beta[0]
    }

    /// Reads the query of token `t` and query head `head` of the group, applies the feature map, and scales it.
    #[inline(always)]
    pub(super) fn query(&self, head: usize, t: usize, out: &mut [f32]) {
        let (batch, first) = self.first_query;
        HeadRows::new(self.call.q, batch, first + head).read(t, out);
        self.map(out);
        out.iter_mut().for_each(|x| *x *= self.call.scale);
    }

    #[inline(always)]
    fn map(&self, row: &mut [f32]) {
        match self.call.feature_map {
            FeatureMap::Identity => {}
            FeatureMap::EluPlusOne => elu_plus_one(self.call, row),
        }
    }

    /// Writes zeros for the queries of padding.
    #[inline(always)]
    pub(super) fn write_padding(&self, out: &mut HeadsMut<'_>, scratch: &mut [f32]) {
        let row = &mut scratch[..self.call.width - self.call.normaliser.columns()];
        row.fill(0.0);
        for t in self.len..self.call.kv_len {
            (0..self.call.group).for_each(|head| out.write(head, t, row));
        }
    }

    /// Divides a row by its own sum of weights, if the call has a normaliser, and writes it.
    #[inline(always)]
    pub(super) fn write(&self, out: &mut HeadsMut<'_>, [head, t]: [usize; 2], row: &mut [f32]) {
        let (row, sum) = row.split_at_mut(self.call.width - self.call.normaliser.columns());
        if self.call.normaliser == Normaliser::KeySum {
            match sum[0] {
                0.0 => row.fill(0.0),
                sum => row.iter_mut().for_each(|x| *x /= sum),
            }
        }
        out.write(head, t, row);
    }
}

/// Computes eˣ of every element, of either sign: the kernels' exponential only takes elements that are not positive, as
/// decays are.
fn exp(call: &Call<'_>, xs: &mut [f32]) {
    if !xs.iter().any(|&x| x > 0.0) {
        return exp_in_place(call.isa, xs);
    }
    for x in xs {
        let mut power = [-x.abs()];
        exp_in_place(call.isa, &mut power);
        *x = if *x > 0.0 { 1.0 / power[0] } else { power[0] };
    }
}

/// Computes elu(x) + 1 of every element, sixteen at a time.
fn elu_plus_one(call: &Call<'_>, xs: &mut [f32]) {
    for xs in xs.chunks_mut(16) {
        let mut powers = [0.0f32; 16];
        for (power, &x) in powers.iter_mut().zip(&*xs) {
            *power = if x > 0.0 { 0.0 } else { x };
        }
        exp_in_place(call.isa, &mut powers);
        for (x, power) in xs.iter_mut().zip(powers) {
            *x = if *x > 0.0 { *x + 1.0 } else { power };
        }
    }
}
