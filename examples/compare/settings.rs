//! What is computed, as the command line says it.

use sdpa::{Alignment, Attention, Causality, Dtype, Precision, Window};
use std::fmt;

/// The options of an attention call. Kept beside [`Attention`], because rows are checked a few at a time too, and those
/// of a causal call stand at a place of their own.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Settings {
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) causality: Causality,
    pub(crate) window: Option<Sides>,
    pub(crate) alignment: Option<Alignment>,
    /// Precision of fused paths alone: the others and the oracle compute exactly.
    pub(crate) precision: Precision,
}

/// Keys that a window holds before a row's position and after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sides {
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
}

/// Every element type.
pub(crate) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Rows that share a list, and keys that a number stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Groups {
    pub(crate) rows: usize,
    pub(crate) unit: usize,
}

impl Default for Groups {
    /// A list for each row, of single keys.
    fn default() -> Self {
        Self { rows: 1, unit: 1 }
    }
}

impl Settings {
    /// The settings of the whole call.
    pub(crate) fn attention(&self) -> Attention {
        self.aligned(self.alignment)
    }

    /// The settings under which rows `first..` of a sequence of these lengths, taken alone, see the same keys.
    pub(crate) fn attention_from_row(&self, first: usize, q_len: usize, kv_len: usize) -> Attention {
        let alignment = self.alignment.unwrap_or(Alignment::TopLeft);
        let position = alignment.offset(q_len, kv_len).saturating_add_unsigned(first);
        self.aligned(Some(Alignment::Offset(position)))
    }

    fn aligned(&self, alignment: Option<Alignment>) -> Attention {
        let mut attention = Attention::new().precision(self.precision);
        if let Some(scale) = self.scale {
            attention = attention.scale(scale);
        }
        if let Some(c) = self.softcap {
            attention = attention.softcap(c);
        }
        if self.causality == Causality::Causal {
            attention = attention.causal();
        }
        if let Some(Sides { left, right }) = self.window {
            attention = attention.window(Window::inclusive(left, right));
        }
        match alignment {
            Some(alignment) => attention.align(alignment),
            None => attention,
        }
    }
}

/// In a few words, scale and precision aside.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.causality {
            Causality::Causal => "causal",
            Causality::Full => "not causal",
        })?;
        if let Some(Sides { left, right }) = self.window {
            let side = |keys: Option<usize>| keys.map_or("all".to_owned(), |n| n.to_string());
            write!(f, ", window of {} keys before and {} after", side(left), side(right))?;
        }
        match self.alignment {
            Some(Alignment::TopLeft) => f.write_str(", top-left")?,
            Some(Alignment::BottomRight) => f.write_str(", bottom-right")?,
            Some(Alignment::Offset(n)) => write!(f, ", first row at position {n}")?,
            _ => {}
        }
        match self.softcap {
            Some(c) => write!(f, ", softcap {c}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_in_words() {
        assert_eq!(Settings::default().to_string(), "not causal");
        assert_eq!(Settings::default().attention(), Attention::new());
        let settings = Settings {
            scale: Some(2.0),
            softcap: Some(30.0),
            causality: Causality::Causal,
            window: Some(Sides { left: Some(17), right: None }),
            alignment: Some(Alignment::Offset(-3)),
            precision: Precision::Exact,
        };
        let words = "causal, window of 17 keys before and all after, first row at position -3, softcap 30";
        assert_eq!(settings.to_string(), words);
    }
}
