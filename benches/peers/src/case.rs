//! One workload as it is handed to those who compute it: numbers in words, tensors in files.

use crate::elements::Elements;
use crate::failure::Result;
use crate::rounded::{Qkv, Rounded};
use crate::support::Workload;
use crate::workloads::{self, Values};
use sdpa::Shape;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// What to compute, on how many threads, in elements of what type. Scale 1/√head_dim, causal rows and keys aligned.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) threads: usize,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) causal: bool,
    /// Keys that a row sees at most, its own included.
    pub(crate) window: Option<usize>,
    pub(crate) softcap: Option<f32>,
    pub(crate) elements: Elements,
    /// Place of the values; v has a file in any case.
    pub(crate) values: Values,
    /// q, k and v: `[batch, heads, rows, dim]`, f32 that `elements` can hold, native byte order, nothing else in the file.
    pub(crate) files: [PathBuf; 3],
}

impl Case {
    /// Writes a workload's tensors to a folder.
    pub(crate) fn write(tensors: &Rounded, threads: usize, folder: &Path) -> Result<Self> {
        let Workload { name, shape, causal, window, softcap } = tensors.workload;
        let Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
        let files = ["q", "k", "v"].map(|part| folder.join(part));
        let Qkv { q, k, v } = &tensors.qkv;
        for (file, part) in files.iter().zip([q, k, v]) {
            write(file, part)?;
        }
        Ok(Self {
            name: name.to_owned(),
            threads,
            batch,
            heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            causal,
            window: window.map(usize::from),
            softcap,
            elements: tensors.elements,
            values: Values::of(&tensors.workload),
            files,
        })
    }

    pub(crate) fn read(&self) -> Result<Qkv> {
        let [q, k, v] = &self.files;
        Ok(Qkv { q: read(q)?, k: read(k)?, v: read(v)? })
    }

    /// The workload by that name.
    pub(crate) fn workload(&self) -> Workload {
        workloads::by_name(&self.name).expect("named by the same program")
    }

    /// Query heads that share a key/value head.
    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    pub(crate) fn scale(&self) -> f32 {
        self.workload().attention().scale_for(self.head_dim)
    }

    /// The keys that a row sees.
    pub(crate) fn keys(&self, row: usize) -> std::ops::Range<usize> {
        if !self.causal {
            return 0..self.kv_len;
        }
        let end = (row + 1).min(self.kv_len);
        end.saturating_sub(self.window.unwrap_or(end))..end
    }
}

/// Writes numbers and nothing else.
pub(crate) fn write(file: &Path, data: &[f32]) -> Result<()> {
    let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_ne_bytes()).collect();
    fs::write(file, bytes).map_err(|e| format!("{}: {e}", file.display()).into())
}

/// Reads what [`write`] wrote.
pub(crate) fn read(file: &Path) -> Result<Vec<f32>> {
    let bytes = fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(bytes.as_chunks().0.iter().map(|&x| f32::from_ne_bytes(x)).collect())
}

/// `[batch, a, b, dim]` as `[batch, b, a, dim]`: heads and rows change places. Some peers take their tensors that way.
pub(crate) fn transposed(data: &[f32], [batch, a, b, dim]: [usize; 4]) -> Vec<f32> {
    let mut out = Vec::with_capacity(data.len());
    for n in 0..batch {
        for j in 0..b {
            for i in 0..a {
                out.extend_from_slice(&data[((n * a + i) * b + j) * dim..][..dim]);
            }
        }
    }
    out
}
