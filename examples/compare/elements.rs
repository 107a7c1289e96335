//! Element types of queries, keys and values, and the tensors of that type that the fused path reads.

use crate::args::Source;
use crate::data::{self, Tensor, Tensors, reserved};
use crate::failure::{Refused, Result};
use crate::paths::Method;
use crate::settings::Settings;
use sdpa::{Bf16, Dtype, F16, Inputs, Precision, View};

/// Element type and precision of fused paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) dtype: Dtype,
    pub(crate) precision: Precision,
}

impl Numbers {
    const DEFAULT: Self = Self { dtype: Dtype::F32, precision: Precision::Exact };

    pub(crate) fn of_call(settings: &Settings, tensors: &Tensors) -> Self {
        Self { dtype: tensors.dtype, precision: settings.precision }
    }

    /// In words; `None` for the default.
    pub(crate) fn in_words(self) -> Option<String> {
        (self != Self::DEFAULT).then(|| format!("fused paths in {}, precision {}", self.dtype, self.precision))
    }

    /// Element type of a path, and its precision if it has a choice. Paths that are not fused read the same numbers in f32.
    pub(crate) fn of(self, method: Method) -> (Dtype, Option<Precision>) {
        match method {
            Method::Fused(_) => (self.dtype, Some(self.precision)),
            Method::Naive | Method::Unfused => (Dtype::F32, None),
        }
    }

    /// True if fused paths round weights on an instruction set that multiplies bfloat16.
    pub(crate) fn round_weights(self) -> bool {
        self == Self { dtype: Dtype::Bf16, precision: Precision::Native }
    }
}

/// Loads the tensors; rounds queries, keys and values to a type if one is asked for.
pub(crate) fn load(source: &Source, dtype: Option<Dtype>) -> Result<Tensors> {
    let tensors = data::load(source)?;
    match dtype {
        Some(dtype) if dtype != tensors.dtype => round(tensors, dtype),
        _ => Ok(tensors),
    }
}

fn round(mut tensors: Tensors, dtype: Dtype) -> Result<Tensors> {
    for (name, tensor) in [("q", &mut tensors.q), ("k", &mut tensors.k), ("v", &mut tensors.v)] {
        for x in &mut tensor.data {
            let rounded = rounded(*x, dtype);
            if x.is_finite() && !rounded.is_finite() {
                return Err(Refused::new(format_args!("--dtype: {name} has {x:e}, which {dtype} cannot hold")));
            }
            *x = rounded;
        }
    }
    Ok(Tensors { dtype, ..tensors })
}

/// The nearest number of a type.
fn rounded(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => Bf16::from_f32(x).to_f32(),
        Dtype::F16 => F16::from_f32(x).to_f32(),
        dtype => unreachable!("no setting asks for {dtype}"),
    }
}

/// Queries, keys and values in their element type. [`Tensors`] hold those of f32.
#[derive(Debug)]
pub(crate) enum Elements {
    F32,
    Bf16([Tensor<Bf16>; 3]),
    F16([Tensor<F16>; 3]),
}

impl Elements {
    /// The numbers of the tensors, narrowed to the tensors' type. It holds each of them, so nothing is rounded.
    pub(crate) fn of(tensors: &Tensors) -> Result<Self> {
        match tensors.dtype {
            Dtype::F32 => Ok(Self::F32),
            Dtype::Bf16 => narrowed(tensors, Bf16::from_f32).map(Self::Bf16),
            Dtype::F16 => narrowed(tensors, F16::from_f32).map(Self::F16),
            dtype => unreachable!("no setting asks for {dtype}"),
        }
    }

    /// Views of these elements and of all else that the tensors have.
    pub(crate) fn inputs<'a>(&'a self, tensors: &'a Tensors) -> Result<Inputs<'a>> {
        Ok(tensors.with_lists(self.all_but_lists(tensors)?))
    }

    /// Views of these elements and of all else that the tensors have, but lists of selected keys.
    pub(crate) fn all_but_lists<'a>(&'a self, tensors: &'a Tensors) -> Result<Inputs<'a>> {
        match self {
            Self::F32 => tensors.all_but_lists(),
            Self::Bf16(qkv) => tensors.with_options(views(qkv)?),
            Self::F16(qkv) => tensors.with_options(views(qkv)?),
        }
    }
}

fn narrowed<T>(tensors: &Tensors, narrow: fn(f32) -> T) -> Result<[Tensor<T>; 3]> {
    let one = |tensor: &Tensor| -> Result<Tensor<T>> {
        let mut data = reserved(tensor.data.len())?;
        data.extend(tensor.data.iter().map(|&x| narrow(x)));
        Ok(Tensor { shape: tensor.shape, data })
    };
    Ok([one(&tensors.q)?, one(&tensors.k)?, one(&tensors.v)?])
}

fn views<'a, T>([q, k, v]: &'a [Tensor<T>; 3]) -> Result<Inputs<'a>>
where
    sdpa::Tensor<'a>: From<View<'a, T>>,
{
    Ok(Inputs::new(q.view()?, k.view()?, v.view()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::DTYPES;
    use sdpa::Shape;

    const SHAPE: Shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 7, kv_len: 9, head_dim: 5, value_dim: 3 };

    /// Numbers of two tensors of one shape, whatever their types.
    fn pairs(x: sdpa::Tensor<'_>, y: sdpa::Tensor<'_>) -> Vec<[f32; 2]> {
        let [batch, heads, rows, dim] = x.shape();
        assert_eq!(x.shape(), y.shape());
        let at = |i: usize| [i / dim / rows / heads, i / dim / rows % heads, i / dim % rows, i % dim];
        let pair = |i| [&x, &y].map(|tensor| tensor.get(at(i)).expect("within the shape"));
        (0..batch * heads * rows * dim).map(pair).collect()
    }

    #[test]
    fn fused_paths_read_the_same_numbers_in_their_type() {
        let wide = load(&Source::Random(SHAPE), None).unwrap();
        assert_eq!(load(&Source::Random(SHAPE), Some(Dtype::F32)), Ok(wide.clone()));
        for (dtype, error) in [(Dtype::Bf16, 2f32.powi(-8)), (Dtype::F16, 2f32.powi(-11))] {
            let mut tensors = load(&Source::Random(SHAPE), Some(dtype)).unwrap();
            tensors.sinks = Some(vec![0.0; 4]);
            let (elements, inputs) = (Elements::of(&tensors).unwrap(), tensors.inputs().unwrap());
            let fused = elements.inputs(&tensors).unwrap();
            assert_eq!((fused.queries().dtype(), inputs.queries().dtype()), (dtype, Dtype::F32));
            assert!(pairs(fused.queries(), inputs.queries()).iter().all(|[x, y]| x == y));
            let [kv, wide_kv] = [&fused, &inputs].map(|inputs| inputs.key_values().unwrap());
            assert_eq!(
                (kv.key([0, 1, 8, 4]), kv.value([0, 1, 8, 2])),
                (wide_kv.key([0, 1, 8, 4]), wide_kv.value([0, 1, 8, 2]))
            );
            for (tensor, wide) in [(&tensors.q, &wide.q), (&tensors.k, &wide.k), (&tensors.v, &wide.v)] {
                let far = |(x, y): (&f32, &f32)| (x - y).abs() > error * y.abs().max(2f32.powi(-14));
                assert!(!tensor.data.iter().zip(&wide.data).any(far) && tensor != wide, "{dtype}");
            }
        }
    }

    #[test]
    fn numbers_that_a_type_cannot_hold_are_refused() {
        let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 1, kv_len: 1, head_dim: 1, value_dim: 1 };
        let tensors =
            |x| Tensors { k: Tensor { shape: [1; 4], data: vec![x] }, ..load(&Source::Random(shape), None).unwrap() };
        let message = |x, dtype| round(tensors(x), dtype).unwrap_err().to_string();
        assert_eq!(message(65520.0, Dtype::F16), "--dtype: k has 6.552e4, which f16 cannot hold");
        assert_eq!(message(f32::MIN, Dtype::Bf16), "--dtype: k has -3.4028235e38, which bf16 cannot hold");
        for (x, dtype) in [(65519.0, Dtype::F16), (f32::INFINITY, Dtype::F16), (f32::NAN, Dtype::Bf16)] {
            assert!(round(tensors(x), dtype).is_ok());
        }
    }

    #[test]
    fn numbers_in_words() {
        let of = |dtype, precision| Numbers { dtype, precision };
        assert_eq!(of(Dtype::F32, Precision::Exact).in_words(), None);
        let words = of(Dtype::Bf16, Precision::Native).in_words();
        assert_eq!(words.as_deref(), Some("fused paths in bf16, precision native"));
        let rounding = DTYPES.map(|dtype| of(dtype, Precision::Native).round_weights());
        assert_eq!((rounding, of(Dtype::Bf16, Precision::Exact).round_weights()), ([false, true, false], false));
    }
}
