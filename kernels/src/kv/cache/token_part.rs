//! Parts of a stored token.

/// Part of a stored token in one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenPart {
    /// Elements of the key. In an int4 cache the bytes that hold them: byte `i` of a block of 32 has elements `i` and
    /// `16 + i`.
    Key,
    /// Scale of the key, an `f32`, in an int8 cache with scales of keys. In an int4 cache the `f16` numbers of the
    /// key's blocks: a scale each, and a centre if the cache has centres.
    KeyScale,
    /// Elements of the value; none in a latent cache, where they are part of the key, and scaled with it.
    Value,
    /// Scale of the value, an `f32`, in an int8 cache. In an int4 cache as for keys.
    ValueScale,
    /// Elements of the key as `f32`, of a first token that is exact.
    ExactKey,
    /// Elements of the value as `f32`, of a first token that is exact, in the basis of the values.
    ExactValue,
}

impl TokenPart {
    /// All parts.
    pub const ALL: [Self; 6] =
        [Self::Key, Self::KeyScale, Self::Value, Self::ValueScale, Self::ExactKey, Self::ExactValue];
    /// Parts that lie in blocks.
    pub(super) const IN_BLOCKS: [Self; 4] = [Self::Key, Self::KeyScale, Self::Value, Self::ValueScale];

    /// Returns true if it is a part of the key.
    pub fn is_of_key(self) -> bool {
        matches!(self, Self::Key | Self::KeyScale | Self::ExactKey)
    }

    /// Returns true if only the first tokens of a sequence have it.
    pub fn is_exact(self) -> bool {
        matches!(self, Self::ExactKey | Self::ExactValue)
    }
}
