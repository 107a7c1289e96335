//! Explanation of a plan: the work it does for a problem, and why.

use crate::plan::Plan;
use crate::plan::problem::Problem;
use core::fmt;
use core::ops::Range;
use sdpa_kernels::{
    Call, Dtype, FAR_ROWS, Isa, KEY_BLOCK, MEMORY_BOUND_ROWS, NoMatrixUnit, OPT_LEVEL, Precision, SelectedKeys,
    Sequence, peak_flops, read_bandwidth,
};

/// Peak rates of a machine: the two numbers of the roofline model.
///
/// ```
/// use sdpa::{Isa, Machine};
/// let machine = Machine::measure(Isa::detect());
/// assert!(machine.flops > 0.0 && machine.bytes > 0.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Floating-point operations per second of one core.
    pub flops: f64,
    /// Bytes per second that one core can read from memory.
    pub bytes: f64,
}

impl Machine {
    /// Measures both rates of one core, in about a tenth of a second.
    pub fn measure(isa: Isa) -> Self {
        Self { flops: peak_flops(isa), bytes: read_bandwidth() }
    }
}

/// Explanation of a plan for one problem. `Display` prints it.
///
/// ```
/// use sdpa::{Attention, Exec, Inputs, Outputs, Plan, View, ViewMut};
/// let (x, mut out) = (vec![0.5; 1024 * 16], vec![0.0; 1024 * 16]);
/// let x = View::bhld(&x, [1, 1, 1024, 16])?;
/// let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 1024, 16])?);
/// let problem = Attention::new().causal().problem(Inputs::new(x, x, x), outputs)?;
/// let explanation = Plan::new(&problem, Exec::default()).explain(&problem, None);
/// assert_eq!(explanation.useful_flops, 2.0 * (16.0 + 16.0) * (1024.0 * 1025.0 / 2.0));
/// assert!(explanation.blocks.1 > 0); // blocks above the diagonal are skipped
/// println!("{explanation}");
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// Plan explained.
    pub plan: Plan,
    /// Numbers of pairs of a tile of query rows and a block of keys: those computed, and those skipped because range
    /// rules or lengths hide them.
    pub blocks: (u64, u64),
    /// Floating-point operations of QKᵀ and PV for the pairs that range rules and lengths leave visible.
    pub useful_flops: f64,
    /// Floating-point operations that are computed: whole panels of 16 keys for whole tiles of rows.
    pub computed_flops: f64,
    /// Bytes of the tensors read and written, each element counted once; keys of several lists at most as often as there are lists.
    pub bytes: f64,
    /// Bytes of keys and values, among [`Self::bytes`], that need not be read again for every sequence, because several
    /// sequences share their memory: forks of a cache, tables that name the same pages in the same entries, and tensors
    /// that a batch broadcasts. Only whole key blocks of split sequences count ([`Plan::partials_bytes`] is not 0). A
    /// block is read once for every 96 rows that share it.
    pub shared_bytes: f64,
    /// Lower bound of the time in seconds by the roofline, if the machine is known: the longer of the times for
    /// arithmetic, with all workers at peak, and for memory at full speed.
    pub seconds: Option<f64>,
    /// Remarks, one reason each.
    pub notes: Vec<String>,
}

impl Plan {
    /// Explains this plan for a problem; with `machine`, also gives a lower bound of its time.
    ///
    /// Complexity: query rows, whatever the number of keys.
    pub fn explain(&self, problem: &Problem<'_>, machine: Option<Machine>) -> Explanation {
        let (call, shape) = (problem.call(), problem.shape);
        let ((tile_rows, _), rates) = (self.tile, call.rates(self.isa));
        let mut tiles = Tiles::default();
        for index in 0..if shape.q_len > 0 && shape.heads > 0 { call.sequence_count() } else { 0 } {
            let sequence = call.sequence(index);
            if let Some(selected) = call.options.selected {
                tiles.add_lists(selected, index, &sequence, tile_rows);
                continue;
            }
            for first in (0..sequence.q_len).step_by(tile_rows) {
                tiles.add(call, &sequence, first..sequence.q_len.min(first + tile_rows));
            }
        }
        let heads = shape.heads as u64;
        // Tiles of lists were added for each head that has lists.
        let lists = call.options.selected.map_or(1, |selected| selected.heads() as u64);
        (tiles.pairs, tiles.computed) = (tiles.pairs / lists as f64, tiles.computed / lists as f64);
        let flops = |pairs: f64| pairs * heads as f64 * 2.0 * (shape.head_dim + shape.value_dim) as f64;
        let (bytes, shared_bytes) = (problem.bytes(), self.shared_bytes(problem));
        let (dims, [k, v]) = ([shape.head_dim as f64, shape.value_dim as f64], rates.products);
        let share = (dims[0] / k + dims[1] / v) / (dims[0] + dims[1]);
        let computing = |m: &Machine| share * flops(tiles.pairs) / m.flops / self.workers as f64;
        let seconds = machine.map(|m| computing(&m).max((bytes - shared_bytes) / m.bytes));
        Explanation {
            plan: *self,
            blocks: (tiles.seen.saturating_mul(heads) / lists, tiles.hidden.saturating_mul(heads) / lists),
            useful_flops: flops(tiles.pairs),
            computed_flops: flops(tiles.computed),
            bytes,
            shared_bytes,
            seconds,
            notes: self.notes(problem),
        }
    }

    /// Returns the bytes of keys and values that split-KV does not read again.
    fn shared_bytes(&self, problem: &Problem<'_>) -> f64 {
        let Some(split_rows) = self.split_rows(problem) else { return 0.0 };
        problem.call().shared_keys(split_rows) as f64 * problem.call().kv.token_bytes() as f64
    }

    fn notes(&self, problem: &Problem<'_>) -> Vec<String> {
        let call = problem.call();
        let mut notes = Vec::new();
        let mut note = |when: bool, text: &str| {
            if when {
                notes.push(text.to_string());
            }
        };
        let widest = Isa::detect();
        note(self.isa != widest, &format!("{} as set; {widest} is the widest here", self.isa));
        note(call.q.strides()[3] != 1, "queries are copied: their elements are not contiguous");
        if let Some([k, v]) = call.kv.tensors() {
            note(k.strides()[3] != 1, "keys are packed element by element: they are not contiguous");
            let whole = problem.shape.value_dim.is_multiple_of(16);
            note(v.strides()[3] != 1, "values are copied: their elements are not contiguous");
            note(v.strides()[3] == 1 && !whole, "values are copied: value_dim is not a multiple of 16");
            let far = v.strides()[2].unsigned_abs().saturating_mul(v.dtype().bytes()) >= FAR_ROWS;
            let many = problem.longest_rows() > MEMORY_BOUND_ROWS && self.tiling.task_rows() > MEMORY_BOUND_ROWS;
            note(v.strides()[3] == 1 && whole && far && many, "values are copied: their rows are 4 KiB or more apart");
        }
        note(
            self.tiling.pack_keys() < KEY_BLOCK,
            "head_dim is large: keys are packed in parts, again for every row block",
        );
        let sides = call.visible.window.map_or([None; 2], |window| window.sides());
        let narrow = matches!(sides, [Some(left), Some(right)] if left.saturating_add(right) < 2 * KEY_BLOCK);
        note(
            narrow,
            "the window is narrow: each tile of rows sees parts of one or two key blocks, so that packing, softmax and \
             outputs take a larger share of the time than in whole rows",
        );
        note(
            call.options.mask.is_some(),
            "the mask is read tile by tile; what it hides wholly is skipped, uncounted here",
        );
        note(
            call.options.selected.is_some(),
            "rows select keys: these alone are computed; what other rules hide of them is uncounted here",
        );
        note(call.options.bias.is_some(), "the bias is read tile by tile and skips nothing");
        note(
            problem.checked.outputs().points.iter().any(Option::is_some),
            "scores are written out, so nothing is skipped",
        );
        note(problem.checked.outputs().key_weight_sums.is_some(), "key weight sums take two more QKᵀ, uncounted here");
        note(self.workers == 1, "one thread: more were not offered, or would not pay");
        notes.extend(self.precision_notes(call));
        notes.extend(self.unit_note(problem).map(str::to_string));
        notes.extend(slow_build(OPT_LEVEL));
        notes
    }

    /// Returns remarks on the precision of products: what it changes here, or why nothing.
    fn precision_notes(&self, call: &Call<'_>) -> Vec<String> {
        let (isa, dtypes) = (self.isa, call.kv.dtypes());
        let native = call.precision == Precision::Native;
        let accurate = call.precision == Precision::Accurate;
        let products = dtypes.into_iter().zip(call.rates(isa).products);
        let pairs = products.into_iter().any(|(dtype, product)| dtype == Some(Dtype::Bf16) && product != 1.0);
        let notes = [
            (
                native && !isa.has_native_bf16(),
                format!("{isa} has no fast bf16 dot product here; Native has no effect"),
            ),
            (
                native && !dtypes.contains(&Some(Dtype::Bf16)),
                "neither keys nor values are bfloat16; Native has no effect".to_string(),
            ),
            (native && pairs, "bfloat16 is multiplied as it is".to_string()),
            (accurate && isa.matrix_unit().is_err(), format!("{isa} has no matrix unit; Accurate has no effect")),
            (
                accurate && dtypes == [None; 2],
                "keys and values have eight bits or fewer; Accurate has no effect".to_string(),
            ),
        ];
        notes.into_iter().filter_map(|(when, note)| when.then_some(note)).collect()
    }

    /// Returns a remark on the machine's matrix unit, if it has one: whether it multiplies, or why not.
    fn unit_note(&self, problem: &Problem<'_>) -> Option<&'static str> {
        let call = problem.call();
        match self.isa.matrix_unit() {
            Err(NoMatrixUnit::Refused) if self.isa == Isa::detect() => {
                return Some("the system does not let this process use the machine's matrix unit");
            }
            Err(_) => return None,
            Ok(()) if call.rates(self.isa).unit => return Some("the matrix unit multiplies"),
            Ok(()) => {}
        }
        Some(match call.kv.dtypes() {
            [Some(Dtype::Bf16), Some(Dtype::Bf16)] => {
                "the matrix unit multiplies bfloat16 only with Precision::Native or Precision::Accurate"
            }
            [None, _] => {
                "of caches of eight and four bits, the matrix unit multiplies int8 with keys of a multiple of 64 elements"
            }
            _ => {
                "the matrix unit multiplies bfloat16 and bytes: keys and values are not both of these, so only with \
                 Precision::Accurate"
            }
        })
    }
}

/// Returns a remark if the kernels were optimised for size, or not at all.
fn slow_build(opt_level: &str) -> Option<String> {
    matches!(opt_level, "0" | "s" | "z").then(|| {
        format!(
            "sdpa-kernels was compiled with opt-level \"{opt_level}\": calls take several times as long; set opt-level = 3 for \
             this package in your profile"
        )
    })
}

/// Tiles of rows against key blocks, of one query head.
#[derive(Default)]
struct Tiles {
    /// Numbers of tiles that see a key of their block, and of those that see none; [`u64::MAX`] on overflow.
    seen: u64,
    hidden: u64,
    /// Number of visible pairs of a row and a key.
    pairs: f64,
    /// Number of computed pairs: the key range of each tile, in whole panels.
    computed: f64,
}

impl Tiles {
    /// Adds the tiles of a sequence whose rows select keys, for each head that has lists. Rules by position are not counted.
    fn add_lists(&mut self, selected: &SelectedKeys, index: usize, sequence: &Sequence, tile_rows: usize) {
        for head in 0..selected.heads() {
            for first in (0..sequence.q_len).step_by(selected.rows()) {
                let rows = selected.rows().min(sequence.q_len - first);
                let keys = selected.key_count(index, head, first, sequence.kv_len);
                self.pairs += rows as f64 * keys as f64;
                self.computed += rows as f64 * keys.next_multiple_of(16) as f64;
                let tiles = rows.div_ceil(tile_rows) * keys.div_ceil(KEY_BLOCK);
                self.seen = self.seen.saturating_add(tiles as u64);
            }
        }
    }

    /// Adds the tiles of some rows of a sequence.
    fn add(&mut self, call: &Call<'_>, sequence: &Sequence, rows: Range<usize>) {
        let ranges = || {
            let keys = rows.clone().map(|row| call.keys_of_row(sequence, row));
            keys.flat_map(|keys| [(0, keys.prefix), (keys.start, keys.end)])
        };
        let mut first = 0;
        while first < sequence.kv_len {
            let last = sequence.kv_len.min(first + KEY_BLOCK);
            let (mut pairs, mut low, mut high) = (0, last, first);
            for (from, to) in ranges().map(|(from, to)| (from.max(first), to.min(last))).filter(|(from, to)| from < to)
            {
                pairs += to - from;
                (low, high) = (low.min(from), high.max(to));
            }
            // Blocks before the next key where a range begins or ends are like this one.
            let next = ranges().flat_map(|(from, to)| [from, to]).filter(|&key| key > first).min();
            let alike = ((next.map_or(sequence.kv_len, |next| next.min(sequence.kv_len)) - first) / KEY_BLOCK).max(1);
            let width = if low < high { high.next_multiple_of(16) - low / 16 * 16 } else { 0 };
            self.pairs += pairs as f64 * alike as f64;
            self.computed += (width * rows.len()) as f64 * alike as f64;
            let count = if width > 0 { &mut self.seen } else { &mut self.hidden };
            *count = count.saturating_add(alike as u64);
            first += alike * KEY_BLOCK;
        }
    }
}

impl Problem<'_> {
    /// Bytes of the tensors, each element counted once however often it is read.
    fn bytes(&self) -> f64 {
        let elements = |shape: [usize; 4]| shape.iter().map(|&n| n as f64).product::<f64>();
        let (call, outputs) = (self.call(), self.checked.outputs());
        let listed = |index: usize| {
            let (selected, mean) = (call.options.selected?, call.keys_of_list(index)?);
            let groups = selected.q_lens()[index].div_ceil(selected.rows());
            Some((mean * groups as f64).min(call.sequence(index).kv_len as f64))
        };
        let keys = match call.kv.tensors() {
            _ if call.options.selected.is_some() => (0..call.sequence_count()).filter_map(listed).sum(),
            Some([k, _]) => k.shape()[0] as f64 * k.shape()[2] as f64,
            None => (0..call.sequence_count()).map(|index| call.sequence(index).kv_len as f64).sum(),
        };
        let keys = keys * call.kv.kv_heads() as f64 * call.kv.token_bytes() as f64;
        let out = outputs.out.as_ref();
        let ends = elements(call.q.shape()) * call.q.dtype().bytes() as f64
            + out.map_or(0.0, |out| elements(out.shape()) * out.dtype().bytes() as f64);
        let bias = call.options.bias.map_or(0.0, |bias| elements(bias.of.shape()) * bias.of.dtype().bytes() as f64);
        let floats = outputs.points.iter().flatten().map(|view| elements(view.shape())).sum::<f64>();
        keys + ends + bias + 4.0 * floats + call.options.mask.map_or(0.0, |mask| elements(mask.of.view().shape()))
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.plan)?;
        let (computed, skipped) = self.blocks;
        writeln!(f, "tiles of rows against key blocks: {computed} computed, {skipped} skipped")?;
        let percent = 100.0 * self.useful_flops / self.computed_flops.max(1.0);
        writeln!(f, "{:.3} GFLOP useful, {percent:.0} % of what is computed", self.useful_flops / 1e9)?;
        write!(f, "{:.1} MB of tensors", self.bytes / 1e6)?;
        if self.shared_bytes > 0.0 {
            write!(f, ", {:.1} MB of them shared and not read again", self.shared_bytes / 1e6)?;
        }
        if let Some(seconds) = self.seconds {
            write!(f, ", at least {:.3} ms", seconds * 1e3)?;
        }
        for note in &self.notes {
            write!(f, "\n- {note}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::slow_build;

    #[test]
    fn builds_that_make_calls_slow_are_named() {
        for level in ["0", "s", "z"] {
            let note = slow_build(level).expect("slow");
            assert!(note.contains(&format!("opt-level \"{level}\"")) && note.contains("opt-level = 3"), "{note}");
        }
        assert!(["1", "2", "3"].into_iter().all(|level| slow_build(level).is_none()));
    }
}
