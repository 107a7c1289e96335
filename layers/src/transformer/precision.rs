//! Precision of transformers: one setting for projections and attention.

use super::{Transformer, TransformerLayer};
use crate::multi_head::MultiHeadAttention;
use crate::norm::Norm;
use sdpa::Precision;

impl TransformerLayer {
    /// Sets the precision of all projections of the layer, as [`Linear::precision`](crate::Linear::precision) does, and of attention.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        let set = |(attention, norm): (MultiHeadAttention, Norm)| (attention.precision(precision), norm);
        let (feed_forward, norm) = self.feed_forward;
        let feed_forward = (feed_forward.precision(precision), norm);
        Self { own: set(self.own), cross: self.cross.map(set), feed_forward, ..self }
    }
}

impl Transformer {
    /// Sets the precision of all projections of the layers, as [`Linear::precision`](crate::Linear::precision) does, and of attention.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        let layers = self.layers.into_iter().map(|layer| layer.precision(precision)).collect();
        Self { layers, ..self }
    }
}
