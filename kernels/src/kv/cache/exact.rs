//! First tokens of a sequence, kept exact beside their integers: softmax puts much weight on them (attention sinks: Xiao, Tian, Chen,
//! Han and Lewis 2023, arXiv:2309.17453), so their errors are everybody's.
//!
//! A sequence, or the first page of one, has for each head its exact keys, then its exact values, each a row of floats in whole
//! vectors. Keys are in the basis of their channels, values in that of the stored values, which outputs are brought back from. Only
//! what is stored as integers has exact rows.

use super::layout::{Format, Sizes};
use super::token_part::TokenPart;
use crate::simd::LANES;
use crate::simd::aligned::AlignedBuf;
use crate::simd::portable::Portable;
use core::ops::Range;

/// Exact keys and values of a head, of the first tokens of a sequence. Rows have whole vectors, with zeros behind their elements.
#[derive(Clone, Copy)]
pub(crate) struct ExactRows<'a> {
    /// Number of tokens.
    pub(crate) tokens: usize,
    /// Keys, if they are stored as integers.
    pub(crate) keys: Option<&'a [f32]>,
    /// Values, if they are stored as integers.
    pub(crate) values: Option<&'a [f32]>,
}

impl Sizes {
    /// Returns the number of floats of an exact key, and of an exact value; 0 for what is stored as floats.
    fn exact_widths(self) -> [usize; 2] {
        [(self.keys, self.head_dim), (self.values, self.value_dim)].map(|(format, dim)| match format {
            Format::Elements(_) | Format::E4m3 => 0,
            _ => dim.next_multiple_of(LANES),
        })
    }

    /// Returns the number of floats of the exact rows of all heads.
    pub(super) fn exact_floats(self) -> usize {
        self.kv_heads * self.exact * self.exact_widths().iter().sum::<usize>()
    }

    /// Returns the place of a row of a head among the exact rows.
    pub(super) fn exact_row(self, part: TokenPart, [head, token]: [usize; 2]) -> Range<usize> {
        let [key, value] = self.exact_widths();
        let head = head * self.exact * (key + value);
        let (first, width) = if part.is_of_key() { (head, key) } else { (head + self.exact * key, value) };
        // Without exact tokens, no row has a float.
        if token < self.exact { first + token * width..first + (token + 1) * width } else { first..first }
    }

    /// Returns the first `tokens` exact rows of a head, if it has any.
    pub(super) fn exact_rows(self, rows: &[f32], head: usize, tokens: usize) -> Option<ExactRows<'_>> {
        let tokens = tokens.min(self.exact);
        let [keys, values] = [(0, TokenPart::ExactKey), (1, TokenPart::ExactValue)].map(|(n, part)| {
            let width = self.exact_widths()[n];
            (width > 0 && tokens > 0).then(|| &rows[self.exact_row(part, [head, 0]).start..][..tokens * width])
        });
        (tokens > 0).then_some(ExactRows { tokens, keys, values })
    }

    /// Iterates over the heads, each with its keys and its values, as far as they are exact.
    pub(super) fn exact_parts(self) -> impl Iterator<Item = (usize, TokenPart)> {
        let parts = [TokenPart::ExactKey, TokenPart::ExactValue];
        let all = (0..self.kv_heads).flat_map(move |head| parts.map(|part| (head, part)));
        all.filter(move |&(head, part)| !self.exact_row(part, [head, 0]).is_empty())
    }

    /// Takes a row from the channels to the basis of exact rows, or back.
    pub(super) fn rebase_exact(self, part: TokenPart, mut row: Vec<f32>) -> Vec<f32> {
        if !part.is_of_key() {
            self.value_basis.transform(Portable, &mut row);
        }
        row
    }

    /// Writes an exact row, which is in the basis of the channels.
    pub(super) fn set_exact(self, rows: &mut [f32], part: TokenPart, at: [usize; 2], row: Vec<f32>) {
        let row = self.rebase_exact(part, row);
        rows[self.exact_row(part, at)][..row.len()].copy_from_slice(&row);
    }

    /// Copies the exact rows of a token over those of another.
    pub(super) fn copy_exact(self, rows: &mut [f32], [to, from]: [usize; 2]) {
        for (head, part) in self.exact_parts() {
            rows.copy_within(self.exact_row(part, [head, from]), self.exact_row(part, [head, to]).start);
        }
    }

    /// Returns some elements of a head's exact key or value `token`, in the basis of the channels. `None` if that is not exact, or
    /// has no such elements.
    pub(super) fn exact_elements(
        self,
        part: TokenPart,
        rows: ExactRows<'_>,
        token: usize,
        of: Range<usize>,
    ) -> Option<Vec<f32>> {
        let ((dim, _), all) = (self.row_form(part), if part.is_of_key() { rows.keys? } else { rows.values? });
        let row = &all.chunks_exact(all.len() / rows.tokens).nth(token)?[..dim];
        self.rebase_exact(part, row.to_vec()).get(of).map(<[f32]>::to_vec)
    }
}

/// Exact rows of a page that a sequence begins with.
#[derive(Debug)]
pub(super) struct ExactPage {
    pub(super) rows: AlignedBuf,
    /// Number of the page's first tokens that were written as the first of a sequence.
    pub(super) tokens: usize,
}
