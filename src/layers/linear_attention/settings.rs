//! The settings of linear attention: rules, forms, reach, feature maps, normalisers.

use sdpa_kernels::View;

/// How a token changes the state.
///
/// Logarithms of decays are `[batch, kv_heads, len, head_dim]`, strengths `[batch, kv_heads, len, 1]`; any dimension may
/// be 1 and then counts for all. They are natural logarithms: 0 keeps everything, −∞ forgets everything, positive ones
/// let the state grow. Delta rules want keys of length about 1, and a β of 1 then replaces what a key held; neither is
/// checked, a state that grows does so until it overflows.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub enum Update<'a> {
    /// Adds.
    #[default]
    Linear,
    /// Forgets, then adds.
    Gated {
        /// Natural logarithms of what is kept of each row of the state.
        log_decay: View<'a>,
    },
    /// Replaces what the key held.
    Delta {
        /// How much of it.
        beta: View<'a>,
    },
    /// Forgets, then replaces what the key still held.
    GatedDelta {
        /// Natural logarithms of what is kept of each row of the state.
        log_decay: View<'a>,
        /// How much is replaced.
        beta: View<'a>,
    },
}

impl<'a> Update<'a> {
    pub(super) fn log_decay(&self) -> Option<View<'a>> {
        match *self {
            Self::Gated { log_decay } | Self::GatedDelta { log_decay, .. } => Some(log_decay),
            Self::Linear | Self::Delta { .. } => None,
        }
    }

    pub(super) fn beta(&self) -> Option<View<'a>> {
        match *self {
            Self::Delta { beta } | Self::GatedDelta { beta, .. } => Some(beta),
            Self::Linear | Self::Gated { .. } => None,
        }
    }
}

/// In what order the sums are taken. No more than rounding depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Form {
    /// Token by token: for decoding, and wherever pieces of a sequence must give the bits of the whole.
    #[default]
    Recurrent,
    /// So many tokens at a time, 1 to 1024. The state is written once a chunk and read once in four tokens, which pays where
    /// it outgrows the first-level cache, from dimensions of 128 on (`cargo bench --bench linear_attention`; 16 is best
    /// there). Pieces give the bits of the whole if they end where chunks do.
    Chunked(usize),
}

/// What a row sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Reach {
    /// The state as it came in, and the keys up to the row's own.
    #[default]
    Causal,
    /// The state as it came in, and all keys of the call, whose number may differ from that of the rows. For
    /// [`Update::Linear`] only: under the other rules what is left of a key depends on those after it, so that a sum over
    /// all keys would favour the last ones.
    Whole,
}

/// What is done to each element of queries and keys first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum FeatureMap {
    /// Nothing.
    #[default]
    Identity,
    /// elu(x) + 1: x + 1 above 0, eˣ elsewhere (Katharopoulos et al. 2020, eq. 7).
    EluPlusOne,
}

/// What a row's sum is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Normaliser {
    /// Nothing: it is multiplied by the scale.
    #[default]
    None,
    /// The sum of its weights, qᵀ Σ k, decayed as the values are (Katharopoulos et al. 2020, eq. 5); the scale cancels
    /// out. A row whose sum is 0 gives 0. For [`Update::Linear`] and [`Update::Gated`]; the state must be one made by
    /// [`LinearState::normalised`](super::LinearState::normalised).
    KeySum,
}
