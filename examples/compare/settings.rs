//! What is computed, as the command line says it.

use sdpa::{Alignment, Attention, Causality, Shape};

/// The options of an attention call. Kept beside [`Attention`], because single rows are checked too, and a row of a
/// causal call stands at a place of its own.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Settings {
    pub(crate) scale: Option<f32>,
    pub(crate) causality: Causality,
    pub(crate) alignment: Option<Alignment>,
}

impl Settings {
    /// The settings of the whole call.
    pub(crate) fn attention(&self) -> Attention {
        self.aligned(self.alignment)
    }

    /// The settings under which rows `first..` of a call of this shape, taken alone, see the same keys.
    pub(crate) fn attention_from_row(&self, shape: &Shape, first: usize) -> Attention {
        self.aligned(Some(Alignment::Offset(self.position(shape, first))))
    }

    /// Keys that row `row` sees.
    pub(crate) fn keys_seen(&self, shape: &Shape, row: usize) -> usize {
        match self.causality {
            Causality::Full => shape.kv_len,
            Causality::Causal => {
                let keys = self.position(shape, row).saturating_add(1);
                usize::try_from(keys).map_or(0, |keys| keys.min(shape.kv_len))
            }
        }
    }

    /// Multiplications and additions that cannot be avoided: those of visible pairs of row and key.
    pub(crate) fn useful_flops(&self, shape: &Shape) -> f64 {
        if self.causality == Causality::Full || shape.batch.min(shape.heads) == 0 {
            return shape.flops();
        }
        let pairs: f64 = (0..shape.q_len).map(|row| self.keys_seen(shape, row) as f64).sum();
        flops_of_pairs(shape, pairs * shape.batch as f64 * shape.heads as f64)
    }

    /// Where row `row` stands among the keys.
    fn position(&self, shape: &Shape, row: usize) -> isize {
        let alignment = self.alignment.unwrap_or(Alignment::TopLeft);
        alignment.offset(shape.q_len, shape.kv_len).saturating_add_unsigned(row)
    }

    fn aligned(&self, alignment: Option<Alignment>) -> Attention {
        let mut attention = Attention::new();
        if let Some(scale) = self.scale {
            attention = attention.scale(scale);
        }
        if self.causality == Causality::Causal {
            attention = attention.causal();
        }
        match alignment {
            Some(alignment) => attention.align(alignment),
            None => attention,
        }
    }
}

/// Multiplications and additions of so many pairs of row and key.
pub(crate) fn flops_of_pairs(shape: &Shape, pairs: f64) -> f64 {
    2.0 * pairs * (shape.head_dim + shape.value_dim) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causal_work_counts_visible_pairs() {
        let shape = Shape { batch: 2, heads: 3, kv_heads: 3, q_len: 4, kv_len: 6, head_dim: 8, value_dim: 5 };
        let pairs = |alignment, pairs: f64| {
            let settings = Settings { causality: Causality::Causal, alignment: Some(alignment), scale: None };
            assert_eq!(settings.useful_flops(&shape), 2.0 * 13.0 * 6.0 * pairs, "{alignment:?}");
        };
        pairs(Alignment::TopLeft, 1.0 + 2.0 + 3.0 + 4.0);
        pairs(Alignment::BottomRight, 3.0 + 4.0 + 5.0 + 6.0);
        pairs(Alignment::Offset(-2), 0.0 + 0.0 + 1.0 + 2.0);
        pairs(Alignment::Offset(isize::MAX), 24.0);
        pairs(Alignment::Offset(isize::MIN), 0.0);
        assert_eq!(Settings::default().useful_flops(&shape), shape.flops());
    }
}
