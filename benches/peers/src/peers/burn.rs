//! burn on its flex backend.

use crate::case::Case;
use crate::failure::Result;
use crate::peer::Peer;
use crate::rounded::Qkv;
use burn_backend::TensorData;
use burn_backend::ops::{AttentionModuleOptions, ModuleOps};
use burn_flex::{Flex, FlexTensor};

/// The backend's own attention, which chooses between its naive and its flash function.
#[derive(Debug, Default)]
pub(super) struct Burn {
    ready: Option<Ready>,
    answer: Option<FlexTensor>,
}

#[derive(Debug)]
struct Ready {
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    /// True where a key is hidden.
    mask: Option<FlexTensor>,
    options: AttentionModuleOptions,
}

impl Peer<Case> for Burn {
    fn name(&self) -> &'static str {
        "burn"
    }

    fn supports(&self, _: &Case) -> std::result::Result<(), String> {
        Ok(())
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        (self.ready, self.answer) = (None, None);
        let Case { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = *case;
        let Qkv { q, k, v } = case.read()?;
        let tensor = |data: Vec<f32>, shape: [usize; 4]| FlexTensor::from_data(TensorData::new(data, shape));
        let hidden = |n: usize| !case.keys(n / kv_len).contains(&(n % kv_len));
        // It has causality as an option, windows only as a mask.
        let mask = case.window.map(|_| (0..q_len * kv_len).map(hidden).collect::<Vec<bool>>());
        self.ready = Some(Ready {
            q: tensor(q, [batch, heads, q_len, head_dim]),
            k: tensor(k, [batch, kv_heads, kv_len, head_dim]),
            v: tensor(v, [batch, kv_heads, kv_len, value_dim]),
            mask: mask.map(|mask| FlexTensor::from_data(TensorData::new(mask, [1, 1, q_len, kv_len]))),
            options: AttentionModuleOptions {
                scale: None,
                softcap: case.softcap.map(f64::from),
                is_causal: case.causal,
            },
        });
        Ok("ModuleOps::attention of burn-flex".to_owned())
    }

    fn run(&mut self) -> Result<()> {
        let Ready { q, k, v, mask, options } = self.ready.as_ref().ok_or("not prepared")?;
        // Clones share their memory.
        self.answer = Some(Flex::attention(q.clone(), k.clone(), v.clone(), mask.clone(), None, *options));
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        let answer = self.answer.clone().ok_or("not prepared")?;
        Ok(answer.into_data().try_to_vec::<f32>().map_err(|e| format!("{e:?}"))?)
    }
}
