//! Checks that the tensors and lists that a call reads fit together, for errors and for unsafe code. (`sdpa` also
//! checks tokens, in `src/cache/token_form.rs`, and parts of a call, in `src/inputs/parts.rs`, `src/parts/` and
//! `src/state/parted_call.rs`.)

use crate::attention::call::options::{Cover, Covered, Options, Ragged};
use crate::attention::call::{Call, Sequence};
use crate::kv::source::values_fit;
use crate::tensor::misfit::{Bound, Fault, Misfit, cumulative, same};
use crate::tensor::rows::MAX_DIM;

/// Checks that queries, keys and values that are tensors fit together; arguments are their shapes.
pub fn tensors_fit(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<(), Misfit> {
    same("k", "batch", k[0], q[0], "q")?;
    same("v", "batch", v[0], q[0], "q")?;
    same("k", "head_dim", k[3], q[3], "q")?;
    values_fit(k, v)
}

impl Call<'_> {
    /// Checks that queries, keys, values and sequences fit together. The other checks rely on it.
    pub fn inputs_fit(&self) -> Result<(), Misfit> {
        let (q, [k_name, v_name], [head_dim, value_dim]) = (self.q.shape(), self.kv.names(), self.kv.dims());
        if let Some([k, v]) = self.kv.tensors() {
            tensors_fit(q, k.shape(), v.shape())?;
        }
        same(k_name, "head_dim", head_dim, q[3], "q")?;
        let dims = [("q", "head_dim", q[3]), (v_name, "value_dim", value_dim)];
        if let Some((argument, what, _)) = dims.into_iter().find(|&(.., got)| got == 0) {
            return Fault::Empty(what).of(argument);
        }
        if let Some((argument, what, got)) = dims.into_iter().find(|&(.., got)| got > MAX_DIM) {
            return Fault::Long { what, got }.of(argument);
        }
        let (q_heads, kv_heads) = (q[1], self.kv.kv_heads());
        if !q_heads.is_multiple_of(kv_heads) {
            return Fault::Heads { q_heads, kv_heads, of: k_name }.of("q");
        }
        let out = [q[0], q[1], q[2], value_dim];
        if out.iter().try_fold(1usize, |n, &size| n.checked_mul(size)).is_none_or(|n| n > isize::MAX as usize) {
            return Fault::TooLarge(out).of("out");
        }
        self.sequences_fit()
    }

    fn sequences_fit(&self) -> Result<(), Misfit> {
        let ([batch, _, rows, _], all) = (self.q.shape(), self.kv.sequences());
        self.suits_source()?;
        if let Some(Ragged { q, k }) = self.options.ragged {
            same("q", "batch", batch, 1, "a ragged call")?;
            cumulative(if k.is_some() { "ragged q" } else { "ragged queries" }, q, rows)?;
            if let Some(k) = k {
                let sequences = cumulative("ragged k", k, self.kv.k_shape()[2])?;
                return same("ragged k", "number of sequences", sequences, self.sequence_count(), "ragged q");
            }
        }
        let of = if self.options.ragged.is_some() { "ragged queries" } else { "q (batch)" };
        let Some(sources) = self.options.sources else {
            return same(self.kv.names()[0], "number of sequences", all, self.sequence_count(), of);
        };
        same("sequences", "length", sources.len(), self.sequence_count(), of)?;
        match sources.iter().find(|&&source| source >= all) {
            Some(&got) => Fault::Sequence { got, sequences: all }.of("sequences"),
            None => Ok(()),
        }
    }

    /// Refuses ways to name sequences, or to give their lengths, that the source of the keys does not have.
    fn suits_source(&self) -> Result<(), Misfit> {
        let Options { kv_lens, sources, ragged, .. } = self.options;
        let cumulative_keys = ragged.map(|ragged| ragged.k.is_some());
        let (refused, needs) = match self.kv.tensors() {
            Some(_) => (
                [("sequences", sources.is_some()), ("ragged queries", cumulative_keys == Some(false))],
                "a cache or pages; tensors laid end to end take `ragged`",
            ),
            None => (
                [("kv_lens", kv_lens.is_some()), ("ragged", cumulative_keys == Some(true))],
                "tensors; caches and pages have their own lengths",
            ),
        };
        refused.into_iter().find(|&(_, given)| given).map_or(Ok(()), |(argument, _)| Fault::Needs(needs).of(argument))
    }

    /// Checks that each query head has its ALiBi slope and sink, if these are given.
    pub fn head_options_fit(&self) -> Result<(), Misfit> {
        let (Options { alibi, sinks, .. }, heads) = (self.options, self.q.shape()[1]);
        let given = [("alibi slopes", alibi), ("sinks", sinks)];
        let mut given = given.into_iter().filter_map(|(argument, values)| Some((argument, values?.len())));
        given.try_for_each(|(argument, got)| same(argument, "length", got, heads, "q (heads)"))
    }

    /// Checks that the sequences have the keys that their lengths say.
    pub fn kv_lens_fit(&self) -> Result<(), Misfit> {
        let Some(lens) = self.options.kv_lens else { return Ok(()) };
        same("kv_lens", "length", lens.len(), self.sequence_count(), "the batch")?;
        for (index, &got) in lens.iter().enumerate() {
            let limit = self.keys_of(index).len();
            if got > limit {
                let (bound, of) = (Bound::AtMost, "the keys of that sequence");
                return Fault::Entry { index, got, bound, limit, of }.of("kv_lens");
            }
        }
        Ok(())
    }

    /// Checks that every row and key of each sequence has a position, if positions of rows or keys are given. Beside lengths
    /// the list of a sequence may also have one for each row of k.
    pub fn positions_fit(&self) -> Result<(), Misfit> {
        let Options { row_positions, key_positions, .. } = self.options;
        for (argument, positions) in [("row positions", row_positions), ("key positions", key_positions)] {
            let Some(positions) = positions else { continue };
            same(argument, "number of sequences", positions.len(), self.sequence_count(), "the call")?;
            for (index, positions) in positions.iter().enumerate() {
                let Sequence { q_len, kv_len, .. } = self.sequence(index);
                let padded = argument == "key positions" && self.options.kv_lens.is_some();
                if padded && positions.len() == self.keys_of(index).len() {
                    continue;
                }
                let (expected, of) = match argument {
                    "row positions" => (q_len, "the rows of that sequence"),
                    _ => (kv_len, "the keys of that sequence"),
                };
                same(argument, "length", positions.len(), expected, of)?;
            }
        }
        Ok(())
    }

    /// Checks that selected keys are those of the call's sequences, heads and rows. What reads listed keys relies on it.
    pub fn selected_fit(&self) -> Result<(), Misfit> {
        let Some(selected) = self.options.selected else { return Ok(()) };
        let (argument, heads) = ("selected keys", [1, self.kv.kv_heads(), self.q.shape()[1]]);
        same(argument, "number of sequences", selected.sequences(), self.sequence_count(), "the call")?;
        if !heads.contains(&selected.heads()) {
            let of = "q (a list is for all heads, a key/value head or a query head)";
            return same(argument, "heads", selected.heads(), heads[2], of);
        }
        for (index, &got) in selected.q_lens().iter().enumerate() {
            let Sequence { q_len, kv_len, .. } = self.sequence(index);
            same(argument, "rows of a sequence", got, q_len, "q")?;
            selected.ends_within(index, kv_len)?;
        }
        Ok(())
    }

    /// Returns the call with bias and mask repeated to all sequences, heads and rows, if they fit; not along the batch if it is
    /// the period, nor along heads if these are key/value heads.
    pub fn broadcast(mut self) -> Result<Self, Misfit> {
        if let Some(Covered { of, cover }) = self.options.bias {
            let to = self.broadcast_shape("bias", of.shape(), cover)?;
            let of = of.broadcast(to).map_or_else(|| Fault::TooLarge(to).of("bias"), Ok)?;
            self.options.bias = Some(Covered { of, cover });
        }
        if let Some(Covered { of, cover }) = self.options.mask {
            let to = self.broadcast_shape("mask", of.view().shape(), cover)?;
            let view = of.view().broadcast(to).map_or_else(|| Fault::TooLarge(to).of("mask"), Ok)?;
            self.options.mask = Some(Covered { of: of.with_view(view), cover });
        }
        Ok(self)
    }

    /// Returns the shape that a bias or mask is repeated to.
    fn broadcast_shape(&self, argument: &'static str, given: [usize; 4], cover: Cover) -> Result<[usize; 4], Misfit> {
        let (rows, keys) = self.longest();
        let columns = if cover == Cover::AllKeys { keys } else { given[3].min(keys) };
        let period = self.options.period.filter(|&period| period > 0 && given[0] == period);
        let heads = Some(self.kv.kv_heads()).filter(|&heads| given[1] == heads && given[1] != 1);
        let to = [period.unwrap_or(self.sequence_count()), heads.unwrap_or(self.q.shape()[1]), rows, columns];
        for ((what, got), expected) in ["batch", "heads", "rows", "columns"].into_iter().zip(given).zip(to) {
            let repeats = got == 1 && (what != "columns" || cover == Cover::AllKeys);
            if !repeats {
                let of = if what == "columns" { self.columns_of() } else { "the call" };
                same(argument, what, got, expected, of)?;
            }
        }
        Ok(to)
    }

    /// Name of the keys in messages, as columns of masks, biases and scores.
    pub(crate) fn columns_of(&self) -> &'static str {
        match self.kv.names()[0] {
            "k" if self.options.ragged.is_some() => "k (keys of the longest sequence)",
            "k" => "k (rows)",
            "pages" => "pages (keys of the longest sequence)",
            _ => "cache (keys of the longest sequence)",
        }
    }
}
