//! Settings of linear attention: rules, forms, reach, feature maps, normalisers.

use sdpa::View;

/// Update rule of the state.
///
/// Logarithms of decays are `[batch, kv_heads, len, head_dim]`, strengths `[batch, kv_heads, len, 1]`; any dimension
/// may be 1 and is then broadcast. Logarithms are natural: 0 keeps everything, −∞ forgets everything, positive ones let
/// the state grow and perhaps overflow. Delta rules expect keys of length about 1: then a β of 1 replaces the value of
/// a key. Neither is checked.
///
/// ```
/// use sdpa_layers::{Compute, LinearAttention, LinearInputs, LinearState, Update};
/// use sdpa::{View, ViewMut};
/// // Two tokens with the same key, of length 1: the second replaces the value of the first.
/// let (k, v, beta) = ([1.0, 1.0], [3.0, 5.0], [1.0]);
/// let (k, v) = (View::bhld(&k, [1, 1, 2, 1])?, View::bhld(&v, [1, 1, 2, 1])?);
/// let update = Update::Delta { beta: View::bhld(&beta, [1, 1, 1, 1])? };
/// let (mut state, mut out) = (LinearState::new([1, 1, 1, 1])?, [0.0; 2]);
/// let out_view = ViewMut::bhld(&mut out, [1, 1, 2, 1])?;
/// LinearAttention::new().forward(LinearInputs::new(k, k, v, update), &mut state, out_view, &mut Compute::default())?;
/// assert_eq!(out, [3.0, 5.0]); // `Update::Linear` would give 3 and 8
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub enum Update<'a> {
    /// Adds the token.
    #[default]
    Linear,
    /// Decays the state, then adds the token.
    Gated {
        /// Natural logarithms of the factor kept of each row of the state.
        log_decay: View<'a>,
    },
    /// Replaces the value of the key.
    Delta {
        /// Fraction that is replaced.
        beta: View<'a>,
    },
    /// Decays the state, then replaces the value of the key.
    GatedDelta {
        /// Natural logarithms of the factor kept of each row of the state.
        log_decay: View<'a>,
        /// Fraction that is replaced.
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

/// Order in which the sums are taken. Results of the forms differ only by rounding.
///
/// ```
/// use sdpa_layers::{Form, LinearAttention};
/// let prompt = LinearAttention::new().form(Form::Chunked(16));
/// assert_eq!(LinearAttention::new().form(Form::Recurrent), LinearAttention::new());
/// # let _ = prompt;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Form {
    /// Token by token: for decoding, and wherever parts of a sequence must give the bits of the whole.
    #[default]
    Recurrent,
    /// Chunks of this many tokens, 1 to 1024. The state is written once per chunk and read once in four tokens. This
    /// pays if the state outgrows the first-level cache, from dimensions of 128 on (`cargo bench -p sdpa-layers --bench
    /// linear_attention`; 16 is best there). Parts of a sequence give the bits of the whole if they end where chunks
    /// do.
    Chunked(usize),
}

/// Keys that a row sees.
///
/// ```
/// use sdpa_layers::{LinearAttention, Reach};
/// let encoder = LinearAttention::new().reach(Reach::Whole);
/// assert_eq!(LinearAttention::new().reach(Reach::Causal), LinearAttention::new());
/// # let _ = encoder;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Reach {
    /// The initial state, and the keys up to the row's own.
    #[default]
    Causal,
    /// The initial state, and all keys of the call; rows and keys may differ in number. For [`Update::Linear`] only:
    /// under the other rules, later keys decide what remains of a key, so a sum over all keys would favour the last
    /// ones.
    Whole,
}

/// Function applied to each element of queries and keys first.
///
/// ```
/// use sdpa_layers::{FeatureMap, LinearAttention, Normaliser};
/// // As in "Transformers are RNNs": weights are positive and divided by their sum.
/// let attention = LinearAttention::new().feature_map(FeatureMap::EluPlusOne).normaliser(Normaliser::KeySum);
/// # let _ = attention;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum FeatureMap {
    /// Identity.
    #[default]
    Identity,
    /// elu(x) + 1: x + 1 above 0, eˣ elsewhere (Katharopoulos et al. 2020, eq. 7).
    EluPlusOne,
}

/// Divisor of a row's sum.
///
/// ```
/// use sdpa_layers::{Compute, FeatureMap, LinearAttention, LinearInputs, LinearState, Normaliser, Update};
/// use sdpa::{View, ViewMut};
/// let (k, v) = ([0.0, 0.0], [3.0, 5.0]); // equal keys, so equal weights
/// let (k, v) = (View::bhld(&k, [1, 1, 2, 1])?, View::bhld(&v, [1, 1, 2, 1])?);
/// let (mut state, mut out) = (LinearState::normalised([1, 1, 1, 1])?, [0.0; 2]);
/// LinearAttention::new().feature_map(FeatureMap::EluPlusOne).normaliser(Normaliser::KeySum).forward(
///     LinearInputs::new(k, k, v, Update::Linear),
///     &mut state,
///     ViewMut::bhld(&mut out, [1, 1, 2, 1])?,
///     &mut Compute::default(),
/// )?;
/// assert_eq!(out, [3.0, 4.0]); // the mean of the values so far
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Normaliser {
    /// No divisor: the sum is multiplied by the scale.
    #[default]
    None,
    /// The sum of the row's weights, qᵀ Σ k, with keys decayed like values (Katharopoulos et al. 2020, eq. 5); the
    /// scale cancels out. A row with a sum of 0 gives 0. For [`Update::Linear`] and [`Update::Gated`]; the state must be
    /// made by [`LinearState::normalised`](super::LinearState::normalised).
    KeySum,
}
