//! candle: matmul–softmax–matmul as its models have it, and its flash attention for CPUs.

use crate::case::{Case, transposed};
use crate::failure::Result;
use crate::peer::Peer;
use crate::rounded::Qkv;
use candle_core::{Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn, flash_attn_varlen_cpu};
use candle_nn::ops::softmax_last_dim;

const UNPREPARED: &str = "not prepared";

/// matmul, softmax, matmul. Query heads that share a key/value head are rows of one matrix, so that nothing is repeated.
#[derive(Debug, Default)]
pub(super) struct Plain {
    ready: Option<PlainReady>,
    answer: Option<Tensor>,
}

#[derive(Debug)]
struct PlainReady {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// 0 where a row sees a key, −∞ elsewhere.
    mask: Option<Tensor>,
    case: Case,
}

impl Peer<Case> for Plain {
    fn name(&self) -> &'static str {
        "candle"
    }

    fn supports(&self, _: &Case) -> std::result::Result<(), String> {
        Ok(())
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        (self.ready, self.answer) = (None, None);
        let Case { batch, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = *case;
        let Qkv { q, k, v } = case.read()?;
        let mask = |i, j| if case.keys(i).contains(&j) { 0.0 } else { f32::NEG_INFINITY };
        let mask = case.causal.then(|| (0..q_len * kv_len).map(|n| mask(n / kv_len, n % kv_len)).collect());
        let mask = mask.map(|mask: Vec<f32>| Tensor::from_vec(mask, (q_len, kv_len), &Device::Cpu)).transpose()?;
        self.ready = Some(PlainReady {
            q: Tensor::from_vec(q, (batch, kv_heads, case.group() * q_len, head_dim), &Device::Cpu)?,
            k: Tensor::from_vec(k, (batch, kv_heads, kv_len, head_dim), &Device::Cpu)?,
            v: Tensor::from_vec(v, (batch, kv_heads, kv_len, value_dim), &Device::Cpu)?,
            mask,
            case: case.clone(),
        });
        Ok("matmul, softmax_last_dim, matmul".to_owned())
    }

    fn run(&mut self) -> Result<()> {
        let PlainReady { q, k, v, mask, case } = self.ready.as_ref().ok_or(UNPREPARED)?;
        // On the queries, which are fewer than the scores.
        let q = (q * f64::from(case.scale()))?;
        let mut scores = q.matmul(&k.t()?)?;
        if let Some(cap) = case.softcap.map(f64::from) {
            scores = ((scores / cap)?.tanh()? * cap)?;
        }
        if let Some(mask) = mask {
            let shape = scores.shape().clone();
            let by_head = (case.batch, case.heads, case.q_len, case.kv_len);
            scores = scores.reshape(by_head)?.broadcast_add(mask)?.reshape(shape)?;
        }
        self.answer = Some(softmax_last_dim(&scores)?.matmul(v)?);
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.answer.as_ref().ok_or(UNPREPARED)?.flatten_all()?.to_vec1()?)
    }
}

/// Its flash attention.
#[derive(Debug, Default)]
pub(super) struct Flash {
    ready: Option<FlashReady>,
    answer: Option<Tensor>,
}

#[derive(Debug)]
struct FlashReady {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    case: Case,
}

/// Rows, heads, elements: what its function for windows takes, a batch laid end to end.
fn flash(case: &Case, data: &[f32], heads: usize, rows: usize) -> Result<Tensor> {
    let data = transposed(data, [case.batch, heads, rows, case.head_dim]);
    Ok(match case.window {
        None => Tensor::from_vec(data, (case.batch, rows, heads, case.head_dim), &Device::Cpu)?,
        Some(_) => Tensor::from_vec(data, (case.batch * rows, heads, case.head_dim), &Device::Cpu)?,
    })
}

impl Peer<Case> for Flash {
    fn name(&self) -> &'static str {
        "candle-flash"
    }

    fn supports(&self, case: &Case) -> std::result::Result<(), String> {
        if case.head_dim != case.value_dim {
            return Err("head_dim and value_dim must be equal".to_owned());
        }
        if case.softcap.is_some() && (case.batch > 1 || case.window.is_some()) {
            return Err("softcap without batch and window only".to_owned());
        }
        Ok(())
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        (self.ready, self.answer) = (None, None);
        let Qkv { q, k, v } = case.read()?;
        self.ready = Some(FlashReady {
            q: flash(case, &q, case.heads, case.q_len)?,
            k: flash(case, &k, case.kv_heads, case.kv_len)?,
            v: flash(case, &v, case.kv_heads, case.kv_len)?,
            case: case.clone(),
        });
        let name = if case.window.is_some() { "flash_attn_varlen_cpu" } else { "flash_attn" };
        Ok(format!("candle_nn::attention::{name}"))
    }

    fn run(&mut self) -> Result<()> {
        let FlashReady { q, k, v, case } = self.ready.as_ref().ok_or(UNPREPARED)?;
        self.answer = Some(if let Some(window) = case.window {
            let lens = |len: usize| Tensor::from_vec(vec![len as u32; case.batch], case.batch, &Device::Cpu);
            let (q_lens, k_lens) = (lens(case.q_len)?, lens(case.kv_len)?);
            let (left, right) = (Some(window - 1), Some(0));
            let (scale, rows, keys) = (case.scale(), case.q_len, case.kv_len);
            flash_attn_varlen_cpu(q, k, v, None, &q_lens, &k_lens, rows, keys, scale, case.causal, left, right)?
        } else {
            let mask = if case.causal { AttnMask::causal() } else { AttnMask::None };
            flash_attn::<f32>(q, k, v, case.scale(), mask, None, case.softcap)?
        });
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        let answer = self.answer.as_ref().ok_or(UNPREPARED)?.flatten_all()?.to_vec1()?;
        let case = &self.ready.as_ref().ok_or(UNPREPARED)?.case;
        // The one for windows gives rows before heads, as it takes them.
        let shape = [case.batch, case.q_len, case.heads, case.value_dim];
        Ok(if case.window.is_some() { transposed(&answer, shape) } else { answer })
    }
}
