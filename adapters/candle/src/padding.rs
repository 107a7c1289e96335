//! Padded batches: a tokenizer's mask as key lengths or as a mask, and where rows stand.

use crate::settings::{Mask, Sdpa};
use crate::views;
use candle_core::{Device, Result, Tensor, bail};
use sdpa::Alignment;

impl Sdpa {
    /// Returns the call on tensors of these sizes, its padding as lengths or as a mask. Rows stand at the keys' columns.
    pub(crate) fn over_tensors(&self, [batch, rows, keys]: [usize; 3]) -> Result<Self> {
        let mut call = self.narrowed()?;
        if rows == keys && call.attention.alignment().is_none() {
            call.attention = call.attention.align(Alignment::TopLeft);
        }
        let Some(tokens) = Tokens::of(&mut call, [batch, keys])? else { return Ok(call) };
        // Without an alignment a call with a rule of positions is refused by its sizes, not by what the mask holds.
        let (Some(alignment), None, Some(lens)) = (call.attention.alignment(), &call.kv_lens, tokens.lens()) else {
            return tokens.hide_padding(call);
        };
        // Lengths move the last row of `BottomRight` to the last token; it stands at the last column.
        call.attention = call.attention.align(Alignment::Offset(alignment.offset(rows, keys)));
        call.kv_lens = Some(Tensor::from_vec(lens, batch, &Device::Cpu)?);
        Ok(call)
    }

    /// Returns the call over a cache of these sizes, which has lengths already: its padding is a mask.
    pub(crate) fn over_cache(&self, [sequences, keys]: [usize; 2]) -> Result<Self> {
        let mut call = self.narrowed()?;
        match Tokens::of(&mut call, [sequences, keys])? {
            Some(tokens) => tokens.hide_padding(call),
            None => Ok(call),
        }
    }
}

/// A tokenizer's mask, read.
struct Tokens {
    batch: usize,
    keys: usize,
    /// 1 for tokens, 0 for padding: `[batch, keys]`.
    real: Vec<u8>,
}

impl Tokens {
    /// Takes the padding of a call, if it has any, and checks that it is for these sizes.
    fn of(call: &mut Sdpa, [batch, keys]: [usize; 2]) -> Result<Option<Self>> {
        let Some(padding) = call.padding.take() else { return Ok(None) };
        let (dims, dtype) = (padding.dims(), padding.dtype());
        let (&[rows, columns], true) = (dims, dtype.is_int()) else {
            bail!("sdpa: padding: shape is {dims:?} of {}, but must be [batch, keys] of integers", dtype.as_str())
        };
        if rows != batch {
            bail!("sdpa: padding: rows is {rows}, but q (batch) has {batch}");
        }
        if columns != keys {
            bail!("sdpa: padding: columns is {columns}, but k (rows) has {keys}");
        }
        let real = views::integers(&padding)?.into_iter().map(|number| u8::from(number != 0)).collect();
        Ok(Some(Self { batch, keys, real }))
    }

    /// Number of tokens of each sequence, if padding only follows them.
    fn lens(&self) -> Option<Vec<i64>> {
        let lens = (0..self.batch).map(|sequence| {
            let real = &self.real[sequence * self.keys..][..self.keys];
            let len = real.iter().take_while(|&&real| real == 1).count();
            real[len..].iter().all(|&real| real == 0).then_some(len as i64)
        });
        lens.collect()
    }

    /// Returns the call with a mask of the padding, and of what its own mask hides.
    fn hide_padding(self, call: Sdpa) -> Result<Sdpa> {
        if let Some(mask) = &call.mask {
            self.check_beside(mask.tensor())?;
        }
        let real = Tensor::from_vec(self.real, (self.batch, 1, 1, self.keys), &Device::Cpu)?;
        let keep = match &call.mask {
            None => real,
            Some(Mask::Keep(given)) => given.ne(0u8)?.broadcast_mul(&real)?,
            Some(Mask::Drop(given)) => given.eq(0u8)?.broadcast_mul(&real)?,
        };
        Ok(Sdpa { mask: Some(Mask::Keep(keep)), ..call })
    }

    /// Refuses a mask that cannot be one with the padding.
    fn check_beside(&self, mask: &Tensor) -> Result<()> {
        views::check_front("mask", mask.dims(), self.batch)?;
        views::check_bytes("mask", mask)?;
        let [batch, _, _, columns] = views::shape4("mask", mask.dims())?;
        for (what, got, sizes) in [("batch", batch, self.batch), ("columns", columns, self.keys)] {
            if got != 1 && got != sizes {
                bail!("sdpa: mask: {what} is {got}, but the padding has {sizes}");
            }
        }
        Ok(())
    }
}
