//! First tokens of a sequence, kept exact beside their integers: softmax puts much weight on them (attention sinks: Xiao, Tian, Chen,
//! Han and Lewis 2023, arXiv:2309.17453), so their errors are everybody's.
//!
//! A sequence, or the first page of one, has for each head its exact keys, then its exact values, each a row of floats in whole
//! vectors. Keys are in the basis of their channels, values in that of the stored values, which outputs are brought back from. Only
//! what is stored as integers has exact rows.

use super::layout::{Format, Sizes};
use super::store::Store;
use super::tokens::TokenPart;
use crate::matmul::hadamard::Basis;
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

    /// Copies the exact rows of a token over those of another.
    pub(super) fn copy_exact(self, rows: &mut [f32], [to, from]: [usize; 2]) {
        let parts = [TokenPart::Key, TokenPart::Value];
        for (head, part) in (0..self.kv_heads).flat_map(|head| parts.map(|part| (head, part))) {
            rows.copy_within(self.exact_row(part, [head, from]), self.exact_row(part, [head, to]).start);
        }
    }
}

impl Store {
    /// Makes exact rows of a token of the elements that are stored for it: `stored` returns those of a head's key or value, in the
    /// basis of their channels.
    pub(super) fn fill_exact(&self, rows: &mut [f32], token: usize, stored: impl Fn(TokenPart, usize) -> Vec<f32>) {
        let sizes = self.sizes;
        for head in 0..sizes.kv_heads {
            for (part, basis) in [(TokenPart::Key, Basis::Channels), (TokenPart::Value, sizes.value_basis)] {
                let place = sizes.exact_row(part, [head, token]);
                if !place.is_empty() {
                    let mut row = stored(part, head);
                    basis.transform(Portable, &mut row);
                    rows[place][..row.len()].copy_from_slice(&row);
                }
            }
        }
    }

    /// Returns some elements of a head's exact key or value `token`, in the basis of the channels. `None` if that is not exact, or has
    /// no such elements.
    pub(super) fn exact_elements(
        &self,
        part: TokenPart,
        rows: ExactRows<'_>,
        token: usize,
        of: Range<usize>,
    ) -> Option<Vec<f32>> {
        let Sizes { head_dim, value_dim, value_basis, .. } = self.sizes;
        let (dim, basis, rows, tokens) = match part {
            TokenPart::Key => (head_dim, Basis::Channels, rows.keys?, rows.tokens),
            _ => (value_dim, value_basis, rows.values?, rows.tokens),
        };
        let mut row = rows.chunks_exact(rows.len() / tokens).nth(token)?[..dim].to_vec();
        basis.transform(Portable, &mut row);
        row.get(of).map(<[f32]>::to_vec)
    }
}

/// Exact rows of a page that a sequence begins with.
#[derive(Debug)]
pub(super) struct ExactPage {
    pub(super) rows: AlignedBuf,
    /// Number of the page's first tokens that were written as the first of a sequence.
    pub(super) tokens: usize,
}
