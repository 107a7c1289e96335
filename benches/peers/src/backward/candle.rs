//! candle: matmul, softmax, matmul, and back through its own graph.

use super::Step;
use crate::case;
use crate::failure::Result;
use crate::peer::Peer;
use crate::rounded::Qkv;
use candle_core::{D, Device, Tensor, Var};
use candle_nn::ops::softmax;

const UNPREPARED: &str = "not prepared";

/// Query heads that share a key/value head are rows of one matrix, so that nothing is repeated.
#[derive(Debug, Default)]
pub(super) struct Plain {
    ready: Option<Ready>,
    gradients: Vec<Tensor>,
}

#[derive(Debug)]
struct Ready {
    /// q, k and v.
    leaves: [Var; 3],
    d_out: Tensor,
    /// 0 where a row sees a key, −∞ elsewhere.
    mask: Option<Tensor>,
    step: (f64, [usize; 4]),
}

impl Peer<Step> for Plain {
    fn name(&self) -> &'static str {
        "candle"
    }

    fn supports(&self, step: &Step) -> std::result::Result<(), String> {
        step.case.softcap.map_or(Ok(()), |_| Err("no softcap".to_owned()))
    }

    fn prepare(&mut self, step: &Step) -> Result<String> {
        (self.ready, self.gradients) = (None, Vec::new());
        let case = &step.case;
        let (batch, kv_heads, rows) = (case.batch, case.kv_heads, case.group() * case.q_len);
        let Qkv { q, k, v } = case.read()?;
        let tensor = |data, rows, dim| Tensor::from_vec(data, (batch, kv_heads, rows, dim), &Device::Cpu);
        let mask = |i, j| if case.keys(i).contains(&j) { 0.0 } else { f32::NEG_INFINITY };
        let (q_len, kv_len) = (case.q_len, case.kv_len);
        let mask = case.causal.then(|| (0..q_len * kv_len).map(|n| mask(n / kv_len, n % kv_len)).collect());
        let mask = mask.map(|mask: Vec<f32>| Tensor::from_vec(mask, (q_len, kv_len), &Device::Cpu)).transpose()?;
        self.ready = Some(Ready {
            leaves: [
                Var::from_tensor(&tensor(q, rows, case.head_dim)?)?,
                Var::from_tensor(&tensor(k, kv_len, case.head_dim)?)?,
                Var::from_tensor(&tensor(v, kv_len, case.value_dim)?)?,
            ],
            d_out: tensor(case::read(&step.d_out)?, rows, case.value_dim)?,
            mask,
            step: (f64::from(case.scale()), [batch, case.heads, q_len, kv_len]),
        });
        Ok("matmul, softmax, matmul, and Tensor::backward".to_owned())
    }

    fn run(&mut self) -> Result<()> {
        let Ready { leaves: [q, k, v], d_out, mask, step: (scale, by_head) } = self.ready.as_ref().ok_or(UNPREPARED)?;
        // On the queries, which are fewer than the scores.
        let mut scores = (q.as_tensor() * *scale)?.matmul(&k.t()?)?;
        if let Some(mask) = mask {
            let shape = scores.shape().clone();
            let [batch, heads, rows, keys] = *by_head;
            scores = scores.reshape((batch, heads, rows, keys))?.broadcast_add(mask)?.reshape(shape)?;
        }
        let out = softmax(&scores, D::Minus1)?.matmul(v)?;
        let gradients = (out * d_out)?.sum_all()?.backward()?;
        let of = |leaf: &Var| gradients.get(leaf).cloned().ok_or("no gradient");
        self.gradients = [q, k, v].map(of).into_iter().collect::<std::result::Result<_, _>>()?;
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for gradient in &self.gradients {
            all.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(all)
    }
}
