//! tract: the flash attention that its models of transformers are rewritten to.

use crate::case::Case;
use crate::failure::Result;
use crate::peer::Peer;
use crate::rounded::Qkv;
use tract_nnef::tract_ndarray::Array4;
use tract_transformers::ops::flash_sdpa::FlashSdpaOp;

/// What a mask adds to hide a key. Of −∞ it makes NaN, if a row sees nothing of the first block that is not skipped.
const HIDDEN: f32 = -1e30;

/// `FlashSdpaOp` on arrays, heads shared out by rayon.
#[derive(Debug, Default)]
pub(super) struct Tract {
    ready: Option<Ready>,
    answer: Option<Array4<f32>>,
}

#[derive(Debug)]
struct Ready {
    op: FlashSdpaOp,
    q: Array4<f32>,
    k: Array4<f32>,
    v: Array4<f32>,
    /// 0 where a row sees a key, [`HIDDEN`] elsewhere.
    mask: Option<Array4<f32>>,
}

impl Peer<Case> for Tract {
    fn name(&self) -> &'static str {
        "tract"
    }

    fn supports(&self, case: &Case) -> std::result::Result<(), String> {
        if case.head_dim != case.value_dim {
            return Err("head_dim and value_dim must be equal".to_owned());
        }
        case.softcap.map_or(Ok(()), |_| Err("no softcap".to_owned()))
    }

    fn prepare(&mut self, case: &Case) -> Result<String> {
        (self.ready, self.answer) = (None, None);
        let Case { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = *case;
        let Qkv { q, k, v } = case.read()?;
        // Blocks of 32 × 32 that a mask hides are skipped; its own causal rule computes them all.
        let mask = |(_, _, i, j): (usize, usize, usize, usize)| {
            if case.keys(i).contains(&j) { 0.0 } else { HIDDEN }
        };
        self.ready = Some(Ready {
            op: FlashSdpaOp { causal: false, scale: Some(case.scale()) },
            q: Array4::from_shape_vec((batch, heads, q_len, head_dim), q)?,
            k: Array4::from_shape_vec((batch, kv_heads, kv_len, head_dim), k)?,
            v: Array4::from_shape_vec((batch, kv_heads, kv_len, value_dim), v)?,
            mask: case.causal.then(|| Array4::from_shape_fn((1, 1, q_len, kv_len), mask)),
        });
        Ok(format!("FlashSdpaOp{}", if case.causal { ", causal and window as a mask" } else { "" }))
    }

    fn run(&mut self) -> Result<()> {
        let Ready { op, q, k, v, mask } = self.ready.as_ref().ok_or("not prepared")?;
        let mask = mask.as_ref().map(|mask| mask.view());
        self.answer = Some(op.flash_attention_gqa(q.view(), k.view(), v.view(), mask));
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.answer.as_ref().ok_or("not prepared")?.iter().copied().collect())
    }
}
