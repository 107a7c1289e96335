//! Parcels on their way: keys and values in the memory that they travel through.

use crate::error::Error;
use crate::memory::Memory;
use crate::message::{Comm, Transfer, Way};
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use sdpa::{Dtype, Tensor, View};

/// Sizes and element types of all keys and values of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    /// Of keys, then of values.
    pub(crate) dims: [usize; 2],
    pub(crate) dtypes: [Dtype; 2],
}

impl Sizes {
    /// Bytes of a key and its value.
    pub(crate) fn bytes(&self) -> usize {
        let [k, v] = [0, 1].map(|i| self.dims[i].saturating_mul(self.dtypes[i].bytes()));
        self.batch.saturating_mul(self.heads).saturating_mul(k.saturating_add(v))
    }
}

/// Elements of one tensor on their way.
#[derive(Debug)]
enum Elements {
    Wide(Transfer<f32>),
    /// Bits of elements of 16 bits.
    Short(Transfer<u16>, Dtype),
}

impl Elements {
    /// Begins to send the elements of tensors of one type, which follow one another in rows, or without any to receive `len`
    /// elements.
    fn begin(
        comm: Comm,
        memory: &mut Memory,
        own: &[Tensor<'_>],
        dtype: Dtype,
        len: usize,
        way: Way,
    ) -> Result<Self, Error> {
        Ok(match (own.first(), dtype) {
            (Some(_), Dtype::F32) => {
                let views = own.iter().filter_map(|x| if let Tensor::F32(view) = x { Some(*view) } else { None });
                let memory = packed(&views.collect::<Vec<_>>(), memory.wide.take(len)?, |&x| x);
                Self::Wide(Transfer::begin(comm, memory, way))
            }
            (Some(_), Dtype::Bf16) => {
                let views = own.iter().filter_map(|x| if let Tensor::Bf16(view) = x { Some(*view) } else { None });
                let memory = packed(&views.collect::<Vec<_>>(), memory.short.take(len)?, |x| x.0);
                Self::Short(Transfer::begin(comm, memory, way), dtype)
            }
            (Some(_), _) => {
                let views = own.iter().filter_map(|x| if let Tensor::F16(view) = x { Some(*view) } else { None });
                let memory = packed(&views.collect::<Vec<_>>(), memory.short.take(len)?, |x| x.0);
                Self::Short(Transfer::begin(comm, memory, way), dtype)
            }
            (None, Dtype::F32) => Self::Wide(Transfer::begin(comm, of_length(memory.wide.take(len)?, len), way)),
            (None, _) => Self::Short(Transfer::begin(comm, of_length(memory.short.take(len)?, len), way), dtype),
        })
    }

    /// Returns the elements as a tensor, if all have arrived.
    fn tensor(&self, shape: [usize; 4]) -> Option<Tensor<'_>> {
        match self {
            Self::Wide(transfer) => Some(View::bhld(transfer.elements()?, shape).ok()?.into()),
            Self::Short(transfer, Dtype::Bf16) => {
                Some(View::bhld(transfer.elements()?.reinterpret_cast::<bf16>(), shape).ok()?.into())
            }
            Self::Short(transfer, _) => {
                Some(View::bhld(transfer.elements()?.reinterpret_cast::<f16>(), shape).ok()?.into())
            }
        }
    }
}

/// Evaluates the same expression for either kind of elements.
macro_rules! either {
    ($elements:expr, |$x:ident| $e:expr) => {
        match $elements {
            Elements::Wide($x) => $e,
            Elements::Short($x, _) => $e,
        }
    };
}

/// Keys and values of a parcel on their way.
#[derive(Debug)]
pub(crate) struct Travelling {
    parts: [Elements; 2],
    shapes: [[usize; 4]; 2],
}

impl Travelling {
    /// Begins to send `n` keys and values, which lie in some tensors, or without any to receive them. `ways` are those of keys and of
    /// values.
    pub(crate) fn begin(
        comm: Comm,
        memory: &mut Memory,
        sizes: &Sizes,
        own: &[[Tensor<'_>; 2]],
        n: usize,
        ways: [Way; 2],
    ) -> Result<Self, Error> {
        let shapes = sizes.dims.map(|dim| [sizes.batch, sizes.heads, n, dim]);
        let mut part = |i: usize, way: Way| {
            let too_large = sdpa::Error::TooLarge { what: "a parcel of keys", sizes: shapes[i] };
            let len = shapes[i].iter().try_fold(1usize, |len, &size| len.checked_mul(size)).ok_or(too_large)?;
            let own: Vec<_> = own.iter().map(|own| own[i]).collect();
            Elements::begin(comm, memory, &own, sizes.dtypes[i], len, way)
        };
        let [k, v] = ways;
        Ok(Self { parts: [part(0, k)?, part(1, v)?], shapes })
    }

    /// Gives its memory back, if all is done.
    pub(crate) fn leave(self, memory: &mut Memory) {
        for part in self.parts {
            match part {
                Elements::Wide(transfer) => transfer.into_memory().map(|buffer| memory.wide.give(buffer)),
                Elements::Short(transfer, _) => transfer.into_memory().map(|buffer| memory.short.give(buffer)),
            };
        }
    }

    /// Lets it advance. Returns true if it did.
    pub(crate) fn poll(&self) -> bool {
        let [k, v] = &self.parts;
        either!(k, |x| x.poll()) | either!(v, |x| x.poll())
    }

    /// Returns keys and values, if all have arrived.
    pub(crate) fn tensors(&self) -> Option<[Tensor<'_>; 2]> {
        let [k, v] = &self.parts;
        Some([k.tensor(self.shapes[0])?, v.tensor(self.shapes[1])?])
    }

    /// Returns true if all have arrived, and were taken wherever they go.
    pub(crate) fn is_done(&self) -> bool {
        self.parts.iter().all(|part| either!(part, |x| x.is_done()))
    }

    /// Returns the ranks that it waits for.
    pub(crate) fn peers(&self) -> Vec<usize> {
        self.parts.iter().flat_map(|part| either!(part, |x| x.peers())).collect()
    }

    /// Returns the bytes it holds, and those that this rank sends and receives.
    pub(crate) fn bytes(&self) -> [usize; 3] {
        let [k, v] = [0, 1].map(|i| either!(&self.parts[i], |x| x.bytes()));
        [0, 1, 2].map(|i| k[i] + v[i])
    }
}

/// Returns the elements of views side by side, in order, in some memory; rows of the views follow one another.
fn packed<T, U>(views: &[View<'_, T>], mut memory: Vec<U>, convert: impl Fn(&T) -> U) -> Vec<U> {
    let [batch, heads, ..] = views.first().map_or([0; 4], |view| view.shape());
    memory.clear();
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for view in views {
            let [.., rows, dim] = view.shape();
            let dense = view.head(b, h).filter(|(_, (_, element))| *element == 1);
            if let Some((elements, (row, _))) = dense
                && row == dim
            {
                memory.extend(elements.iter().map(&convert));
                continue;
            }
            for l in 0..rows {
                match dense {
                    Some((elements, (row, _))) => memory.extend(elements[l * row..][..dim].iter().map(&convert)),
                    None => memory.extend((0..dim).filter_map(|d| view.get([b, h, l, d])).map(&convert)),
                }
            }
        }
    }
    memory
}

/// Returns the memory with `len` elements, whatever they are.
fn of_length<T: Copy + Default>(mut memory: Vec<T>, len: usize) -> Vec<T> {
    memory.resize(len, T::default());
    memory
}
