//! Visibility rules that are key ranges: causal, window and lengths give each row one or two ranges of key indices.

use core::ops::Range;

/// Alignment of query rows and keys: row `i` of a sequence is at position `p = i + offset`.
///
/// Causal masks, windows and ALiBi all use this position. Other projects have different implicit defaults (PyTorch's
/// flag is top-left; flash-attention, MLX and ONNX are bottom-right), which has broken decoding many times. Here there
/// is no default: if rows and keys differ in number and the position matters, name an alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Alignment {
    /// Row 0 is at key 0: `offset = 0`.
    TopLeft,
    /// The last row is at the last key: `offset = kv_len − q_len`, with each sequence's own lengths.
    BottomRight,
    /// Explicit `offset`: the number of keys before row 0, as in chunked prefill. May be negative.
    Offset(isize),
}

impl Alignment {
    /// Returns the offset for a sequence of these lengths.
    #[inline]
    pub fn offset(self, q_len: usize, kv_len: usize) -> isize {
        match self {
            Self::TopLeft => 0,
            // Dimensions of views are at most isize::MAX, so their difference fits.
            Self::BottomRight => (kv_len as isize).wrapping_sub(q_len as isize),
            Self::Offset(n) => n,
        }
    }
}

/// Causal rule, for keys after a row's own position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Causality {
    /// A row sees every key that the other rules allow.
    #[default]
    Full,
    /// A row at position `p` sees only keys `j ≤ p` that the other rules allow; none if `p < 0`.
    Causal,
}

/// Sliding window around the row's position `p`.
///
/// Six projects had an off-by-one error here, so each convention has its own constructor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Window {
    left: Option<usize>,
    right: Option<usize>,
    keep_first: usize,
}

impl Window {
    /// Creates a window of the keys `p − left ≤ j ≤ p + right`, both ends included; `None` is no bound (ONNX opset 25,
    /// flash-attention).
    pub const fn inclusive(left: Option<usize>, right: Option<usize>) -> Self {
        Self { left, right, keep_first: 0 }
    }

    /// Creates a window of the last `n` keys, including the row's own and none after it, as a `sliding_window` in model
    /// configurations.
    pub const fn last_tokens(n: core::num::NonZeroUsize) -> Self {
        Self { left: Some(n.get() - 1), right: Some(0), keep_first: 0 }
    }

    /// Returns this window over keys counted from `first` on.
    #[must_use]
    pub const fn counted_from(self, first: usize) -> Self {
        Self { keep_first: self.keep_first.saturating_sub(first), ..self }
    }

    /// Returns true if the sides of the window include a key `behind` positions before the row's own (after it if negative).
    /// First keys that are kept do not count: [`Self::kept_first`].
    pub fn sees(&self, behind: i128) -> bool {
        self.left.is_none_or(|n| behind <= n as i128) && self.right.is_none_or(|n| behind >= -(n as i128))
    }

    /// Numbers of keys before and after a row's own that are inside the window; `None` for no bound.
    pub fn sides(&self) -> [Option<usize>; 2] {
        [self.left, self.right]
    }

    /// Number of first keys that are always visible.
    pub fn kept_first(&self) -> usize {
        self.keep_first
    }

    /// Keeps the first `m` keys visible too, wherever the window is, but none after a causal row's position.
    #[must_use]
    pub const fn keep_first(self, m: usize) -> Self {
        Self { keep_first: m, ..self }
    }
}

/// Visibility rules that are key ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Visible {
    /// Rule for keys after the row's position.
    pub causality: Causality,
    /// Rule for keys far from the row's position.
    pub window: Option<Window>,
}

/// Keys visible to a row: `0..prefix` and `start..end`, with `prefix < start` or `prefix == 0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisibleKeys {
    /// End of the range at the front, 0 if there is none.
    pub prefix: usize,
    /// First key of the main range.
    pub start: usize,
    /// One past the last key of the main range; `start` if it is empty.
    pub end: usize,
}

impl Visible {
    /// Returns true if there is any rule: without one, every row sees every key.
    pub fn hides_keys(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the keys among `0..kv_len` that are visible to a row at `position`.
    #[inline]
    pub fn keys(&self, position: isize, kv_len: usize) -> VisibleKeys {
        self.bounds(position, kv_len).in_order()
    }

    /// Returns keys among which are all that are visible to any row at positions `first..=last`.
    pub fn keys_of_rows(&self, first: isize, last: isize, kv_len: usize) -> VisibleKeys {
        // Bounds move with the position: the first row's range starts first, the last row's ends last.
        let VisibleKeys { start, .. } = self.bounds(first, kv_len);
        VisibleKeys { start, ..self.bounds(last, kv_len) }.in_order()
    }

    /// Returns true if what a row sees is one range, with ends that move with its position.
    #[inline]
    pub(crate) fn is_one_range(&self) -> bool {
        self.window.is_none_or(|window| window.keep_first == 0)
    }

    /// Returns the keys of a block, counted from its first, that some of the rows at positions `first..=last` see, and true if
    /// every row sees all of them. Rules that give [one range](Self::is_one_range) alone: its ends move by at most one key from
    /// row to row, so the first row has the least key of all, the last row the greatest, and no key between is left out.
    #[inline]
    pub(crate) fn seen_in(
        &self,
        [first, last]: [isize; 2],
        kv_len: usize,
        block: Range<usize>,
    ) -> (Range<usize>, bool) {
        let clipped = |keys: VisibleKeys| keys.within(block.start, block.len());
        let Range { start, end } = self.key_range(first, last, kv_len);
        let seen = clipped(VisibleKeys { prefix: 0, start, end });
        let all = [first, last].iter().all(|&position| clipped(self.keys(position, kv_len)) == seen);
        (seen.start..seen.end, all)
    }

    /// Returns a range that holds every key visible to any row at positions `first..=last`.
    pub fn key_range(&self, first: isize, last: isize, kv_len: usize) -> Range<usize> {
        let (start, end) = self.keys_of_rows(first, last, kv_len).key_range();
        start..end
    }

    /// Returns true if every row at positions `first..=last` sees all of these keys.
    pub(crate) fn shows_all(&self, first: isize, last: isize, kv_len: usize, keys: Range<usize>) -> bool {
        // Both ends of what a row sees move with its position, so rows between see what the first and the last do.
        let shows = |position| {
            let VisibleKeys { prefix, start, end } = self.keys(position, kv_len).within(keys.start, keys.len());
            prefix == keys.len() || (start, end) == (0, keys.len())
        };
        shows(first) && shows(last)
    }

    /// Returns the two ranges as the rules give them: they may overlap, and `start` may exceed `end`.
    #[inline]
    fn bounds(&self, position: isize, kv_len: usize) -> VisibleKeys {
        // Returns one past the last key that a bound `right` keys after the position allows, within 0..=kv_len.
        let end_at = |right: usize| {
            let last = position.saturating_add_unsigned(right);
            if last < 0 { 0 } else { kv_len.min((last as usize).saturating_add(1)) }
        };
        let causal_end = match self.causality {
            Causality::Full => kv_len,
            Causality::Causal => end_at(0),
        };
        let Some(Window { left, right, keep_first }) = self.window else {
            return VisibleKeys { prefix: 0, start: 0, end: causal_end };
        };
        let start = left.map_or(0, |n| position.saturating_sub_unsigned(n).max(0) as usize);
        let end = right.map_or(kv_len, end_at).min(causal_end);
        VisibleKeys { prefix: keep_first.min(causal_end), start, end }
    }
}

/// Returns the least and the greatest of some positions.
pub(crate) fn least_and_most(positions: &[i32]) -> [i32; 2] {
    positions.iter().fold([i32::MAX, i32::MIN], |[least, most], &at| [least.min(at), most.max(at)])
}

/// Positions of keys that rows see by the range rules: up to `last`, those of `from..=to` and the `first` ones from 0 on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VisiblePositions {
    last: isize,
    from: isize,
    to: isize,
    first: usize,
}

impl VisiblePositions {
    /// Returns true if keys at a position are visible.
    #[inline(always)]
    pub(crate) fn has(self, key: i32) -> bool {
        let key = key as isize;
        (key <= self.last) & ((self.from <= key) & (key <= self.to) | (key >= 0) & ((key as usize) < self.first))
    }

    /// Returns false only if no position of a range is visible.
    pub(crate) fn may_have(self, [low, high]: [i32; 2]) -> bool {
        let (low, high) = (low as isize, high as isize);
        low <= self.last && (low <= self.to && self.from <= high || high >= 0 && (low.max(0) as usize) < self.first)
    }

    /// Returns true only if all positions of a range are visible.
    pub(crate) fn has_all(self, [low, high]: [i32; 2]) -> bool {
        let (low, high) = (low as isize, high as isize);
        high <= self.last && (self.from <= low && high <= self.to || low >= 0 && (high as usize) < self.first)
    }
}

impl Visible {
    /// Returns the positions that some row at positions `first..=last` may see, and those that every such row sees.
    pub(crate) fn positions(&self, first: isize, last: isize) -> [VisiblePositions; 2] {
        let of = |low: isize, high: isize| {
            let [left, right] = self.window.map_or([None, None], |window| window.sides());
            VisiblePositions {
                last: if self.causality == Causality::Causal { high } else { isize::MAX },
                from: left.map_or(isize::MIN, |left| low.saturating_sub_unsigned(left)),
                to: right.map_or(isize::MAX, |right| high.saturating_add_unsigned(right)),
                first: self.window.map_or(0, |window| window.keep_first),
            }
        };
        [of(first, last), of(last, first)]
    }
}

impl VisibleKeys {
    /// Returns these keys in two ranges one after the other, or in one: here they may overlap, and `start` may exceed `end`.
    #[inline]
    fn in_order(self) -> Self {
        let Self { prefix, start, end } = self;
        if start >= end {
            Self { prefix: 0, start: 0, end: prefix }
        } else if prefix >= start {
            Self { prefix: 0, start: 0, end: end.max(prefix) }
        } else {
            self
        }
    }

    /// Number of keys.
    #[inline]
    pub fn count(self) -> usize {
        self.prefix + self.end.saturating_sub(self.start)
    }

    /// Returns the parts of the main range and of the prefix that lie in the block `first .. first + len`, counted
    /// from `first`.
    #[inline]
    pub(crate) fn within(self, first: usize, len: usize) -> Self {
        let clip = |key: usize| key.saturating_sub(first).min(len);
        Self { prefix: clip(self.prefix), start: clip(self.start), end: clip(self.end) }
    }

    /// Returns the smallest range that holds every visible key; `start == end` if there is none.
    #[inline]
    pub(crate) fn key_range(self) -> (usize, usize) {
        let start = if self.prefix > 0 { 0 } else { self.start };
        let end = if self.start < self.end { self.end } else { self.prefix };
        (start, end.max(start))
    }
}

#[cfg(test)]
mod tests;
