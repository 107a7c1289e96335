//! Operands of sums of products in a register tile.

/// Rows of a tile: term `i` of row `r` lies at `at[r] + i · step`.
#[derive(Clone, Copy)]
pub(crate) struct TermRows<const MR: usize> {
    pub(crate) at: [*const f32; MR],
    /// Floats from one term to the next.
    pub(crate) step: usize,
}

impl<const MR: usize> TermRows<MR> {
    /// Makes rows `apart` floats apart. The addresses wrap: only those of the tile may be used.
    #[inline(always)]
    pub(crate) fn strided(first: *const f32, apart: usize, step: usize) -> Self {
        let mut at = [first; MR];
        for r in 0..MR {
            at[r] = first.wrapping_add(r * apart);
        }
        Self { at, step }
    }
}

/// Columns of a tile: vector `n` of term `i` lies at `first + i · step + n · apart`.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) first: *const f32,
    /// Floats from one term to the next.
    pub(crate) step: isize,
    /// Floats from one vector to the next.
    pub(crate) apart: usize,
}

impl Columns {
    /// Returns the columns from term `i` on. The address wraps: only those of the tile may be used.
    #[inline(always)]
    pub(crate) fn from(self, i: usize) -> Self {
        Self { first: self.first.wrapping_offset(i as isize * self.step), ..self }
    }

    /// Returns the columns from the next term on.
    #[inline(always)]
    pub(crate) fn next(self) -> Self {
        Self { first: self.first.wrapping_offset(self.step), ..self }
    }
}
