//! Form of the tokens that a cache or a page pool takes.

use crate::error::{Error, same};
use crate::shape::KvShape;
use sdpa_kernels::{CacheFormat, Dtype, Isa, KvFormat, Tensor};

/// Refuses keys and values if their sizes are not `shape`, the sizes of `of`. [`check_elements`] looks at the elements, once
/// there is memory for them: a view may be huge.
pub(crate) fn check_tokens(shape: KvShape, of: &'static str, k: Tensor<'_>, v: Tensor<'_>) -> Result<(), Error> {
    let KvShape { kv_heads, head_dim, value_dim } = shape;
    let [batch, _, rows, _] = k.shape();
    same("k", "heads", k.shape()[1], kv_heads, of)?;
    same("k", "head_dim", k.shape()[3], head_dim, of)?;
    same("v", "batch", v.shape()[0], batch, "k")?;
    same("v", "heads", v.shape()[1], kv_heads, of)?;
    same("v", "rows", v.shape()[2], rows, "k")?;
    Ok(same("v", "value_dim", v.shape()[3], value_dim, of)?)
}

/// Refuses keys and values with elements that a format cannot store.
pub(crate) fn check_elements(format: KvFormat<'_>, isa: Isa, [k, v]: [Tensor<'_>; 2]) -> Result<(), Error> {
    for (argument, format, x) in [("k", format.keys, k), ("v", format.values, v)] {
        let (unfit, expected) = match format {
            CacheFormat::Elements(Dtype::F16) => (x.beyond_f16(isa), "below 65520 in size, as f16 is"),
            // Of E4M3 with a given scale, NaN is NaN, and the largest number stands for all that are larger.
            CacheFormat::Elements(_) | CacheFormat::E4m3PerHead(_) => continue,
            CacheFormat::E4m3PerToken => (x.not_finite(isa), "finite where each row has a scale of its own"),
            CacheFormat::Int4(_) => (
                x.not_finite(isa).or_else(|| x.beyond_f16(isa)),
                "below 65520 in size where elements are int4, with scales of f16",
            ),
            _ => (x.not_finite(isa), "finite where elements are int8"),
        };
        if let Some(([_, _, row, _], got)) = unfit {
            return Err(Error::Row { argument, what: "an element", row, got, expected });
        }
    }
    Ok(())
}
