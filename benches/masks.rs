//! Times mask functions: a few keys of each row, and documents, against the same call without a mask. Cases alternate
//! on one thread, medians. `cargo bench --bench masks`.

#[path = "support/interleaved.rs"]
mod interleaved;
mod support;

use interleaved::{medians, random};
use sdpa::masks::Documents;
use sdpa::{
    Attention, BlockClass, BlockPosition, Exec, Inputs, Isa, Mask, MaskMod, Mods, Outputs, Plan, Position, Run, View,
    ViewMut, Workspace,
};

const HEADS: usize = 2;
const DIM: usize = 64;
const PANEL: usize = 16;
/// Number of keys that a row keeps.
const KEPT: usize = 64;

/// Keys that each row keeps, as sorted lists.
#[derive(Clone, Copy)]
struct Lists<'a>(&'a [Vec<usize>]);

impl MaskMod for Lists<'_> {
    fn keep(&self, at: Position) -> bool {
        self.0[at.row].binary_search(&at.key).is_ok()
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        if block.rows.len() > 1 {
            return BlockClass::Mixed;
        }
        let row = &self.0[block.rows.start];
        let next = row.get(row.partition_point(|&key| key < block.keys.start));
        if next.is_some_and(|&key| key < block.keys.end) { BlockClass::Mixed } else { BlockClass::None }
    }
}

/// Keys that each row keeps, as bits, `[row][panel of 16 keys]`.
#[derive(Clone, Copy)]
struct Bits<'a> {
    panels: usize,
    words: &'a [u16],
}

impl MaskMod for Bits<'_> {
    fn keep(&self, at: Position) -> bool {
        self.words[at.row * self.panels + at.key / PANEL] >> (at.key % PANEL) & 1 == 1
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        if block.rows.len() > 1 {
            return BlockClass::Mixed;
        }
        let row = &self.words[block.rows.start * self.panels..][..self.panels];
        match &row[block.keys.start / PANEL..block.keys.end.div_ceil(PANEL)] {
            [u16::MAX] => BlockClass::All,
            words if words.iter().all(|&word| word == 0) => BlockClass::None,
            _ => BlockClass::Mixed,
        }
    }
}

/// A mask, and a function that finds a row's keys one after another.
struct Found<M, N>(M, N);

impl Lists<'_> {
    /// Returns the first key of a block of one row that the row keeps, or the end of the block.
    fn next(&self, block: &BlockPosition) -> usize {
        let (row, keys) = (&self.0[block.rows.start], &block.keys);
        row.get(row.partition_point(|&key| key < keys.start)).map_or(keys.end, |&key| key.min(keys.end))
    }
}

impl Bits<'_> {
    /// Returns the first key of a block of one row that the row keeps, or the end of the block.
    fn next(&self, block: &BlockPosition) -> usize {
        let (row, keys) = (&self.words[block.rows.start * self.panels..][..self.panels], &block.keys);
        let mut hidden = !(u16::MAX << (keys.start % PANEL));
        let panels = keys.start / PANEL..keys.end.div_ceil(PANEL);
        for (panel, word) in panels.clone().zip(&row[panels]) {
            let word = word & !core::mem::take(&mut hidden);
            if word != 0 {
                return keys.end.min(panel * PANEL + word.trailing_zeros() as usize);
            }
        }
        keys.end
    }
}

impl<M: MaskMod, N: Fn(&M, &BlockPosition) -> usize + Send + Sync> MaskMod for Found<M, N> {
    fn keep(&self, at: Position) -> bool {
        self.0.keep(at)
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        self.0.class(block)
    }

    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        Some(self.1(&self.0, &block))
    }
}

/// Tensors of a call, and somewhere to write.
struct Tensors {
    rows: usize,
    keys: usize,
    qkv: [Vec<f32>; 3],
}

impl Tensors {
    fn new(rows: usize, keys: usize) -> Self {
        let qkv = [(rows, 1), (keys, 2), (keys, 3)].map(|(len, seed)| random(HEADS * len * DIM, seed));
        Self { rows, keys, qkv }
    }

    fn run<'a, M: MaskMod + 'a>(&'a self, isa: Isa, bytes: Option<&'a [u8]>, mask: M) -> impl FnMut() + 'a {
        let [q, k, v] = &self.qkv;
        let view = |x, len| View::bhld(x, [1, HEADS, len, DIM]).expect("dense");
        let inputs = Inputs::new(view(q, self.rows), view(k, self.keys), view(v, self.keys));
        let inputs = bytes.map_or(inputs, |bytes| {
            inputs.mask(Mask::Keep(View::bhld(bytes, [1, 1, self.rows, self.keys]).expect("dense")))
        });
        let (mods, mut workspace, mut out) = (Mods::new().mask(mask), Workspace::new(), vec![0.0; q.len()]);
        move || {
            let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, HEADS, self.rows, DIM]).expect("dense"));
            let problem = Attention::new().problem(inputs, outputs).expect("a good call");
            let plan = Plan::new(&problem, Exec::serial().isa(isa));
            problem.run_with(&plan, &mut workspace, Run::new().mods(&mods)).expect("functions that fit");
        }
    }
}

/// Lists of random keys, the same for `together` rows next to each other.
fn strewn(rows: usize, keys: usize, together: usize) -> Vec<Vec<usize>> {
    let mut numbers = random(rows.div_ceil(together) * KEPT, 4).into_iter();
    let mut list = || {
        let mut list: Vec<usize> =
            numbers.by_ref().take(KEPT).map(|x| (x.abs() * 1e6) as usize * 7919 % keys).collect();
        list.sort_unstable();
        list
    };
    let lists: Vec<Vec<usize>> = (0..rows.div_ceil(together)).map(|_| list()).collect();
    (0..rows).map(|row| lists[row / together].clone()).collect()
}

fn few_keys(isa: Isa, rounds: usize, [rows, keys]: [usize; 2]) {
    let tensors = Tensors::new(rows, keys);
    let (own, shared) = (strewn(rows, keys, 1), strewn(rows, keys, 64));
    let mut words = vec![0u16; rows * keys / PANEL];
    let mut bytes = vec![0u8; rows * keys];
    for (row, &key) in own.iter().enumerate().flat_map(|(row, list)| list.iter().map(move |key| (row, key))) {
        words[(row * keys + key) / PANEL] |= 1 << (key % PANEL);
        bytes[row * keys + key] = 1;
    }
    let bits = Bits { panels: keys / PANEL, words: &words };
    let times = medians(
        rounds,
        [
            &mut tensors.run(isa, None, ()),
            &mut tensors.run(isa, None, bits),
            &mut tensors.run(isa, None, Found(bits, Bits::next)),
            &mut tensors.run(isa, None, Lists(&own)),
            &mut tensors.run(isa, None, Found(Lists(&own), Lists::next)),
            &mut tensors.run(isa, None, Lists(&shared)),
            &mut tensors.run(isa, Some(&bytes), ()),
            &mut tensors.run(isa, None, |at: Position| bits.keep(at)),
        ],
    );
    let names = [
        "no mask",
        "bits, class",
        "bits, next_kept",
        "lists, class",
        "lists, next_kept",
        "lists, class, alike for 64 rows",
        "mask tensor",
        "bits, closure",
    ];
    println!("\n{KEPT} random keys of {keys} a row, {rows} rows, {HEADS} heads of {DIM}, {isa}");
    for (name, time) in names.iter().zip(times) {
        println!("{name:32} {:9.3} ms  {:.3} of no mask", time * 1e3, time / times[0]);
    }
}

fn documents(isa: Isa, rounds: usize, [len, document]: [usize; 2]) {
    let tensors = Tensors::new(len, len);
    let ends: Vec<usize> = (1..=len / document).map(|n| n * document).collect();
    let mask = Documents::by_ends(&ends).expect("in order");
    let times = medians(
        rounds,
        [
            &mut tensors.run(isa, None, ()),
            &mut tensors.run(isa, None, mask.clone()),
            &mut tensors.run(isa, None, |at: Position| at.row / document == at.key / document),
        ],
    );
    println!("\ndocuments of {document} in {len} rows and keys, {HEADS} heads of {DIM}, {isa}");
    for (name, time) in ["no mask", "masks::Documents", "closure"].iter().zip(times) {
        println!("{name:32} {:9.3} ms  {:.3} of no mask", time * 1e3, time / times[0]);
    }
}

fn main() {
    support::print_machine();
    let test = support::test_mode();
    for isa in Isa::available().filter(|isa| isa.name() != "portable") {
        few_keys(isa, if test { 1 } else { 7 }, if test { [64, 512] } else { [1024, 8192] });
        documents(isa, if test { 1 } else { 3 }, if test { [64, 16] } else { [8192, 128] });
    }
}
