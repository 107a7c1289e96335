//! Form of the tokens that a cache or a page pool takes.

use crate::cache::CacheFormat;
use crate::error::{Error, same};
use crate::shape::KvShape;
use sdpa_kernels::{Dtype, Isa, Tensor};

/// Place of the values of tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValuePlace {
    /// Beside the keys.
    Apart,
    /// In the first columns of the keys.
    InKeys,
}

/// Form of the tokens that a cache or a page pool takes.
pub(crate) struct TokenForm {
    pub(crate) shape: KvShape,
    /// Place of the values.
    pub(crate) values: ValuePlace,
    /// Name of what takes the tokens, in messages.
    pub(crate) of: &'static str,
}

impl TokenForm {
    /// Refuses keys and values that do not fit. What they hold is for [`Storable`] to check, once there is memory for it: a
    /// view may be huge.
    pub(crate) fn check(&self, k: Tensor<'_>, v: Tensor<'_>) -> Result<(), Error> {
        let Self { shape: KvShape { kv_heads, head_dim, value_dim }, values, of } = *self;
        let [batch, _, rows, _] = k.shape();
        let heads = |argument, [_, heads, rows, _]: [usize; 4]| {
            same(argument, "heads", heads, kv_heads, of)
                .map_err(|e| Error::from(e).or_exchanged(argument, [heads, rows]))
        };
        heads("k", k.shape())?;
        same("k", "head_dim", k.shape()[3], head_dim, of)?;
        same("v", "batch", v.shape()[0], batch, "k")?;
        heads("v", v.shape())?;
        same("v", "rows", v.shape()[2], rows, "k")?;
        same("v", "value_dim", v.shape()[3], value_dim, of)?;
        if values == ValuePlace::InKeys && !v.is_start_of(&k) {
            let needs = "the first columns of k (View::columns), which are the values of a latent cache";
            return Err(Error::Needs { argument: "v", needs });
        }
        Ok(())
    }
}

/// Elements that a format can store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storable {
    All,
    /// Of int8: an integer cannot represent a non-finite number.
    Finite,
    /// Of f16.
    InF16,
    /// Of int4, whose scales are f16.
    FiniteInF16,
}

impl Storable {
    /// Returns the elements that a format can store.
    pub(crate) fn in_format(format: CacheFormat<'_>) -> Self {
        match format {
            CacheFormat::Int8PerToken | CacheFormat::Int8PerChannel(_) => Self::Finite,
            CacheFormat::Int4(_) => Self::FiniteInF16,
            CacheFormat::Elements(Dtype::F16) => Self::InF16,
            CacheFormat::Elements(_) => Self::All,
        }
    }

    /// Refuses keys and values with other elements.
    pub(crate) fn check(self, isa: Isa, [k, v]: [Tensor<'_>; 2]) -> Result<(), Error> {
        for (argument, x) in [("k", k), ("v", v)] {
            let (unfit, expected) = match self {
                Self::All => return Ok(()),
                Self::Finite => (x.not_finite(isa), "finite where elements are int8"),
                Self::FiniteInF16 => (
                    x.not_finite(isa).or_else(|| x.beyond_f16(isa)),
                    "below 65520 in size where elements are int4, with scales of f16",
                ),
                Self::InF16 => (x.beyond_f16(isa), "below 65520 in size, as f16 is"),
            };
            if let Some(([_, _, row, _], got)) = unfit {
                return Err(Error::Row { argument, what: "an element", row, got, expected });
            }
        }
        Ok(())
    }
}
