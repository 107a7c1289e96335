//! Histories of page pools: pages that sequences share, copy before they go on, give back and take again, held against
//! plain lists of tokens.

use crate::fuzzer::array::Array;
use crate::fuzzer::bits::{Recorder, settle};
use crate::fuzzer::case::Case;
use crate::fuzzer::draw::{DTYPES, Home, numbers, small, tame_one};
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::place::AnyPlaced;
use crate::fuzzer::rng::Rng;
use crate::fuzzer::sources::{Packed, Source, channel_scales};
use crate::fuzzer::stage::{Stage, list};
use sdpa::{BlockTable, CacheFormat, Dtype, Error, Exec, KvShape, PagePool};

const MOST_SEQUENCES: usize = 4;

/// A sequence: its pages, and its keys and values `[1, kv_heads, n, dim]`.
#[derive(Debug, Clone)]
struct Sequence {
    pages: Vec<u32>,
    kv: [Array; 2],
}

/// A pool, and what should be in it.
#[derive(Debug)]
struct History {
    pool: PagePool,
    model: Vec<Sequence>,
    home: Home,
    said: String,
    /// Whether tokens have no extreme numbers.
    tame: bool,
}

pub(super) fn check(rng: &mut Rng) {
    let mut history = History::new(rng);
    for _ in 0..2 + rng.below(30) {
        history.step(rng);
        if rng.one_in(6) {
            history.attend(rng);
        }
    }
    history.attend(rng);
}

/// Calls over pages on their way.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let mut history = History { tame: !rng.one_in(4), ..History::new(rng) };
    for _ in 0..10 + rng.below(20) {
        history.step(rng);
        if rng.one_in(8) {
            history.record(rng, recorder);
        }
    }
    history.record(rng, recorder);
    recorder.say(&history.said);
}

impl History {
    fn new(rng: &mut Rng) -> Self {
        let home = if rng.one_in(3) { Home::integers(rng) } else { Home::Cache(rng.pick(&DTYPES)) };
        let (kv_heads, page) = (rng.up_to(2), rng.pick(&[16, 32, 48, 256, 272]));
        let dims = [rng.pick(&[1, 5, 16, 17, 33]), rng.pick(&[1, 4, 16, 20, 65])];
        let scales = match home {
            Home::Bytes { channels: Some(most) } => channel_scales(kv_heads * dims[0], most),
            _ => Vec::new(),
        };
        let format = match home {
            Home::Cache(dtype) => CacheFormat::Elements(dtype),
            Home::Bytes { channels: Some(_) } => CacheFormat::Int8PerChannel(&scales),
            Home::Bits(kind) => CacheFormat::Int4(kind),
            _ => CacheFormat::Int8PerToken,
        };
        let pages = 2 + rng.below(30);
        let pages = rng.or_zero(pages);
        let pool = PagePool::new(pages, page, KvShape { kv_heads, head_dim: dims[0], value_dim: dims[1] }, format)
            .expect("good sizes");
        Self { pool, model: Vec::new(), home, said: format!("{home:?}, pages of {page}:"), tame: false }
    }

    fn dtype(&self) -> Dtype {
        if let Home::Cache(dtype) = self.home { dtype } else { Dtype::F32 }
    }

    fn dims(&self) -> [usize; 2] {
        let KvShape { head_dim, value_dim, .. } = self.pool.shape();
        [head_dim, value_dim]
    }

    fn len(&self, b: usize) -> usize {
        self.model[b].kv[0].shape[2]
    }

    /// A page that no sequence has.
    fn free(&self, rng: &mut Rng) -> Option<u32> {
        let used = |page: u32| self.model.iter().any(|sequence| sequence.pages.contains(&page));
        let free: Vec<u32> = (0..self.pool.page_count() as u32).filter(|&page| !used(page)).collect();
        (!free.is_empty()).then(|| rng.pick(&free))
    }

    fn tokens(&self, rng: &mut Rng, n: usize) -> [Array; 2] {
        self.dims().map(|dim| {
            let mut x = numbers(rng, [1, self.pool.shape().kv_heads, n, dim], self.dtype());
            self.home.tame(&mut x.data);
            if self.tame {
                x.data.iter_mut().for_each(tame_one);
            }
            x
        })
    }

    /// Something that may happen to a pool.
    fn step(&mut self, rng: &mut Rng) {
        let n = self.model.len();
        match rng.below(12) {
            0 | 1 if n < MOST_SEQUENCES => {
                self.said.push_str(" new");
                let kv = self.tokens(rng, 0);
                self.model.push(Sequence { pages: Vec::new(), kv });
            }
            2 if n > 0 && n < MOST_SEQUENCES => {
                let b = rng.below(n);
                self.said.push_str(&format!(" share {b}"));
                self.model.push(self.model[b].clone());
            }
            3 if n > 0 => {
                let b = rng.below(n);
                self.said.push_str(&format!(" drop {b}"));
                self.model.swap_remove(b);
            }
            4 if n > 0 => {
                let b = rng.below(n);
                let len = rng.below(self.len(b) + 1);
                self.said.push_str(&format!(" cut {b} to {len}"));
                let page = self.pool.page_size();
                let sequence = &mut self.model[b];
                sequence.kv = sequence.kv.each_ref().map(|x| x.part(0, 0..len));
                sequence.pages.truncate(len.div_ceil(page));
            }
            5 => self.refusals(rng),
            _ if n > 0 => self.append(rng),
            _ => {}
        }
    }

    /// Appends to some of the sequences, in any order.
    fn append(&mut self, rng: &mut Rng) {
        let mut chosen = rng.shuffled(self.model.len());
        chosen.truncate(1 + rng.below(self.model.len()));
        let alike = rng.one_in(2).then(|| rng.pick(&[0, 1, 3, 16, 40]));
        let mut counts = Vec::new();
        for &b in &chosen {
            let n = alike.unwrap_or_else(|| rng.pick(&[0, 1, 1, 2, 15, 16, 17, 100, 257]));
            if !self.make_room(rng, b, n) {
                // The pages taken for these tokens are free again.
                for &b in &chosen {
                    let pages = self.len(b).div_ceil(self.pool.page_size());
                    self.model[b].pages.truncate(pages);
                }
                return self.said.push_str(" (full)");
            }
            counts.push(n);
        }
        self.said.push_str(&format!(" append {counts:?} to {chosen:?}"));
        let mut ends = vec![0];
        counts.iter().for_each(|n| ends.push(ends[ends.len() - 1] + n));
        let all = self.tokens(rng, ends[chosen.len()]);
        for (i, &b) in chosen.iter().enumerate() {
            for (held, new) in self.model[b].kv.iter_mut().zip(&all) {
                let ([_, h, len, dim], first) = (held.shape, ends[i]);
                *held = Array::from_fn([1, h, len + counts[i], dim], |[_, h, j, c]| {
                    if j < len { held.get([0, h, j, c]) } else { new.get([0, h, first + j - len, c]) }
                });
            }
        }
        let (entries, lens) = self.table(&chosen);
        let table = BlockTable { entries: &entries, lens: &lens };
        if alike.is_some() && rng.one_in(2) {
            let n = counts[0];
            let [k, v] = all.each_ref().map(|x| {
                let [_, h, _, dim] = x.shape;
                Array::from_fn([chosen.len(), h, n, dim], |[b, h, j, c]| x.get([0, h, b * n + j, c]))
            });
            let [k, v] = self.placed(rng, [&k, &v]);
            self.pool.append(table, k.view(), v.view()).expect("they fit");
        } else {
            let [k, v] = self.placed(rng, [&all[0], &all[1]]);
            self.pool.append_ragged(table, &ends, k.view(), v.view()).expect("they fit");
        }
    }

    fn placed(&self, rng: &mut Rng, kv: [&Array; 2]) -> [AnyPlaced; 2] {
        kv.map(|x| {
            let dtype = if rng.one_in(2) { self.dtype() } else { Dtype::F32 };
            AnyPlaced::of(rng, x, dtype)
        })
    }

    /// Pages for so many more tokens, the last one of its own. False if there are not enough.
    fn make_room(&mut self, rng: &mut Rng, b: usize, n: usize) -> bool {
        let (len, page) = (self.len(b), self.pool.page_size());
        let last = self.model[b].pages.last().copied().filter(|_| n > 0 && !len.is_multiple_of(page));
        if let Some(last) = last
            && self.model.iter().filter(|sequence| sequence.pages.contains(&last)).count() > 1
        {
            let Some(copy) = self.free(rng) else { return false };
            self.said.push_str(&format!(" copy {last} to {copy}"));
            self.pool.copy_pages(&[[last, copy]]).expect("two pages");
            *self.model[b].pages.last_mut().expect("it has one") = copy;
        }
        while self.model[b].pages.len() < (len + n).div_ceil(page) {
            let Some(page) = self.free(rng) else { return false };
            self.model[b].pages.push(page);
        }
        true
    }

    /// Pages of some sequences side by side, filled up with none, and their lengths.
    fn table(&self, of: &[usize]) -> (Vec<u32>, Vec<usize>) {
        let width = of.iter().map(|&b| self.model[b].pages.len()).max().unwrap_or(0);
        let row = |&b: &usize| {
            let pages = &self.model[b].pages;
            pages.iter().copied().chain((pages.len()..width).map(|_| u32::MAX))
        };
        (of.iter().flat_map(row).collect(), of.iter().map(|&b| self.len(b)).collect())
    }

    /// Changes that have to be refused, and to leave everything as it was.
    fn refusals(&mut self, rng: &mut Rng) {
        let (pages, page) = (self.pool.page_count() as u32, self.pool.page_size());
        let [k, v] = self.tokens(rng, 2);
        let [k, v] = self.placed(rng, [&k, &v]);
        let (k, v) = (k.view(), v.view());
        let one = |entries, lens| BlockTable { entries, lens };
        let result = match rng.below(8) {
            0 => self.pool.copy_pages(&[[0, 1], [pages, 0]]),
            1 => self.pool.copy_pages(&[[1, 0], [0, u32::MAX]]),
            2 => self.pool.append_ragged(one(&[0, 0], &[1, 1]), &[0, 1, 2], k, v),
            3 => self.pool.append(one(&[pages], &[2]), k, v),
            4 => self.pool.append(one(&[0], &[1]), k, v),
            5 => self.pool.append(one(&[0], &[page + 1]), k, v),
            6 => self.pool.append_ragged(one(&[0, 1], &[1, 1]), &[0, 2, 1], k, v),
            _ => self.pool.append(one(&[0, 1], &[2, 2]), k, v),
        };
        assert!(matches!(result, Err(Error::Pages(..) | Error::Entry { .. } | Error::Mismatch { .. })), "{result:?}");
    }

    /// What a call over the pages gives.
    fn record(&mut self, rng: &mut Rng, recorder: &mut Recorder) {
        let mut case = self.case(rng);
        settle(rng, &mut case);
        let wanted = Wanted::draw(rng);
        let stage = self.stage(rng, &case);
        recorder.each(rng, |rng, exec| stage.run("bits", &mut Outs::blank(rng, &case, wanted), exec).all());
        self.take_back(stage);
    }

    /// A call over the pages of all sequences.
    fn stage<'c>(&mut self, rng: &mut Rng, case: &'c Case) -> Stage<'c> {
        let of: Vec<usize> = (0..self.model.len()).collect();
        let (entries, lens) = self.table(&of);
        let none =
            PagePool::new(0, 16, KvShape { kv_heads: 1, head_dim: 1, value_dim: 1 }, CacheFormat::Elements(Dtype::F32))
                .expect("nothing");
        let pool = std::mem::replace(&mut self.pool, none);
        let packed = Packed { pool, entries: list(rng, &entries), lens: list(rng, &lens) };
        Stage::over(rng, case, Source::Packed(packed))
    }

    fn take_back(&mut self, stage: Stage<'_>) {
        let Source::Packed(packed) = stage.source else { unreachable!("it was a pool") };
        self.pool = packed.pool;
    }

    /// Any options over the tokens of all sequences.
    fn case(&self, rng: &mut Rng) -> Case {
        let of: Vec<usize> = (0..self.model.len()).collect();
        let lens: Vec<usize> = of.iter().map(|&b| self.len(b)).collect();
        let longest = lens.iter().copied().max().unwrap_or(0);
        let dims = self.dims();
        let kv = [0, 1].map(|part| {
            Array::from_fn([of.len(), self.pool.shape().kv_heads, longest, dims[part]], |[b, h, j, c]| {
                if j < lens[b] { self.model[b].kv[part].get([0, h, j, c]) } else { 0.0 }
            })
        });
        let mut case = small(rng, kv, [self.dtype(); 2], lens.clone());
        if self.home.is_integers() {
            case.settings.scale = case.settings.scale.map(|x| if x.abs() < 1e-6 { 0.0 } else { x });
        }
        case
    }

    /// Attention over the pages is that over the same tokens from elsewhere.
    fn attend(&mut self, rng: &mut Rng) {
        let case = self.case(rng);
        let elsewhere = if self.home.is_integers() { self.home } else { Home::Tensors };
        let (wanted, exec) = (Wanted::draw(rng), Exec::serial());
        let what = format!("{} {}", self.said, case.describe());
        let fresh = Stage::new(rng, &case, elsewhere);
        let expected = fresh.run(&what, &mut Outs::blank(rng, &case, wanted), exec);
        let stage = self.stage(rng, &case);
        stage.run(&what, &mut Outs::blank(rng, &case, wanted), exec).same(&what, &expected);
        self.take_back(stage);
    }
}
