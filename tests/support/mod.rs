//! What the integration tests share: seeded data, tensors in any layout, one way to run, and comparisons that say where.
#![allow(dead_code, unreachable_pub, reason = "every test binary compiles this module and uses its part of it")]

use core::ops::Range;
use sdpa::{Alignment, Attention, Exec, Inputs, Isa, Outputs, Plan, View, ViewMut, Workspace};

/// What outputs hold before a run: a NaN that no arithmetic makes, so that an element never written shows.
pub const UNWRITTEN: u32 = 0x7fc5_a5a5;

/// Returns how many of `cases` random cases are made: an emulator is slow, so `.ci/aarch64` sets `SDPA_FEWER` to a divisor.
pub fn fewer(cases: u64) -> u64 {
    match std::env::var("SDPA_FEWER") {
        Err(_) => cases,
        Ok(divisor) => cases.div_ceil(divisor.parse().expect("SDPA_FEWER is a number")),
    }
}

/// SplitMix64: ten lines, and the same numbers for ever.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * 2f64.powi(-53)
    }

    /// Unit normal, by Box and Muller.
    pub fn normal(&mut self) -> f32 {
        let (radius, angle) = ((-2.0 * (1.0 - self.unit()).ln()).sqrt(), core::f64::consts::TAU * self.unit());
        (radius * angle.cos()) as f32
    }
}

/// Sizes of a call: `[batch, heads, kv_heads, rows, keys, head_dim, value_dim]`, in that order everywhere.
pub type Sizes = [usize; 7];

/// How a tensor lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    Bhld,
    Blhd,
    /// Last element first: every stride negative.
    Reversed,
    /// Every second element.
    Spread,
    /// Dims before rows: the elements of a row are `rows` apart.
    Transposed,
    /// Rows a few elements longer than they need be, starting off any alignment.
    Padded,
}

pub const LAYOUTS: [Layout; 6] =
    [Layout::Bhld, Layout::Blhd, Layout::Reversed, Layout::Spread, Layout::Transposed, Layout::Padded];

/// A four-dimensional tensor and its memory.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub data: Vec<f32>,
    pub shape: [usize; 4],
    pub strides: [isize; 4],
    pub offset: usize,
}

impl Tensor {
    /// Dense, batch outermost.
    pub fn from_fn(shape: [usize; 4], mut f: impl FnMut([usize; 4]) -> f32) -> Self {
        let mut data = Vec::with_capacity(shape.iter().product());
        let [b, h, l, d] = shape;
        // Loops, not `indices`: tests are hardly optimised, and most of their time goes by here.
        for b in 0..b {
            for h in 0..h {
                for l in 0..l {
                    for d in 0..d {
                        data.push(f([b, h, l, d]));
                    }
                }
            }
        }
        Self::dense(data, shape)
    }

    /// Dense, `x` everywhere.
    pub fn filled(shape: [usize; 4], x: f32) -> Self {
        Self::dense(vec![x; shape.iter().product()], shape)
    }

    fn dense(data: Vec<f32>, shape: [usize; 4]) -> Self {
        let [_, h, l, d] = shape.map(|n| n as isize);
        Self { data, shape, strides: [h * l * d, l * d, d, 1], offset: 0 }
    }

    pub fn normal(shape: [usize; 4], rng: &mut Rng) -> Self {
        Self::from_fn(shape, |_| rng.normal())
    }

    pub fn view(&self) -> View<'_> {
        View::from_strides(&self.data, self.offset, self.shape, self.strides).expect("a tensor fits its memory")
    }

    fn at(&self, [b, h, l, d]: [usize; 4]) -> usize {
        let [of_b, of_h, of_l, of_d] = self.strides;
        let steps = b as isize * of_b + h as isize * of_h + l as isize * of_l + d as isize * of_d;
        self.offset.checked_add_signed(steps).expect("inside the memory")
    }

    pub fn get(&self, index: [usize; 4]) -> f32 {
        self.data[self.at(index)]
    }

    pub fn set(&mut self, index: [usize; 4], x: f32) {
        let at = self.at(index);
        self.data[at] = x;
    }

    /// Every element of row `l`, in every batch and head, becomes `x`.
    pub fn fill_row(&mut self, l: usize, x: f32) {
        let [b, h, _, d] = self.shape;
        for [b, h, _, d] in indices([b, h, 1, d]) {
            self.set([b, h, l, d], x);
        }
    }

    /// A dense copy of some batches, heads and rows.
    pub fn part(&self, batch: Range<usize>, heads: Range<usize>, rows: Range<usize>) -> Self {
        let shape = [batch.len(), heads.len(), rows.len(), self.shape[3]];
        let mut part = Self::filled(shape, 0.0);
        for [b, h, l, _] in indices([shape[0], shape[1], shape[2], 1]) {
            part.copy_row([b, h, l], self, [batch.start + b, heads.start + h, rows.start + l]);
        }
        part
    }

    /// A dense copy of some rows.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        self.part(0..self.shape[0], 0..self.shape[1], rows)
    }

    /// The same elements in another layout; whatever lies between them is NaN.
    pub fn laid_out(&self, layout: Layout) -> Self {
        let [b, h, l, d] = self.shape.map(|n| n.max(1) as isize);
        let row = d + 3;
        let strides = match layout {
            Layout::Bhld => [h * l * d, l * d, d, 1],
            Layout::Blhd => [l * h * d, d, h * d, 1],
            Layout::Reversed => [-h * l * d, -l * d, -d, -1],
            Layout::Spread => [2 * h * l * d, 2 * l * d, 2 * d, 2],
            Layout::Transposed => [h * l * d, l * d, 1, l],
            Layout::Padded => [h * l * row, l * row, row, 1],
        };
        let reach: isize = strides.iter().zip([b, h, l, d]).map(|(s, n)| s.abs() * (n - 1)).sum();
        let offset = match layout {
            Layout::Reversed => reach as usize,
            Layout::Padded => 5,
            _ => 0,
        };
        let data = vec![f32::NAN; reach as usize + 1 + offset];
        let mut copy = Self { data, shape: self.shape, strides, offset };
        copy.copy_all(self);
        copy
    }

    /// Copies every element of a tensor of the same shape.
    pub fn copy_all(&mut self, from: &Self) {
        let [b, h, l, _] = self.shape;
        indices([b, h, l, 1]).for_each(|[b, h, l, _]| self.copy_row([b, h, l], from, [b, h, l]));
    }

    /// Copies a row of another tensor, `[batch, head, row]`.
    pub fn copy_row(&mut self, [b, h, l]: [usize; 3], from: &Self, [b2, h2, l2]: [usize; 3]) {
        if let (1, Some(row)) = (self.strides[3], from.row([b2, h2, l2])) {
            let at = self.at([b, h, l, 0]);
            self.data[at..at + row.len()].copy_from_slice(row);
        } else {
            (0..self.shape[3]).for_each(|d| self.set([b, h, l, d], from.get([b2, h2, l2, d])));
        }
    }

    /// Returns a row, if its elements lie side by side.
    pub fn row(&self, [b, h, l]: [usize; 3]) -> Option<&[f32]> {
        let at = self.at([b, h, l, 0]);
        (self.strides[3] == 1).then(|| &self.data[at..at + self.shape[3]])
    }
}

/// Every index of a shape, last dimension fastest.
pub fn indices(shape: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    let mut next = (!shape.contains(&0)).then_some([0; 4]);
    core::iter::from_fn(move || {
        let at = next?;
        next = None;
        let mut after = at;
        for axis in [3, 2, 1, 0] {
            after[axis] += 1;
            if after[axis] < shape[axis] {
                next = Some(after);
                break;
            }
            after[axis] = 0;
        }
        Some(at)
    })
}

/// Tells if two rows of one length have the same bits. Not by iterators, which are slow where little is optimised.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    let (mut i, mut differ) = (0, 0);
    while i < a.len() {
        differ |= a[i].to_bits() ^ b[i].to_bits();
        i += 1;
    }
    differ == 0
}

/// Queries, keys and values.
#[derive(Debug, Clone)]
pub struct Tensors {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

impl Tensors {
    /// Unit-normal data.
    pub fn normal([b, h, hkv, lq, lk, d, dv]: Sizes, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut tensor = |h, l, d| Tensor::normal([b, h, l, d], &mut rng);
        Self { q: tensor(h, lq, d), k: tensor(hkv, lk, d), v: tensor(hkv, lk, dv) }
    }

    pub fn inputs(&self) -> Inputs<'_> {
        Inputs::new(self.q.view(), self.k.view(), self.v.view())
    }

    pub fn laid_out(&self, q: Layout, k: Layout, v: Layout) -> Self {
        Self { q: self.q.laid_out(q), k: self.k.laid_out(k), v: self.v.laid_out(v) }
    }

    /// Some rows against all keys.
    pub fn with_rows(&self, rows: Range<usize>) -> Self {
        Self { q: self.q.rows(rows), k: self.k.clone(), v: self.v.clone() }
    }
}

/// What a call wrote: `out` `[batch, heads, rows, value_dim]`, `lse` `[batch, heads, rows, 1]`.
#[derive(Debug, Clone)]
pub struct Answer {
    pub out: Tensor,
    pub lse: Tensor,
}

impl Answer {
    pub fn part(&self, batch: Range<usize>, heads: Range<usize>, rows: Range<usize>) -> Self {
        Self { out: self.out.part(batch.clone(), heads.clone(), rows.clone()), lse: self.lse.part(batch, heads, rows) }
    }

    pub fn rows(&self, rows: Range<usize>) -> Self {
        self.part(0..self.out.shape[0], 0..self.out.shape[1], rows)
    }
}

/// Buffers for the answer to these inputs, not yet written.
pub fn unwritten(inputs: &Inputs<'_>) -> Answer {
    let [q, v] = [inputs.queries(), inputs.key_values().expect("a good call").tensors().expect("tensors")[1]];
    let ([b, h, l, _], [.., dv]) = (q.shape(), v.shape());
    let blank = |d| Tensor::filled([b, h, l, d], f32::from_bits(UNWRITTEN));
    Answer { out: blank(dv), lse: blank(1) }
}

/// Outputs that write into `answer`, which is dense.
pub fn outputs(answer: &mut Answer) -> Outputs<'_> {
    let (shape, lse_shape) = (answer.out.shape, answer.lse.shape);
    let out = ViewMut::bhld(&mut answer.out.data, shape).expect("dense");
    Outputs::new(out).lse(ViewMut::bhld(&mut answer.lse.data, lse_shape).expect("dense"))
}

/// Runs a call, with plan and memory of its own.
pub fn run(attention: &Attention, tensors: &Tensors, exec: Exec) -> Answer {
    run_inputs(attention, tensors.inputs(), exec)
}

pub fn run_inputs(attention: &Attention, inputs: Inputs<'_>, exec: Exec) -> Answer {
    let mut answer = unwritten(&inputs);
    attention.problem(inputs, outputs(&mut answer)).expect("a good call").run_once(exec);
    answer
}

/// Runs a call on memory that other calls may have used; plans it, or goes by `plan`.
pub fn run_with(
    attention: &Attention,
    tensors: &Tensors,
    exec: Exec,
    plan: Option<&Plan>,
    workspace: &mut Workspace,
) -> Answer {
    let mut answer = unwritten(&tensors.inputs());
    let problem = attention.problem(tensors.inputs(), outputs(&mut answer)).expect("a good call");
    let own = Plan::new(&problem, exec);
    problem.run(plan.unwrap_or(&own), workspace);
    answer
}

/// Every instruction set of this machine, on the calling thread.
pub fn execs() -> impl Iterator<Item = (Isa, Exec<'static>)> {
    Isa::available().map(|isa| (isa, Exec::serial().isa(isa)))
}

/// Where row 0 stands, as [`Alignment`] says it.
pub fn offset_of(alignment: Alignment, rows: usize, keys: usize) -> isize {
    match alignment {
        Alignment::BottomRight => keys as isize - rows as isize,
        Alignment::Offset(n) => n,
        _ => 0,
    }
}

/// The largest finite magnitude.
pub fn largest(xs: &[f32]) -> f64 {
    xs.iter().filter(|x| x.is_finite()).fold(0.0, |m, x| m.max(x.abs() as f64))
}

/// Distance of two numbers; 0 for equals of any kind, ∞ for a NaN or infinity that the other is not.
pub fn distance(got: f64, expected: f64) -> f64 {
    match (got.is_nan(), expected.is_nan()) {
        (true, true) => 0.0,
        (false, false) if got == expected => 0.0,
        (false, false) => (got - expected).abs(),
        _ => f64::INFINITY,
    }
}

/// The largest distance and where it is.
pub fn worst(got: &[f32], expected: &[f64]) -> (f64, usize) {
    assert_eq!(got.len(), expected.len(), "different numbers of elements");
    let pairs = got.iter().zip(expected).enumerate();
    pairs.fold((0.0, 0), |(most, at), (i, (&g, &e))| {
        let d = distance(g as f64, e);
        if d > most { (d, i) } else { (most, at) }
    })
}

/// Panics, naming the worst element, unless all are within `bound`.
#[track_caller]
pub fn assert_close(what: &str, got: &Tensor, expected: &[f64], bound: f64) {
    let (error, at) = worst(&got.data, expected);
    if error > bound || bound.is_nan() {
        let index = indices(got.shape).nth(at).expect("inside");
        panic!(
            "{what}: element {index:?} is {:e}, expected {:e}: off by {error:e}, bound {bound:e}",
            got.data[at], expected[at]
        );
    }
}

#[track_caller]
pub fn assert_same_bits(what: &str, got: &Tensor, expected: &Tensor) {
    assert_eq!(got.shape, expected.shape, "{what}: shapes differ");
    let [b, h, l, _] = got.shape;
    let same = |row| matches!((got.row(row), expected.row(row)), (Some(a), Some(b)) if same_bits(a, b));
    if indices([b, h, l, 1]).all(|[b, h, l, _]| same([b, h, l])) {
        return;
    }
    let mut differ = indices(got.shape).filter(|&i| got.get(i).to_bits() != expected.get(i).to_bits());
    if let Some(first) = differ.next() {
        let (g, e) = (got.get(first), expected.get(first));
        panic!(
            "{what}: {} of {} elements differ, the first at {first:?}: {g:e} ({:#010x}), expected {e:e} ({:#010x})",
            1 + differ.count(),
            got.data.len(),
            g.to_bits(),
            e.to_bits()
        );
    }
}

/// Both outputs, bit for bit.
#[track_caller]
pub fn assert_same(what: &str, got: &Answer, expected: &Answer) {
    assert_same_bits(&format!("{what}: out"), &got.out, &expected.out);
    assert_same_bits(&format!("{what}: lse"), &got.lse, &expected.lse);
}
