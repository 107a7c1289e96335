//! Biases and masks of a call that is cut by heads: the rows that other ranks have of them, of a rank's own heads.

use crate::cut::Cut;
use crate::error::Error;
use crate::forms::Form;
use crate::sequences::{OF_ROWS, Sequences};
use crate::whole::{self, Whole, append, place_rows};
use core::ops::Range;
use sdpa::{Dtype, Inputs, Tensor, View};

/// Bias and mask of all rows, for some of the heads, as they come from all ranks.
#[derive(Debug)]
pub(crate) struct Options {
    forms: [Option<Form>; 2],
    sequences: Sequences,
    heads: Range<usize>,
    bias: Option<Whole>,
    mask: Option<([usize; 4], Vec<u8>)>,
}

impl Options {
    /// Makes room for what a rank computes with, of `rows` rows.
    pub(crate) fn new(cut: &Cut, rank: usize, lens: [usize; 2]) -> Result<Self, Error> {
        let ([heads, ..], sequences) = (cut.heads_of(rank), Sequences::agreed(&cut.ranks, lens)?);
        let longest = (0..sequences.count()).map(|n| sequences.range(OF_ROWS, Some(n)).len()).max().unwrap_or(0);
        let shape = |form: &Form| match sequences.are_apart() {
            true => [sequences.count(), form.heads(heads.clone()).len(), longest, form.columns],
            false => [form.batch, form.heads(heads.clone()).len(), lens[0], form.columns],
        };
        let [bias, mask] = cut.forms.each_ref().map(|form| form.filter(|form| form.travels));
        let bias = bias.map(|form| Whole::new(shape(&form), form.dtype.unwrap_or(Dtype::F32))).transpose()?;
        let mask = mask.map(|form| Ok::<_, Error>((shape(&form), Whole::bytes_of(shape(&form))?))).transpose()?;
        Ok(Self { forms: cut.forms, sequences, heads, bias, mask })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.bias.as_ref().map_or(0, Whole::bytes) + self.mask.as_ref().map_or(0, |(_, bytes)| bytes.len())
    }

    /// Takes the bias and the mask of some rows, and returns the bytes that are left.
    pub(crate) fn place<'b>(&mut self, rows: Range<usize>, mut bytes: &'b [u8]) -> &'b [u8] {
        let Self { sequences, bias, mask, .. } = self;
        let at = |batch: usize, row: usize| match sequences.place(row) {
            Some((sequence, row)) => [sequence, row],
            None => [batch, row],
        };
        let batch = |[batch, ..]: [usize; 4]| if sequences.are_apart() { 1 } else { batch };
        if let Some(bias) = bias {
            bytes = bias.place_rows(batch(bias.shape()), rows.clone(), at, bytes);
        }
        if let Some((shape, mask)) = mask {
            bytes = place_rows(mask, *shape, batch(*shape), rows, at, bytes);
        }
        bytes
    }

    /// Returns the inputs of some of a rank's heads (`some` counts from its first): with the bias and the mask of all
    /// rows.
    pub(crate) fn inputs<'a>(
        &'a self,
        inputs: Inputs<'a>,
        some: Range<usize>,
        qkv: [Tensor<'a>; 3],
    ) -> Result<Inputs<'a>, sdpa::Error> {
        let inputs = inputs.of_heads(self.heads.start + some.start..self.heads.start + some.end, qkv);
        let [bias_form, mask_form] = &self.forms;
        let heads = |form: &Option<Form>| form.map_or(0..0, |form| form.heads(some.clone()));
        let bias = self.bias.as_ref().map(|bias| bias.heads(heads(bias_form))).transpose()?;
        let mask = self.mask.as_ref().map(|(shape, bytes)| View::bhld(bytes, *shape)).transpose()?;
        let mask = mask.and_then(|mask| mask.heads(heads(mask_form)));
        Ok(inputs.with_bias_and_mask(bias, mask))
    }
}

/// Appends what a rank has of bias and mask of a stretch of rows, of some query heads.
pub(crate) fn pack(to: &mut Vec<u8>, cut: &Cut, inputs: &Inputs<'_>, heads: Range<usize>) -> Result<(), Error> {
    let (bias, mask) = inputs.bias_and_mask();
    let [bias_form, mask_form] = cut.forms.map(|form| form.filter(|form| form.travels));
    if let (Some(bias), Some(form)) = (bias, bias_form) {
        whole::pack(to, bias, form.heads(heads.clone()))?;
    }
    if let (Some(mask), Some(form)) = (mask, mask_form) {
        let [batch, _, rows, columns] = mask.shape();
        let (heads, refused) = (form.heads(heads), "a message to another rank");
        let bytes = batch * heads.len() * rows * columns;
        to.try_reserve_exact(bytes).map_err(|_| sdpa::Error::Memory { what: refused, bytes })?;
        append(to, mask, heads);
    }
    Ok(())
}
