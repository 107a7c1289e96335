//! States of query rows over each single key block, kept until the state over earlier keys is there to fold them into: split-KV
//! with blocks on several machines.

use crate::attention::call::Sequence;
use crate::attention::call::checked::CheckedCall;
use crate::attention::schedule::launch::Launch;
use crate::attention::schedule::merge::merge_states;
use crate::attention::schedule::partials::Partials;
use crate::attention::schedule::split_sequences::{SplitRows, Then};
use crate::attention::scratch::Tiling;
use crate::simd::isa::Isa;

/// States (maximum, sum, output) of the query rows of a call over each of its key blocks. Memory grows to the size calls need
/// and is kept.
#[derive(Debug, Default)]
pub struct BlockStates {
    partials: Partials,
    /// Sequences of the call.
    sequences: Vec<Sequence>,
    /// Batch, heads and rows of q, and floats of an output, in whole vectors.
    shape: [usize; 4],
    kv_heads: usize,
}

impl BlockStates {
    /// Creates empty memory; the first launch allocates.
    pub const fn new() -> Self {
        Self { partials: Partials::new(), sequences: Vec::new(), shape: [0; 4], kv_heads: 0 }
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        self.partials.bytes() + self.sequences.capacity() * size_of::<Sequence>()
    }

    /// Batch, heads and rows of the queries, and the number of floats of an output, in whole vectors.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Returns a launch that computes the states of a call, in about `runs` pieces of work. `None` if there is no memory; then
    /// there are no states.
    ///
    /// # Panics
    /// If the tiling is for other sizes, or more rows share a key/value head than a task of it has.
    pub fn launch<'a>(&'a mut self, checked: CheckedCall<'a>, tiling: Tiling, runs: usize) -> Option<Launch<'a>> {
        let (call, [batch, heads, rows, _]) = (checked.call(), checked.call().q.shape());
        self.shape = [0; 4];
        self.sequences.clear();
        self.sequences.try_reserve(call.sequence_count()).ok()?;
        self.sequences.extend((0..call.sequence_count()).map(|sequence| call.sequence(sequence)));
        self.kv_heads = call.kv.kv_heads();
        let most_rows = (0..call.sequence_count()).map(|sequence| call.rows_of(sequence)).max().unwrap_or(0);
        let split = SplitRows { most_rows, runs, few_bytes: None, then: Then::Apart };
        let launch = Launch::new(checked, tiling, Some(split), &mut self.partials);
        if !launch.is_split() {
            return None;
        }
        self.shape = [batch, heads, rows, tiling.width()];
        Some(launch)
    }

    /// Folds the states of all blocks, in the order of their keys, into states over earlier keys: maxima, sums, `[batch, heads,
    /// rows]`, and outputs, `[batch, heads, rows, floats]`, the floats that [`Self::shape`] says. Together they have the bits of
    /// one pass over all keys.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn fold_into(&self, isa: Isa, [max, sum, out]: [&mut [f32]; 3]) {
        let [batch, heads, rows, width] = self.shape;
        let all = batch * heads * rows;
        assert!(max.len() == all && sum.len() == all && out.len() == all * width, "states of other rows");
        let group_size = heads / self.kv_heads.max(1);
        for entry in self.partials.entries() {
            for head in 0..heads {
                let sequence = &self.sequences[entry.sequence];
                let first = (sequence.q_batch * heads + head) * rows + sequence.first_row;
                let (here, q_len) = (first..first + sequence.q_len, sequence.q_len);
                // Rows of the heads that share a key/value head follow one another.
                let of_part = head % group_size * q_len..(head % group_size + 1) * q_len;
                for [later_max, later_sum, later_out] in self.partials.parts(entry, [head / group_size, width]) {
                    merge_states(
                        isa,
                        width,
                        [
                            &mut max[here.clone()],
                            &mut sum[here.clone()],
                            &mut out[here.start * width..here.end * width],
                        ],
                        [
                            &later_max[of_part.clone()],
                            &later_sum[of_part.clone()],
                            &later_out[of_part.start * width..of_part.end * width],
                        ],
                    );
                }
            }
        }
    }
}
