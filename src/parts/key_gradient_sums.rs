//! Gradients of keys and values as sums over the query rows so far.

use crate::attention::Attention;
use crate::error::{Error, at_most, floats, same, zeros};
use crate::shape::KvShape;
use crate::threads::exec::Exec;
use core::ops::Range;
use sdpa_kernels::{Gradients, HeadSums, write_head_sums};

/// Floats of a vector.
const LANES: usize = 16;

/// Sums, for each query head, of the gradients of some keys and values over the query rows so far. Plain numbers, to be sent
/// from the rows done to the next ones: [`BackwardState::push`](crate::parts::BackwardState::push) adds to them.
///
/// ```
/// use sdpa::parts::{KeyGradientShape, KeyGradientSums};
/// // 256 keys, for each of 32 query heads.
/// let shape = KeyGradientShape { batch: 1, heads: 32, keys: 256, head_dim: 128, value_dim: 128 };
/// let sent = KeyGradientSums::new(shape)?;
/// let mut received = KeyGradientSums::new(sent.shape())?;
/// received.as_mut_slice().copy_from_slice(sent.as_slice());
/// assert_eq!((sent.as_slice().len(), received), (2 * 32 * 256 * (128 + 128), sent.clone()));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct KeyGradientSums {
    shape: KeyGradientShape,
    /// Gradients of keys, then of values, over whole row blocks; then the same over the rows of a row block that is not complete.
    floats: Vec<f32>,
    /// Floats of the gradients of keys.
    of_keys: usize,
}

/// Sizes of [`KeyGradientSums`].
///
/// ```
/// use sdpa::parts::{KeyGradientShape, KeyGradientSums};
/// let shape = KeyGradientShape { batch: 1, heads: 8, keys: 512, head_dim: 64, value_dim: 64 };
/// let of_half = KeyGradientSums::new(shape)?.keys(0..256)?;
/// assert_eq!(of_half.shape(), KeyGradientShape { keys: 256, ..shape });
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyGradientShape {
    /// Number of sequences.
    pub batch: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of keys.
    pub keys: usize,
    /// Length of a key.
    pub head_dim: usize,
    /// Length of a value.
    pub value_dim: usize,
}

impl KeyGradientShape {
    /// Length of a key and of a value.
    fn dims(self) -> [usize; 2] {
        [self.head_dim, self.value_dim]
    }
}

impl KeyGradientSums {
    /// Creates sums over no rows: 0.
    ///
    /// # Errors
    /// [`Error::Empty`] for a head_dim or value_dim of 0, [`Error::Range`] for one beyond the largest possible,
    /// [`Error::TooLarge`] or [`Error::Memory`] if they do not fit in memory.
    pub fn new(shape: KeyGradientShape) -> Result<Self, Error> {
        const WHAT: &str = "sums of gradients of keys";
        let KeyGradientShape { batch, heads, keys, head_dim, value_dim } = shape;
        KvShape { kv_heads: heads, head_dim, value_dim }.check(WHAT)?;
        let sizes = [batch, heads, keys, head_dim + value_dim];
        let [of_keys, of_values] = shape.dims().map(|dim| HeadSums::floats([batch, heads, keys, dim]));
        let all = of_keys.zip(of_values).and_then(|(k, v)| k.checked_add(v));
        let all = floats(WHAT, [all.ok_or(Error::TooLarge { what: WHAT, sizes })?, 2, 1, 1])?;
        Ok(Self { shape, floats: zeros(WHAT, all)?, of_keys: of_keys.unwrap_or(0) })
    }

    /// Sizes.
    pub fn shape(&self) -> KeyGradientShape {
        self.shape
    }

    /// Returns all numbers, to be sent, in two halves. Each holds the gradients of keys, `[batch, heads, keys, head_dim]`, then
    /// those of values, with keys and dimensions padded to multiples of sixteen. The first half sums whole blocks of 96 rows,
    /// the second the rows of a block that is not complete: zeros, which need not be sent, if the last rows that were pushed end at
    /// a multiple of 96.
    pub fn as_slice(&self) -> &[f32] {
        &self.floats
    }

    /// Returns all numbers, to be received.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.floats
    }

    /// Returns the sums of some of the keys, if there are such.
    ///
    /// # Errors
    /// [`Error::Range`] if `keys` reaches beyond the last key; [`Error::Memory`].
    pub fn keys(&self, keys: Range<usize>) -> Result<Self, Error> {
        let KeyGradientShape { batch, heads, keys: all, .. } = self.shape;
        at_most("sums", "end of the keys", keys.end, all, "the keys of the sums")?;
        at_most("sums", "first key", keys.start, keys.end, "the end of the keys")?;
        let mut some = Self::new(KeyGradientShape { keys: keys.len(), ..self.shape })?;
        let (mut from, mut to) = (&self.floats[..], &mut some.floats[..]);
        for width in [self.shape.dims(); 2].concat().into_iter().map(|dim| dim.next_multiple_of(LANES)) {
            for _ in 0..batch * heads {
                let (here, rest) = from.split_at(all.next_multiple_of(LANES) * width);
                let mine = to.split_off_mut(..keys.len().next_multiple_of(LANES) * width).unwrap_or_default();
                mine[..keys.len() * width].copy_from_slice(&here[keys.start * width..keys.end * width]);
                from = rest;
            }
        }
        Ok(some)
    }

    /// Checks that the sums are of this shape.
    pub(crate) fn check(&self, shape: KeyGradientShape) -> Result<(), Error> {
        same("sums", "batch", self.shape.batch, shape.batch, "q")?;
        same("sums", "heads", self.shape.heads, shape.heads, "q")?;
        same("sums", "keys", self.shape.keys, shape.keys, "k (rows)")?;
        same("sums", "head_dim", self.shape.head_dim, shape.head_dim, "q")?;
        Ok(same("sums", "value_dim", self.shape.value_dim, shape.value_dim, "v")?)
    }

    /// Returns the sums for the kernels.
    pub(crate) fn parts_mut(&mut self) -> HeadSums<'_> {
        let all = self.floats.len() / 2;
        let (blocks, rest) = self.floats.split_at_mut(all);
        let [blocks, rest] = [blocks, rest].map(|floats| <[_; 2]>::from(floats.split_at_mut(self.of_keys)));
        HeadSums { blocks, rest }
    }

    /// Writes the gradients of the keys and values ([`Gradients::k`], [`Gradients::v`], either or both), when all rows have been
    /// added. `attention` has the settings of the call: its scale is a factor of the gradients of keys.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for gradients of other shapes; [`Error::Heads`] if query heads cannot share the key/value heads;
    /// [`Error::Needs`] for gradients of anything else. Gradients are then untouched.
    pub fn write(mut self, attention: &Attention, gradients: Gradients<'_>, exec: Exec) -> Result<(), Error> {
        let KeyGradientShape { batch, heads, keys, head_dim, value_dim } = self.shape;
        let scale = attention.scale_for(head_dim);
        let Gradients { q, k, v, bias, sinks, slopes, scale: d_scale, parameters } = gradients;
        let of_all = [sinks.is_some(), slopes.is_some(), d_scale.is_some(), parameters.is_some()];
        if q.is_some() || bias.is_some() || of_all.contains(&true) {
            const NEEDS: &str = "the state of the rows: these sums have the gradients of keys and values alone";
            return Err(Error::Needs { argument: "gradients", needs: NEEDS });
        }
        for (argument, gradient, dim) in [("dk", &k, head_dim), ("dv", &v, value_dim)] {
            let Some(gradient) = gradient else { continue };
            let kv_heads = gradient.shape()[1];
            if kv_heads == 0 && heads > 0 || kv_heads > 0 && !heads.is_multiple_of(kv_heads) {
                return Err(Error::Heads { q_heads: heads, kv_heads, of: argument });
            }
            let of_both = gradient.shape().into_iter().zip([batch, kv_heads, keys, dim]);
            for (what, (got, expected)) in ["batch", "heads", "rows", "last dimension"].into_iter().zip(of_both) {
                same(argument, what, got, expected, "the sums")?;
            }
        }
        let HeadSums { blocks, rest } = self.parts_mut();
        for ((gradient, scale), (sums, rest)) in [(k, scale), (v, 1.0)].into_iter().zip(blocks.into_iter().zip(rest)) {
            let Some(gradient) = gradient else { continue };
            sums.iter_mut().zip(rest).for_each(|(sum, rest)| *sum += *rest);
            write_head_sums(exec.isa, gradient, sums, heads, scale);
        }
        Ok(())
    }
}
