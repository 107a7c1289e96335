//! Levels of the cache, as values and as constant parameters.

/// Cache level that a line is prefetched into.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    First,
    Second,
}

/// Constant parameters that stand for a [`Level`], or none.
pub(crate) const NO_LEVEL: u8 = 0;
pub(crate) const FIRST: u8 = 1;
pub(crate) const SECOND: u8 = 2;
/// [`SECOND`], in some calls.
pub(crate) const SECOND_OR_NONE: u8 = 3;

impl Level {
    /// Returns the level that a constant parameter stands for.
    pub(crate) const fn of(level: u8) -> Self {
        if level == FIRST { Self::First } else { Self::Second }
    }
}
