//! Tiling: the sizes of tasks and row blocks, how much is packed at once, and the scratch that a worker needs. Plain
//! data; no bit of a result depends on any of it.

use crate::kv::value_panels::VALUE_COLS;
use crate::matmul::int8::QuerySize;
use crate::matmul::{bf16_parts, int4};
use crate::simd::LANES;
use crate::simd::tiles::BLOCK;
use crate::simd::width::LINE_BYTES;
use crate::tensor::rows::{KEY_BLOCK, MAX_DIM};

/// Number of floats from one row of scores to the next. One vector more than a key block: otherwise the rows of a tile,
/// read side by side, would all map to a few sets of the first-level cache.
pub(crate) const SCORE_STRIDE: usize = KEY_BLOCK + LANES;

/// Maximum number of rows in a row block: their scores are held at once. 96 rows of 256 scores are 104 KB, in
/// the second-level cache beside the key block's keys and values.
pub const MAX_ROW_BLOCK: usize = 96;
const _: () = assert!(MAX_ROW_BLOCK.is_multiple_of(LANES));

/// Maximum number of rows in a task. A task packs each key block once, so more rows mean less packing (1.3 % of the
/// work at 384 rows, head_dim 64), but also fewer tasks to share out and more state to keep in cache.
pub const MAX_TASK: usize = 384;

/// Number of floats of packed keys held at once: 256 keys of head_dim 288, or of 576 in 16 bits, as latent keys have.
const KEY_FLOATS: usize = 72 * 1024;
/// Number of floats of running output, and of packed queries, held by a task.
const ROW_FLOATS: usize = 48 * 1024;
/// Maximum number of rows of a key/value head for which its key blocks are divided among workers.
pub const MAX_SPLIT_ROWS: usize = 128;
/// Maximum number of floats of such rows' queries in one task: 128 heads of multi-head latent attention, of 576
/// elements, in whole tiles.
const SPLIT_ROW_FLOATS: usize = 75 * 1024;

/// Sizes of the tasks and row blocks of a call, and how much is packed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Length of a query or key.
    pub(crate) head_dim: usize,
    /// Length of a value.
    pub(crate) value_dim: usize,
    /// Number of query rows of a task, over the heads that share a key/value head.
    pub(crate) task_rows: usize,
    /// Number of rows that scratch is reserved for: the maximum for these dimensions, so that the size of scratch does
    /// not depend on lengths. Scratch that a short call does not touch costs address space, not memory.
    pub(crate) most_rows: usize,
    /// Number of keys of a block that scratch is reserved for.
    block_keys: usize,
    /// Maximum number of keys of a block packed at once.
    pub(crate) pack_keys: usize,
    /// Number of value columns of a block packed at once, if values are packed at all.
    pub(crate) pack_cols: usize,
    /// Largest number of [parts](crate::matmul::bf16_parts) of an operand that scratch is reserved for; 0 if operands have none.
    pub(crate) parts: usize,
    /// Number of floats of a block that keys of several blocks are gathered in; 0 if none are.
    pub(crate) gathered: usize,
}

impl Tiling {
    /// Creates the tiling for these dimensions, with tasks of at most `rows` rows, in whole tiles of `tile_rows`.
    ///
    /// # Panics
    /// If a dimension is larger than [`MAX_DIM`], or tiles have no rows.
    pub fn new(head_dim: usize, value_dim: usize, rows: usize, tile_rows: usize) -> Self {
        assert!(head_dim <= MAX_DIM && value_dim <= MAX_DIM && tile_rows > 0, "a dimension beyond MAX_DIM");
        let pack_keys = (KEY_FLOATS / head_dim.max(1) / LANES * LANES).clamp(LANES, KEY_BLOCK);
        let width = value_dim.next_multiple_of(LANES);
        let pack_cols = VALUE_COLS.min(width.max(LANES));
        let whole = |rows: usize| if rows > tile_rows { rows / tile_rows * tile_rows } else { rows.max(1) };
        let fits = ROW_FLOATS / head_dim.max(width).max(1);
        // If a block's keys or values do not fit at once, they are packed again for every row block: then a task has
        // only one.
        let most = if pack_keys < KEY_BLOCK || pack_cols < width { MAX_ROW_BLOCK } else { MAX_TASK };
        let most_task = whole(most.min(fits));
        let task_rows = whole(rows.min(most_task));
        let most_split = MAX_SPLIT_ROWS.next_multiple_of(tile_rows);
        let most_rows = match most_split * head_dim.max(width) <= SPLIT_ROW_FLOATS {
            true => most_task.max(most_split),
            false => most_task,
        };
        Self {
            head_dim,
            value_dim,
            task_rows,
            most_rows,
            block_keys: KEY_BLOCK,
            pack_keys,
            pack_cols,
            parts: 0,
            gathered: 0,
        }
    }

    /// Returns this tiling with scratch for operands of up to `parts` parts.
    ///
    /// # Panics
    /// If these are more than [`MAX_PARTS`](crate::MAX_PARTS).
    #[must_use]
    pub fn with_parts(self, parts: usize) -> Self {
        assert!(parts <= bf16_parts::MAX_PARTS, "{parts} parts");
        Self { parts, ..self }
    }

    /// Returns this tiling with room for the keys and values of a block that are gathered from several, in so many floats.
    #[must_use]
    pub fn with_gathered(self, floats: usize) -> Self {
        Self { gathered: floats, ..self }
    }

    /// Returns true if there is room for gathered keys and values of so many floats.
    pub fn has_gathered(&self, floats: usize) -> bool {
        floats <= self.gathered
    }

    /// Returns true if there is scratch for operands of up to `parts` parts.
    pub fn has_parts(&self, parts: usize) -> bool {
        parts <= self.parts
    }

    /// Creates the tiling for split-KV, where a task is a key block with all the `rows` rows that share its head: like
    /// [`Self::new`], but a task holds all of them, if they are at most [`MAX_SPLIT_ROWS`] and not too long. Keys and
    /// values that do not fit at once are then packed once for each of two row blocks, which costs less than idle
    /// workers.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn for_split(head_dim: usize, value_dim: usize, rows: usize, tile_rows: usize) -> Self {
        let rows = rows.min(MAX_SPLIT_ROWS).next_multiple_of(tile_rows);
        let tiling = Self::new(head_dim, value_dim, rows, tile_rows);
        Self { task_rows: rows.min(tiling.most_rows), ..tiling }
    }

    /// Creates the tiling of the backward pass: a task is one row block, of [`MAX_ROW_BLOCK`] rows whatever the
    /// dimensions, because the order of its sums depends on that.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn for_backward(head_dim: usize, value_dim: usize, tile_rows: usize) -> Self {
        let rows = MAX_ROW_BLOCK;
        let tiling = Self::new(head_dim, value_dim, rows, tile_rows);
        Self { task_rows: rows, most_rows: rows, ..tiling }
    }

    /// Returns this tiling with only the scratch that `kv_len` keys take, for a call that does not keep its scratch.
    /// Otherwise allocating it would take a quarter of a tiny call's time.
    #[must_use]
    pub fn shrink_to(self, kv_len: usize) -> Self {
        let block_keys = kv_len.clamp(1, KEY_BLOCK).next_multiple_of(LANES);
        Self { most_rows: self.task_rows, block_keys, pack_keys: self.pack_keys.min(block_keys), ..self }
    }

    /// Maximum number of rows of several sequences that are computed together: a row block, as far as there is scratch.
    pub(crate) fn shared_rows(&self) -> usize {
        self.most_rows.min(MAX_ROW_BLOCK)
    }

    /// Returns true if there is scratch for the blocks of a sequence of `kv_len` keys.
    pub(crate) fn holds(&self, kv_len: usize) -> bool {
        kv_len.min(KEY_BLOCK) <= self.block_keys
    }

    /// Number of query rows of a task, over the heads that share a key/value head.
    pub fn task_rows(&self) -> usize {
        self.task_rows
    }

    /// Largest number of rows of a row block; their scores are computed together. Row blocks of one task do not share a vector
    /// of row states, as [`MAX_ROW_BLOCK`] is whole vectors.
    pub fn row_block_rows(&self) -> usize {
        self.task_rows.min(MAX_ROW_BLOCK)
    }

    /// Number of keys of a block packed at once.
    pub fn pack_keys(&self) -> usize {
        self.pack_keys
    }

    /// Number of floats from one row of running output to the next.
    #[inline]
    pub(crate) fn width(&self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Returns the number of floats that a query takes in any form.
    pub(crate) fn query_floats(&self) -> usize {
        let d = self.head_dim;
        self.key_floats().max(QuerySize::int8(d).floats()).max(int4::query_size(d).floats())
    }

    /// Returns the number of floats that a packed key takes; of short keys too as much as integers and their scales take.
    fn key_floats(&self) -> usize {
        let of_parts = if self.parts > 1 { bf16_parts::floats(self.head_dim, self.parts) } else { 0 };
        self.head_dim.max(LANES).max(of_parts)
    }

    /// Returns the lengths in floats of the regions of a worker's scratch, in the order of [`Regions`](super::Regions).
    #[inline]
    pub(super) fn lengths(&self) -> [usize; 8] {
        let (rows, group) = (self.most_rows, self.most_rows.min(MAX_ROW_BLOCK));
        let (values, behind) = match self.parts {
            0 | 1 => (self.block_keys, 0),
            parts => (bf16_parts::floats(self.block_keys, parts), BLOCK),
        };
        [
            self.pack_keys * self.key_floats(),
            values * self.pack_cols,
            // Parts of the weights of a row block lie behind it. Room for a query, before it is stored.
            ((group + behind) * SCORE_STRIDE).max(self.head_dim.next_multiple_of(LANES)),
            rows * self.width(),
            rows * self.query_floats(),
            2 * rows.next_multiple_of(LANES),
            2 * group.next_multiple_of(LANES),
            self.gathered,
        ]
        .map(|floats| floats.next_multiple_of(LANES))
    }

    /// Returns the bytes of scratch that each worker needs. Independent of the number of rows and keys; at most 1.25 MiB
    /// for dimensions up to 4096, 1.75 MiB with operands in parts; and a block of 256 keys and values of a head where selected keys
    /// are gathered.
    pub fn scratch_bytes(&self) -> usize {
        self.lengths().iter().sum::<usize>() * size_of::<f32>() + LINE_BYTES
    }
}
