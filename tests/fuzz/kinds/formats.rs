//! Histories of caches whose keys and values have formats of their own, in either basis, with exact first tokens, beside a model that
//! knows what each stored token reads as; and a pool of the same format.

use crate::fuzzer::array::Array;
use crate::fuzzer::draw::{DTYPES, numbers};
use crate::fuzzer::rng::Rng;
use core::num::NonZeroUsize;
use sdpa::{
    Alignment, Attention, Basis, BlockTable, CacheFormat, Dtype, Error, Exec, Inputs, Int4, Isa, KvCache, KvFormat,
    KvShape, Mods, Outputs, PagePool, View, ViewMut, Window, naive,
};

/// Key and value of a head of a token, as it reads.
type Held = [Vec<u32>; 2];

/// A cache, and what each token of its sequences reads as: `None` where it was evicted or not looked at yet.
struct History {
    cache: KvCache,
    /// Tokens of each sequence, each with its heads.
    model: Vec<Vec<Vec<Held>>>,
    sliding: bool,
    said: String,
}

pub(super) fn check(rng: &mut Rng) {
    let mut history = History::new(rng);
    for _ in 0..1 + rng.below(12) {
        history.step(rng);
        history.compare(rng);
    }
    history.attend(rng);
}

fn side(rng: &mut Rng) -> (CacheFormat<'static>, Basis) {
    let format = match rng.below(7) {
        0 => CacheFormat::Elements(rng.pick(&DTYPES)),
        5 => CacheFormat::E4m3PerToken,
        6 => CacheFormat::E4m3PerHead(&[5.0, 8.0]),
        1 | 2 => CacheFormat::Int8PerToken,
        _ => CacheFormat::Int4(rng.pick(&[Int4::Symmetric, Int4::Centred])),
    };
    (format, if format.is_integer() && rng.one_in(2) { Basis::Hadamard } else { Basis::Channels })
}

/// Largest error of an element that was stored once, for rows of numbers up to `most`.
fn bound(format: CacheFormat<'_>, basis: Basis, most: f32, dim: usize) -> f32 {
    // A transformed row may have an element √n times as large, and errors may add up again.
    let spread = if basis == Basis::Hadamard { dim.min(256) as f32 } else { 1.0 };
    match format {
        CacheFormat::Elements(Dtype::F32) => 0.0,
        CacheFormat::Elements(Dtype::Bf16) => most / 256.0 + 1e-38,
        CacheFormat::Elements(Dtype::F16) => most / 2048.0 + 1e-7,
        CacheFormat::E4m3PerToken | CacheFormat::E4m3PerHead(_) => most / 15.0 + 0.02,
        CacheFormat::Int4(_) => spread * (most / 12.0 + 1e-6),
        _ => spread * (most / 250.0 + 1e-6),
    }
}

impl History {
    fn new(rng: &mut Rng) -> Self {
        let ([keys, values], kv_heads) = ([side(rng), side(rng)], rng.up_to(2));
        let heads_of = |format| match format {
            CacheFormat::E4m3PerHead(scales) => CacheFormat::E4m3PerHead(&scales[..kv_heads]),
            format => format,
        };
        let [head_dim, value_dim] = [(); 2].map(|()| rng.pick(&[1, 3, 16, 17, 33, 80, 96]));
        let mut format = KvFormat::new(heads_of(keys.0), heads_of(values.0)).key_basis(keys.1).value_basis(values.1);
        if keys.0.is_integer() || values.0.is_integer() {
            format = format.exact_first(rng.pick(&[0, 0, 1, 4, 16]));
        }
        let (shape, sequences, sliding) = (KvShape { kv_heads, head_dim, value_dim }, rng.below(3), rng.one_in(4));
        let cache = match sliding {
            true => {
                let last = NonZeroUsize::new(rng.pick(&[1, 16, 255, 257])).expect("at least one");
                KvCache::sliding(sequences, shape, last, rng.pick(&[0, 3, 16, 256]))
            }
            false => KvCache::new(sequences, shape),
        };
        let cache = cache.and_then(|cache| cache.with_format(format)).expect("a good format");
        let said = format!("{format:?}, {shape:?}, {:?}:", cache.sliding_window());
        Self { cache, model: vec![Vec::new(); sequences], sliding, said }
    }

    fn step(&mut self, rng: &mut Rng) {
        if self.model.is_empty() || rng.one_in(12) {
            self.said.push_str(" add");
            assert_eq!(self.cache.add_sequence(), self.model.len(), "{}", self.said);
            return self.model.push(Vec::new());
        }
        let (b, other) = (rng.below(self.model.len()), rng.below(self.model.len()));
        let len = self.model[b].len();
        match rng.below(9) {
            0 => {
                self.said.push_str(&format!(" fork {b} {other}"));
                self.cache.fork(b, other).expect("they are there");
                self.model[other] = self.model[b].clone();
            }
            1 => self.truncate(b, rng.below(len + 1)),
            2 => self.keep(rng, b),
            3 if self.cache.shape().kv_heads > 0 => self.export(rng),
            4 => self.change(rng, b),
            5 => {
                self.said.push_str(" copy");
                self.cache = self.cache.clone();
                self.cache.shrink();
            }
            _ => self.append(rng, b),
        }
    }

    fn append(&mut self, rng: &mut Rng, b: usize) {
        let KvShape { kv_heads, head_dim, value_dim } = self.cache.shape();
        let n = rng.pick(&[0, 1, 1, 2, 15, 16, 17, 100, 256]).min(600 - self.model[b].len().min(600));
        self.said.push_str(&format!(" append {n} to {b}"));
        let [mut k, v] = [head_dim, value_dim].map(|dim| tame(numbers(rng, [1, kv_heads, n, dim], Dtype::F32)));
        if rng.one_in(3) && n > 0 && kv_heads > 0 {
            k.data.iter_mut().step_by(head_dim).for_each(|x| *x *= 20.0);
        }
        self.cache.append_to(b, view(&k), view(&v)).expect("they fit");
        let (first, format) = (self.model[b].len(), self.cache.format());
        for j in 0..n {
            let token = self.read(b, first + j);
            for (h, held) in token.iter().enumerate() {
                let sides = [(&k, format.keys, format.key_basis), (&v, format.values, format.value_basis)];
                for (held, (x, format_of, basis)) in held.iter().zip(sides) {
                    let row = x.row(0, h, j);
                    let most = row.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                    let exact = first + j < format.exact_first && format_of.is_integer();
                    let most = if exact { 1e-5 * most } else { bound(format_of, basis, most, row.len()) };
                    for (&held, &x) in held.iter().zip(row) {
                        let error = (f32::from_bits(held) - x).abs();
                        assert!(error <= most, "{}: token {j}, {x} reads as {}", self.said, f32::from_bits(held));
                    }
                }
            }
            self.model[b].push(token);
        }
    }

    fn truncate(&mut self, b: usize, len: usize) {
        self.said.push_str(&format!(" truncate {b} to {len}"));
        match self.cache.truncate(b, len) {
            Ok(()) => self.model[b].truncate(len),
            Err(error) => assert!(self.sliding, "{}: {error}", self.said),
        }
    }

    fn keep(&mut self, rng: &mut Rng, b: usize) {
        let len = self.model[b].len();
        let (from, sparse) =
            (if rng.one_in(2) { rng.below(20.min(len + 1)) } else { rng.below(len + 1) }, rng.pick(&[1, 2, 9]));
        let accepted: Vec<usize> = (0..len - from).filter(|_| rng.one_in(sparse)).collect();
        self.said.push_str(&format!(" keep {from} and {} in {b}", accepted.len()));
        if let Err(error) = self.cache.keep(b, from, &accepted) {
            return assert!(self.sliding, "{}: {error}", self.said);
        }
        let was = core::mem::take(&mut self.model[b]);
        let rows = (0..from).chain(accepted.iter().map(|i| from + i));
        self.model[b] = rows.clone().map(|row| was[row].clone()).collect();
        // Values that become exact are brought to their basis: read anew.
        let exact = self.cache.format().exact_first;
        for (to, row) in rows.enumerate().take(exact).filter(|(to, row)| to != row && *row >= exact) {
            let (got, token) = (self.read(b, to), &mut self.model[b][to]);
            for (got, held) in got.iter().flatten().zip(token.iter().flatten()) {
                let most = held.iter().fold(0.0, |most: f32, x| most.max(f32::from_bits(*x).abs()));
                let close = |(x, y): (&u32, &u32)| (f32::from_bits(*x) - f32::from_bits(*y)).abs() <= 1e-5 * most;
                assert!(got.iter().zip(held).all(close), "{}: token {to} was {row}", self.said);
            }
            *token = got;
        }
    }

    /// Goes on with what was exported; a file with a byte of it changed is refused, or is a cache; a pool that imports it and
    /// exports it again has the same.
    fn export(&mut self, rng: &mut Rng) {
        self.said.push_str(" export");
        let mut bytes = self.cache.export().expect("it has heads");
        self.cache = KvCache::import(&bytes).expect("it was exported");
        if !self.sliding && !self.model.is_empty() {
            let mut pool = PagePool::new(60, 48, self.cache.shape(), self.cache.format()).expect("good sizes");
            let (entries, width) = (rng.shuffled(60).into_iter().map(|page| page as u32).collect::<Vec<_>>(), 13);
            if self.model.len() * width <= 60 {
                let table = BlockTable { entries: &entries[..self.model.len() * width], lens: self.cache.lens() };
                pool.import(table, &bytes).expect("the file of such a pool");
                self.cache = KvCache::import(&pool.export(table).expect("a file")).expect("the file of a cache");
            }
        }
        let i = rng.below(bytes.len());
        bytes[i] ^= 1 << rng.below(8);
        if let Ok(other) = KvCache::import(&bytes) {
            assert!(other.bytes() <= 2 * self.cache.bytes() + 4096, "{}: byte {i}", self.said);
        }
        let error = KvCache::import(&bytes[..i]).expect_err("it is cut off");
        assert!(matches!(error, Error::File { .. }), "{}: {error}", self.said);
    }

    /// Changes keys to their negatives: of exact ones, and of others that are rounded to the same integers again.
    fn change(&mut self, rng: &mut Rng, b: usize) {
        let len = self.model[b].len();
        let first = rng.below(len + 1);
        let keys = first..first + rng.below(len - first + 1);
        self.said.push_str(&format!(" change {keys:?} of {b}"));
        let mut seen = 0;
        let changed = self.cache.change_keys(b, keys.clone(), |_, _, _| seen += 1);
        changed.expect("keys that fit");
        assert!(self.sliding || seen == keys.len() * self.cache.shape().kv_heads, "{}: {seen}", self.said);
        for j in keys {
            let token = self.read(b, j);
            let was = core::mem::replace(&mut self.model[b][j], token);
            for (new, old) in self.model[b][j].iter().zip(&was) {
                assert_eq!(new[1], old[1], "{}: the value of token {j}", self.said);
                let bits = |x: &[u32]| x.iter().map(|x| f32::from_bits(*x)).collect::<Vec<_>>();
                let (new, old) = (bits(&new[0]), bits(&old[0]));
                let most = old.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let format = self.cache.format();
                let most =
                    if j < format.exact_first { 0.0 } else { bound(format.keys, format.key_basis, most, old.len()) };
                let floats = matches!(format.keys, CacheFormat::Elements(_));
                let close = |(x, y): (&f32, &f32)| (x - y).abs() <= if floats { 0.0 } else { most };
                assert!(new.iter().zip(&old).all(close), "{}: key {j}", self.said);
            }
        }
    }

    /// Returns what a token reads as; nothing if it was evicted.
    fn read(&self, b: usize, token: usize) -> Vec<Held> {
        let KvShape { kv_heads, head_dim, value_dim } = self.cache.shape();
        let q = View::<f32>::bhld(&[], [self.model.len(), 0, 0, head_dim]).expect("no rows");
        let held = Inputs::cached(q, &self.cache).key_values().expect("a cache");
        if self.cache.evicted(b).expect("it is there").contains(&token) {
            return Vec::new();
        }
        let bits = |x: Option<f32>| x.expect("held").to_bits();
        let head = |h| {
            let key = (0..head_dim).map(|d| bits(held.key([b, h, token, d]))).collect();
            [key, (0..value_dim).map(|d| bits(held.value([b, h, token, d]))).collect()]
        };
        (0..kv_heads).map(head).collect()
    }

    /// Compares some tokens of each sequence, the first ones too, with the model.
    fn compare(&mut self, rng: &mut Rng) {
        let lens: Vec<usize> = self.model.iter().map(Vec::len).collect();
        assert_eq!(self.cache.lens(), lens, "{}", self.said);
        for (b, len) in lens.into_iter().enumerate() {
            let some: Vec<usize> = (0..5).map(|_| rng.below(len)).chain(0..3.min(len)).filter(|&j| j < len).collect();
            for j in some {
                let (got, expected) = (self.read(b, j), &self.model[b][j]);
                assert!(got.is_empty() || expected.is_empty() || got == *expected, "{}: token {j} of {b}", self.said);
            }
        }
    }

    /// Attends, in several ways that give the same bits, and compares with the oracle.
    fn attend(&self, rng: &mut Rng) {
        let (batch, KvShape { kv_heads, head_dim, value_dim }) = (self.model.len(), self.cache.shape());
        let rows = rng.pick(&[1, 1, 2, 7, 20]);
        let heads = kv_heads * rng.pick(&[1, 2, 5]);
        let q = tame(numbers(rng, [batch, heads, rows, head_dim], Dtype::F32));
        let window = self.cache.sliding_window().map(|keys| Window::last_tokens(keys.last).keep_first(keys.first));
        let attention = Attention::new().causal().align(Alignment::BottomRight);
        let attention = window.map_or(attention, |window| attention.window(window));
        let run = |cache: &KvCache, rows: core::ops::Range<usize>, exec: Exec<'_>| {
            let (q, shape) = (view(&q).rows(rows.clone()).expect("rows"), [batch, q.shape[1], rows.len(), value_dim]);
            let mut out = vec![0.0; shape.iter().product()];
            let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).expect("dense"));
            let problem = attention.problem(Inputs::cached(q, cache), outputs);
            problem.map(|problem| problem.run_once(exec)).map(|_| out)
        };
        let isas: Vec<Isa> = Isa::available().collect();
        let exec = Exec::serial().isa(rng.pick(&isas));
        let got = match run(&self.cache, 0..rows, exec) {
            Ok(got) => got,
            Err(error) => return assert!(self.sliding, "{}: {error}", self.said),
        };
        let last = run(&self.cache.clone(), rows - 1..rows, exec).expect("as before");
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (all, last) in got.chunks_exact(rows * value_dim).zip(last.chunks_exact(value_dim)) {
            assert_eq!(bits(&all[(rows - 1) * value_dim..]), bits(last), "{}: the last of {rows} rows", self.said);
        }
        if rng.one_in(4) {
            let inputs = Inputs::cached(view(&q), &self.cache);
            let answer = naive::answer::<f64, _, _, _>(&attention, &inputs, &Mods::new()).expect("a good call");
            let most = |x: &[f64]| x.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            let (size, scores) = (
                most(&answer.out),
                most(&answer.points[0].iter().copied().filter(|x| x.is_finite()).collect::<Vec<_>>()),
            );
            for (got, expected) in got.iter().zip(&answer.out) {
                // Queries of bytes change weights by a factor, weights of bytes outputs by a part of the largest.
                let error = (f64::from(*got) - expected).abs();
                assert!(error <= (0.05 + 0.1 * scores) * size + 1e-5, "{}: {got}, not {expected}", self.said);
            }
        }
    }
}

fn view(x: &Array) -> View<'_> {
    View::bhld(&x.data, x.shape).expect("dense")
}

/// Numbers that every format can store.
fn tame(mut x: Array) -> Array {
    x.data.iter_mut().for_each(|x| *x = if x.abs() < 100.0 { *x } else { 3.0 });
    x
}
