//! Checks that settings, tensors and state fit together. After them, only an allocation can fail.

use super::call::Call;
use super::settings::{Form, Normaliser, Reach};
use super::state::StateShape;
use super::{LinearAttention, LinearInputs};
use crate::error::{LONGEST_DIM, at_most, same};
use sdpa::{Bound, Error, Exec, Inputs, Shape, View};

/// Longest chunk. Scores and keys of longer chunks would leave the caches, and more than a few dozen tokens gain
/// nothing.
const MAX_CHUNK: usize = 1024;

impl LinearAttention {
    pub(super) fn checked<'a>(
        &self,
        inputs: &LinearInputs<'a>,
        state: StateShape,
        out: [usize; 4],
        exec: Exec<'_>,
    ) -> Result<Call<'a>, Error> {
        let LinearInputs { q, k, v, update, lens } = *inputs;
        let (shape, of) = shape_of([q, k, v])?;
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
        // Without query heads, the keys would not be added to the state.
        if heads == 0 && kv_heads > 0 {
            return Err(Error::Empty { argument: "q", what: "heads" });
        }
        let (log_decay, beta) = (update.log_decay(), update.beta());
        self.check_settings(log_decay.is_some(), beta.is_some())?;
        if self.reach == Reach::Causal {
            same("k", "rows", kv_len, q_len, "q")?;
        }
        let log_decay = log_decay.map(|view| repeated("log_decay", view, (&shape, of), head_dim)).transpose()?;
        let beta = beta.map(|view| repeated("beta", view, (&shape, of), 1)).transpose()?;
        self.check_state(state, &shape, of)?;
        if let Some(lens) = lens {
            same("lens", "length", lens.len(), batch, "the batch")?;
            if let Some((index, &got)) = lens.iter().enumerate().find(|&(_, &len)| len > kv_len) {
                let (bound, of) = (Bound::AtMost, "the rows of k");
                return Err(Error::Entry { argument: "lens", index, got, bound, limit: kv_len, of });
            }
        }
        let [out_batch, out_heads, out_rows, out_dim] = out;
        same("out", "batch", out_batch, batch, "q")?;
        same("out", "heads", out_heads, heads.max(kv_heads), if heads < kv_heads { of } else { "q" })?;
        same("out", "rows", out_rows, q_len, "q")?;
        same("out", "value_dim", out_dim, value_dim, "v")?;
        let normalised = self.normaliser == Normaliser::KeySum;
        Ok(Call {
            isa: exec.instruction_set(),
            q,
            k,
            v,
            log_decay,
            beta,
            lens,
            kv_heads,
            group: heads.checked_div(kv_heads).unwrap_or(1).max(1),
            kv_len,
            head_dim,
            width: value_dim + self.normaliser.columns(),
            // The scale would cancel out.
            scale: if normalised { 1.0 } else { self.scale.unwrap_or(1.0 / (head_dim as f32).sqrt()) },
            form: match self.form {
                // A chunk longer than the sequence gives the same result as one of its length, which takes less
                // scratch.
                Form::Chunked(n) => Form::Chunked(n.min(kv_len.max(1))),
                Form::Recurrent => Form::Recurrent,
            },
            reach: self.reach,
            feature_map: self.feature_map,
            normaliser: self.normaliser,
        })
    }

    fn check_state(&self, state: StateShape, shape: &Shape, of: &'static str) -> Result<(), Error> {
        let sizes = ["batch", "heads", "head_dim", "value_dim"].into_iter().zip(state.sizes);
        let expected = [(shape.batch, "q"), (shape.kv_heads, of), (shape.head_dim, "q"), (shape.value_dim, "v")];
        for ((what, got), (expected, of)) in sizes.zip(expected) {
            same("state", what, got, expected, of)?;
        }
        if state.normaliser == self.normaliser {
            return Ok(());
        }
        Err(match self.normaliser {
            Normaliser::None => Error::Needs {
                argument: "a normalised state",
                needs: "the normaliser it was made for: without it the sums of its keys would not go on",
            },
            Normaliser::KeySum => {
                Error::Needs { argument: "the normaliser", needs: "a state made by LinearState::normalised" }
            }
        })
    }

    fn check_settings(&self, decays: bool, corrects: bool) -> Result<(), Error> {
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            return Err(Error::Number { argument: "scale", got: scale, expected: "finite" });
        }
        match self.form {
            Form::Chunked(0) => return Err(Error::Empty { argument: "form", what: "length of a chunk" }),
            Form::Chunked(len) => at_most(MAX_CHUNK, "the longest possible").check("form", "length of a chunk", len)?,
            Form::Recurrent => {}
        }
        if self.reach == Reach::Whole && (decays || corrects) {
            return Err(Error::Needs {
                argument: "whole reach",
                needs: "the linear update: under the others the order of the keys counts",
            });
        }
        if self.normaliser == Normaliser::KeySum && corrects {
            return Err(Error::Needs {
                argument: "the normaliser",
                needs: "an update that adds: under a delta rule there is no sum of weights",
            });
        }
        Ok(())
    }
}

/// Returns the sizes of a call, with the number of its states as that of key/value heads, and the tensor that has that number of
/// heads.
fn shape_of([q, k, v]: [View<'_>; 3]) -> Result<(Shape, &'static str), Error> {
    let ([batch, heads, q_len, head_dim], [_, key_heads, kv_len, _]) = (q.shape(), k.shape());
    let [_, value_heads, _, value_dim] = v.shape();
    let states = key_heads.max(value_heads);
    let shared = |heads: usize| heads > 0 && states.is_multiple_of(heads);
    let equal = key_heads == value_heads && heads >= states;
    let fit = shared(key_heads) && shared(value_heads) && (shared(heads) || states > 0 && heads.is_multiple_of(states));
    if equal || !fit {
        return Ok((Inputs::new(q, k, v).shape()?, "k"));
    }
    same("k", "batch", k.shape()[0], batch, "q")?;
    same("v", "batch", v.shape()[0], batch, "q")?;
    same("k", "head_dim", k.shape()[3], head_dim, "q")?;
    same("v", "rows", v.shape()[2], kv_len, "k")?;
    for (argument, what, dim) in [("q", "head_dim", head_dim), ("v", "value_dim", value_dim)] {
        if dim == 0 {
            return Err(Error::Empty { argument, what });
        }
        LONGEST_DIM.check(argument, what, dim)?;
    }
    let of = if key_heads == states { "k" } else { "v" };
    Ok((Shape { batch, heads, kv_heads: states, q_len, kv_len, head_dim, value_dim }, of))
}

/// Broadcasts a decay or strength to the batch, states and rows of the keys; the last dimension is 1 or `dim`.
fn repeated<'a>(
    argument: &'static str,
    view: View<'a>,
    (shape, heads_of): (&Shape, &'static str),
    dim: usize,
) -> Result<View<'a>, Error> {
    let to = [shape.batch, shape.kv_heads, shape.kv_len];
    let sizes = [to[0], to[1], to[2], dim];
    let last = if dim == 1 { "last dimension" } else { "head_dim" };
    for ((what, got), expected) in ["batch", "heads", "rows", last].into_iter().zip(view.shape()).zip(sizes) {
        if got != 1 && got != expected {
            let of = if what == "heads" { heads_of } else { "k" };
            return Err(Error::Mismatch { argument, what, got, expected, of });
        }
    }
    let [.., last] = view.shape();
    view.broadcast([to[0], to[1], to[2], last]).ok_or(Error::TooLarge { what: argument, sizes })
}
