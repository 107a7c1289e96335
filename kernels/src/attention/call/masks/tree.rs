//! Trees of drafted tokens.

use crate::attention::call::masks::PrefixLm;
use crate::attention::call::mods::{BlockClass, BlockPosition, CallFacts, MaskError, MaskMod, Position};

/// Mask of a tree of drafted tokens, for speculative decoding: a drafted token sees the committed keys, its ancestors and
/// itself (SpecInfer, arXiv:2305.09781).
///
/// Drafted token `t` has the key `committed + t`, and its row stands at that position ([`Position::position`]: name the
/// call's alignment, [`Alignment::BottomRight`](crate::Alignment::BottomRight) if the drafted tokens are the last
/// keys). Earlier rows are causal; a call with rows behind the draft is refused: they would not see their own keys. All
/// sequences of a batch have the same tree; [`PerSequence`](crate::PerSequence) gives each its own, or none. Whatever the
/// tree, memory is 24 bytes a token, and a pair takes constant time.
///
/// On its path a token is at `committed` + its depth, but its row stands at the position of its key, often further on.
/// So a call with a tree and a window or ALiBi must give positions of its rows and keys: for drafted tokens [`Tree::positions`],
/// for committed keys by default their indices. Without them it is refused. Keys and queries that are rotated by position must be
/// rotated for these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    committed: usize,
    tokens: Vec<Token>,
}

/// Drafted token, by its index in depth-first order: its descendants follow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Token {
    place: usize,
    /// Number of its descendants and itself.
    size: usize,
    /// Number of its ancestors.
    depth: usize,
}

impl Tree {
    /// Creates the mask of a draft after `committed` keys: `parents[t]` is the index in the draft of the parent of
    /// token `t`, or `None` if it follows the last committed key.
    ///
    /// # Errors
    /// [`MaskError::Parent`] if a parent does not precede its token.
    pub fn new(committed: usize, parents: &[Option<usize>]) -> Result<Self, MaskError> {
        for (token, parent) in parents.iter().enumerate() {
            if let Some(parent) = *parent
                && parent >= token
            {
                return Err(MaskError::Parent { token, parent });
            }
        }
        let mut tokens = vec![Token { place: 0, size: 1, depth: 0 }; parents.len()];
        for (token, parent) in parents.iter().enumerate().rev() {
            if let Some(parent) = *parent {
                tokens[parent].size += tokens[token].size;
            }
        }
        // Places that the next child of each token takes, and the next token without a parent.
        let (mut next, mut next_root) = (vec![0; parents.len()], 0);
        for (token, parent) in parents.iter().enumerate() {
            let place = parent.map_or(&mut next_root, |parent| &mut next[parent]);
            tokens[token].place = *place;
            tokens[token].depth = parent.map_or(0, |parent| tokens[parent].depth + 1);
            *place += tokens[token].size;
            next[token] = tokens[token].place + 1;
        }
        Ok(Self { committed, tokens })
    }

    /// Returns the positions of the drafted tokens on their paths, `committed` + depth, for `Inputs::row_positions` and the
    /// last of `Inputs::key_positions`; `i32::MAX` where they are beyond it.
    pub fn positions(&self) -> Vec<i32> {
        let position = |token: &Token| i32::try_from(self.committed.saturating_add(token.depth)).unwrap_or(i32::MAX);
        self.tokens.iter().map(position).collect()
    }

    /// Returns true if a drafted token is another's ancestor, or the same.
    #[inline(always)]
    fn is_ancestor(&self, key: usize, row: usize) -> bool {
        let (Some(key), Some(row)) = (self.tokens.get(key), self.tokens.get(row)) else { return false };
        row.place.wrapping_sub(key.place) < key.size
    }
}

impl MaskMod for Tree {
    #[inline(always)]
    fn keep(&self, at: Position) -> bool {
        match at.key.checked_sub(self.committed) {
            None => PrefixLm::new(0).keep(at),
            Some(key) => usize::try_from(at.position)
                .ok()
                .and_then(|position| position.checked_sub(self.committed))
                .is_some_and(|row| self.is_ancestor(key, row)),
        }
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        // Rows before the draft are causal.
        let before = !usize::try_from(*block.positions().end()).is_ok_and(|last| last >= self.committed);
        if block.keys.end <= self.committed || before {
            return PrefixLm::new(0).class(block);
        }
        block.pairs().map(|at| self.keep(at)).collect()
    }

    fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
        call.distance.map_or(Ok(()), |option| Err(MaskError::Distance { option }))
    }

    fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
        let (position, end) = (*rows.positions().end(), self.committed.saturating_add(self.tokens.len()));
        let behind = usize::try_from(position).is_ok_and(|position| position >= end);
        if behind { Err(MaskError::Behind { sequence: rows.batch, position, end }) } else { Ok(()) }
    }
}
