//! What calls over a cache give, and what it says it holds.

use super::{Pair, Sequence};
use crate::fuzzer::array::Array;
use crate::fuzzer::bits::Recorder;
use crate::fuzzer::case::{Case, Settings, Sides};
use crate::fuzzer::draw::{Home, numbers};
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::sources::Source;
use crate::fuzzer::stage::Stage;
use sdpa::{Alignment, Dtype, Error, Exec, Inputs, Isa, KvCache, KvShape, Precision, View, Workspace};

/// Whether the keys that rows see are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    Certain,
    Uncertain,
}

impl Pair {
    /// Attention from the cache is that over the same tokens from elsewhere.
    pub(super) fn attend(&mut self, rng: &mut Rng, history: &str) {
        self.check_lengths(history);
        self.check_tokens(rng, history);
        let Some([last, ..]) = self.keep else {
            let rows = rng.up_to(3);
            let (case, wanted) = (self.case(rng, rows), Wanted::draw(rng));
            return self.compare(rng, &case, wanted, Sight::Certain, history);
        };
        let fresh = |s: &Sequence| if s.kv[0].shape[2] == 0 { 3 } else { s.fresh };
        let rows = self.model.iter().map(fresh).min().unwrap_or(3);
        let case = self.case(rng, rows.clamp(1, 3));
        self.compare(rng, &case, Wanted::LEAST, if rows > 0 { Sight::Certain } else { Sight::Uncertain }, history);
        // Whoever would see further back is refused, or it is there.
        let rows = rng.up_to(5);
        let mut case = self.case(rng, rows);
        let left = [None, Some(last), Some(last + 255), Some(last + 300)];
        case.settings.window = Some(Sides { left: rng.pick(&left), right: Some(0), first: rng.below(400) });
        self.compare(rng, &case, Wanted::LEAST, Sight::Uncertain, history);
    }

    /// What a call over the cache gives, as far as its window is there.
    pub(super) fn record(&mut self, rng: &mut Rng, recorder: &mut Recorder) {
        let fresh = |s: &Sequence| if s.kv[0].shape[2] == 0 { 3 } else { s.fresh };
        let most = if self.keep.is_some() { self.model.iter().map(fresh).min().unwrap_or(3) } else { 3 };
        if most == 0 {
            return;
        }
        let rows = 1 + rng.below(most.min(3));
        let (mut case, wanted) = (self.case(rng, rows), Wanted::draw(rng));
        if self.tame {
            case.make_tame();
        }
        let cache = std::mem::replace(
            &mut self.cache,
            KvCache::new(0, KvShape { kv_heads: 0, head_dim: 1, value_dim: 1 }).expect("nothing"),
        );
        let stage = Stage::over(rng, &case, Source::Cache(cache));
        // Sums of key weights are refused where keys are evicted.
        let wanted = if self.keep.is_some() { Wanted::LEAST } else { wanted };
        recorder.each(rng, |rng, exec| stage.run("bits", &mut Outs::blank(rng, &case, wanted), exec).all());
        let Source::Cache(cache) = stage.source else { unreachable!("it was a cache") };
        self.cache = cache;
    }

    fn compare(&mut self, rng: &mut Rng, case: &Case, wanted: Wanted, sight: Sight, history: &str) {
        let isas: Vec<Isa> = Isa::available().collect();
        let exec = Exec::serial().isa(rng.pick(&isas));
        let cache = std::mem::replace(
            &mut self.cache,
            KvCache::new(0, KvShape { kv_heads: 0, head_dim: 1, value_dim: 1 }).expect("nothing"),
        );
        let stage = Stage::over(rng, case, Source::Cache(cache));
        let mut outs = Outs::blank(rng, case, wanted);
        let refused = case.attention().problem(stage.inputs(), outs.outputs()).err();
        match refused {
            Some(Error::Evicted { .. } | Error::Wider { .. }) if sight == Sight::Uncertain => {
                assert!(outs.is_blank(), "{history}: a refused call wrote");
            }
            Some(e) => panic!("{history}: {e}"),
            None => {
                let done = stage.run_into(outs.outputs(), exec.into(), &mut Workspace::new());
                assert!(done.is_ok(), "nothing was to be thrown");
                let elsewhere = if self.home.is_integers() { self.home } else { Home::Tensors };
                let fresh = Stage::new(rng, case, elsewhere);
                let expected = fresh.run("tokens", &mut Outs::blank(rng, case, wanted), exec);
                outs.take(history).same(history, &expected);
            }
        }
        let Source::Cache(cache) = stage.source else { unreachable!("it was a cache") };
        self.cache = cache;
    }

    /// What the cache says it holds, here and there.
    fn check_tokens(&self, rng: &mut Rng, history: &str) {
        let none = View::<f32>::bhld(&[], [self.model.len(), 0, 0, 1]).expect("nothing");
        let inputs = Inputs::cached(none, &self.cache);
        let all = inputs.key_values().expect("a value for each key");
        for (b, sequence) in self.model.iter().enumerate() {
            let (h, len) = (rng.below(self.kv_heads), self.len(b));
            let at = |j| [b, h, j, 0];
            assert_eq!(all.key(at(len)), None, "{history}");
            let j = rng.below(len);
            if len == 0 || self.kv_heads == 0 || self.home.is_integers() {
                continue;
            }
            let held = [all.key(at(j)), all.value(at(j))];
            for (held, was) in held.into_iter().zip(&sequence.kv) {
                let was = was.get([0, h, j, 0]);
                let same =
                    held.map_or(j < sequence.gone, |x| x.to_bits() == was.to_bits() || x.is_nan() && was.is_nan());
                assert!(same, "{history}: token {j} of {b} is {held:?}, was {was}");
            }
        }
    }

    /// Rows at the end of every sequence.
    fn case(&self, rng: &mut Rng, rows: usize) -> Case {
        let (batch, [d, dv]) = (self.model.len(), self.dims);
        let lens: Vec<usize> = (0..batch).map(|b| self.len(b)).collect();
        let longest = lens.iter().copied().max().unwrap_or(0);
        let [k, v] = [(0, d), (1, dv)].map(|(of, dim)| {
            Array::from_fn([batch, self.kv_heads, longest, dim], |[b, h, j, c]| {
                if j < lens[b] { self.model[b].kv[of].get([0, h, j, c]) } else { 0.0 }
            })
        });
        let window = self.keep.map(|[last, first, _]| Sides { left: Some(last - 1), right: Some(0), first });
        let settings = Settings {
            scale: None,
            softcap: None,
            causal: rng.one_in(2),
            window,
            alignment: Some(Alignment::BottomRight),
            precision: Precision::Exact,
            dropout: None,
        };
        let heads = self.kv_heads * rng.pick(&[1, 1, 2, 4]);
        let heads = rng.or_zero(heads);
        let q = numbers(rng, [batch, heads, rows, d], Dtype::F32);
        let dtypes = [Dtype::F32, self.dtype(), self.dtype()];
        let sinks = rng.one_in(3).then(|| (0..heads).map(|_| rng.normal()).collect());
        Case { sinks, kv_lens: Some(lens), ..Case::new([q, k, v], dtypes, settings) }
    }
}
