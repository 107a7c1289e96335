//! Numbers of a prompt: each is made of its place, so that every rank can make any of them.

use crate::Asked;
use sdpa::{Bf16, Dtype, F16, Tensor, View};
use std::ops::Range;

/// Numbers of a tensor `[batch, heads, rows, dim]`, some rows of a longer one. Each number is made of its place there.
pub(crate) struct Numbers {
    f32: Vec<f32>,
    bf16: Vec<Bf16>,
    f16: Vec<F16>,
    shape: [usize; 4],
    dtype: Dtype,
}

impl Numbers {
    pub(crate) fn new([batch, heads, _, dim]: [usize; 4], rows: Range<usize>, seed: u64, dtype: Dtype) -> Self {
        let number = |place: u64| {
            let mut x = place.wrapping_add(seed << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((x ^ x >> 27) >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let mut numbers =
            Self { f32: vec![], bf16: vec![], f16: vec![], shape: [batch, heads, rows.len(), dim], dtype };
        for head in 0..batch * heads {
            for place in rows.start * dim..rows.end * dim {
                let x = number(((head as u64) << 40) + place as u64);
                match dtype {
                    Dtype::Bf16 => numbers.bf16.push(Bf16::from_f32(x)),
                    Dtype::F16 => numbers.f16.push(F16::from_f32(x)),
                    _ => numbers.f32.push(x),
                }
            }
        }
        numbers
    }

    pub(crate) fn tensor(&self) -> Result<Tensor<'_>, sdpa::Error> {
        Ok(match self.dtype {
            Dtype::Bf16 => View::bhld(&self.bf16, self.shape)?.into(),
            Dtype::F16 => View::bhld(&self.f16, self.shape)?.into(),
            _ => View::bhld(&self.f32, self.shape)?.into(),
        })
    }
}

/// One stretch of rows and the keys beside them.
pub(crate) struct Stripe {
    pub(crate) rows: Range<usize>,
    pub(crate) qkv: [Numbers; 3],
    pub(crate) out: Vec<f32>,
}

impl Stripe {
    pub(crate) fn new(asked: &Asked, rows: Range<usize>) -> Self {
        let [batch, heads, _, dim] = asked.shape;
        let numbers = |shape, seed| Numbers::new(shape, rows.clone(), seed, asked.dtype);
        let qkv = [numbers(asked.shape, 1), numbers(asked.of_keys(), 2), numbers(asked.of_keys(), 3)];
        let out = vec![0.0; batch * heads * rows.len() * dim];
        Self { rows, qkv, out }
    }
}
