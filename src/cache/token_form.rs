//! Form of the tokens that a cache or a page pool takes.

use crate::error::{Error, same};
use crate::shape::KvShape;
use sdpa_kernels::{Basis, CacheFormat, Dtype, F16, Isa, KvFormat, Tensor, first_beyond, first_not_finite};

/// Refuses keys and values of these shapes if their sizes are not `shape`, the sizes of `of`. [`check_elements`] looks at the
/// elements, once there is memory for them: a view may be huge.
pub(crate) fn check_tokens(shape: KvShape, of: &'static str, [k, v]: [[usize; 4]; 2]) -> Result<(), Error> {
    let KvShape { kv_heads, head_dim, value_dim } = shape;
    let [batch, _, rows, _] = k;
    same("k", "heads", k[1], kv_heads, of)?;
    same("k", "head_dim", k[3], head_dim, of)?;
    same("v", "batch", v[0], batch, "k")?;
    same("v", "heads", v[1], kv_heads, of)?;
    same("v", "rows", v[2], rows, "k")?;
    Ok(same("v", "value_dim", v[3], value_dim, of)?)
}

/// Refuses keys and values with elements that a format cannot store.
pub(crate) fn check_elements(format: KvFormat<'_>, isa: Isa, [k, v]: [Tensor<'_>; 2]) -> Result<(), Error> {
    let KvFormat { keys, values, key_basis, value_basis, .. } = format;
    for (argument, format, basis, x) in [("k", keys, key_basis, k), ("v", values, value_basis, v)] {
        let (unfit, expected) = match (format, basis) {
            (CacheFormat::Elements(Dtype::F16), _) => {
                (first_beyond(&x, isa, F16::LEAST_INFINITE), "below 65520 in size, as f16 is")
            }
            // Of E4M3 with a given scale, NaN is NaN, and the largest number stands for all that are larger.
            (CacheFormat::Elements(_) | CacheFormat::E4m3PerHead(_), _) => continue,
            (CacheFormat::E4m3PerToken, _) => {
                (first_not_finite(&x, isa), "finite where each row has a scale of its own")
            }
            // A transformed row may have an element sixteen times as large.
            (CacheFormat::Int4(_), Basis::Hadamard) => (
                first_not_finite(&x, isa).or_else(|| first_beyond(&x, isa, F16::LEAST_INFINITE / 16.0)),
                "below 4095 in size where elements are int4 in the Hadamard basis, with scales of f16",
            ),
            (_, Basis::Hadamard) => (
                first_not_finite(&x, isa).or_else(|| first_beyond(&x, isa, 1e36)),
                "below 1e36 in size where elements are int8 in the Hadamard basis",
            ),
            (CacheFormat::Int4(_), _) => (
                first_not_finite(&x, isa).or_else(|| first_beyond(&x, isa, F16::LEAST_INFINITE)),
                "below 65520 in size where elements are int4, with scales of f16",
            ),
            _ => (first_not_finite(&x, isa), "finite where elements are int8"),
        };
        if let Some(([_, _, row, _], got)) = unfit {
            return Err(Error::Row { argument, what: "an element", row, got, expected });
        }
    }
    Ok(())
}
