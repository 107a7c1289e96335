//! Gradients of random calls, shared out at random: each rank holds its own against one process's.

use crate::PATIENT;
use crate::cases::Shared;
use crate::launch::FINE;
use crate::options::Case;
use crate::options::elements::{DTYPES, Elements, Rounded};
use crate::options::mods::with_mods;
use crate::support::{Rng, Tensor, assert_same_bits};
use core::ops::Range;
use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use sdpa::{Dtype, Exec, Gradients, Inputs, Run, Saved, TensorMut, ViewMut};
use sdpa_mpi::{BackwardShare, Ranks, Report};

/// A gradient, not yet written.
struct Written(Elements, Tensor);

impl Written {
    fn new(shape: [usize; 4], dtype: Dtype) -> Self {
        let like = Tensor::filled(shape, f32::NAN);
        Self(Elements::of(&like.data, dtype), like)
    }

    fn view(&mut self) -> TensorMut<'_> {
        self.0.view_mut(&self.1)
    }

    fn tensor(&self) -> Tensor {
        let data = match &self.0 {
            Elements::F32(data) => data.clone(),
            Elements::Bf16(data) => data.iter().map(|x| x.to_f32()).collect(),
            Elements::F16(data) => data.iter().map(|x| x.to_f32()).collect(),
        };
        Tensor { data, ..self.1.clone() }
    }
}

/// A call, what was saved of it, and the gradient of the loss.
struct Back {
    shared: Shared,
    out: Tensor,
    lse: Tensor,
    d_out: Rounded,
    d_lse: Option<Tensor>,
    /// Element type of gradients.
    dtype: Dtype,
}

/// Gradients that are sums over all rows: in sinks, slopes and scale.
struct OfRows([Vec<f32>; 3]);

impl OfRows {
    /// Memory for those that a case has.
    fn new(case: &Case) -> Self {
        let list = |list: &Option<Vec<f32>>| vec![f32::NAN; list.as_ref().map_or(0, Vec::len)];
        Self([list(&case.sinks), list(&case.alibi), vec![f32::NAN]])
    }

    fn asked<'a>(&'a mut self, gradients: Gradients<'a>) -> Gradients<'a> {
        let [sinks, slopes, scale] = &mut self.0;
        let gradients = gradients.scale(&mut scale[0]);
        let gradients = if sinks.is_empty() { gradients } else { gradients.sinks(sinks) };
        if slopes.is_empty() { gradients } else { gradients.alibi(slopes) }
    }

    fn bits(&self) -> Vec<u32> {
        self.0.iter().flatten().map(|x| x.to_bits()).collect()
    }
}

/// Results of a rank's part of a call.
struct Answer {
    report: Report,
    /// Gradients in q, of its stretches of rows.
    dq: Vec<Tensor>,
    /// Gradients in the bias, of those of its stretches of rows that have one of their own.
    dbias: Vec<Option<Tensor>>,
    /// Gradients in k and v, of its stretches of keys.
    dkv: Vec<[Tensor; 2]>,
    /// Gradients that are sums over rows, of the stretch that has all of them, if one has.
    of_rows: Option<OfRows>,
}

impl Back {
    fn random(rng: &mut Rng, ranks: usize, form: u64) -> Self {
        let shared = Shared::random(rng, ranks, form);
        // Rounding errors of log-sum-exps are there, too: rows may be far from 0.
        let whole = shared.whole_of(2);
        let d_out = Rounded::new(&Tensor::normal(whole.out.shape, rng), rng.pick(&DTYPES));
        let [batch, heads, rows, _] = whole.lse.shape;
        let d_lse = (rng.below(3) == 0).then(|| Tensor::normal([batch, heads, rows, 1], rng));
        Self { shared, out: whole.out, lse: whole.lse, d_out, d_lse, dtype: rng.pick(&DTYPES) }
    }

    /// Returns true if a stretch of rows has a gradient in its bias.
    fn has_bias(&self, rows: usize) -> bool {
        let case = &self.shared.case;
        case.bias.as_ref().map(|bias| bias.wide.shape).is_some_and(|[batch, _, l, columns]| {
            let of_rows = match case.ragged {
                Some(_) => l != 1 && batch == case.batch(),
                None if self.shared.is_one_by_one() => l != 1 && batch == case.batch(),
                None => l != 1 || rows == self.out.shape[2],
            };
            columns != 1 && of_rows
        })
    }

    /// Gradients in q, k and v of one process, that in the bias, and those that are sums over its rows.
    fn whole(&self) -> ([Tensor; 3], Option<Tensor>, OfRows) {
        let case = &self.shared.case;
        let mut written = [&case.q, &case.k, &case.v].map(|x| Written::new(x.shape, self.dtype));
        let [q, k, v] = self.shared.qkv.each_ref().map(Rounded::view);
        let inputs = case.inputs_over(Inputs::new(q, k, v));
        let inputs = case.kv_lens.as_ref().map_or(inputs, |lens| inputs.kv_lens(lens));
        let inputs = case.ragged.as_ref().map_or(inputs, |[q, k]| inputs.ragged(q, k));
        let mut dbias = case.bias.as_ref().map(|bias| Tensor::filled(bias.wide.shape, f32::NAN));
        let saved = Saved::new(self.out.view(), self.lse.view(), self.d_out.view());
        let saved = self.d_lse.as_ref().map_or(saved, |d_lse| saved.d_lse(d_lse.view()));
        let ([dq, dk, dv], mut of_rows) = (&mut written, OfRows::new(case));
        let gradients = of_rows.asked(Gradients::new().q(dq.view()).k(dk.view()).v(dv.view()));
        let gradients = dbias.as_mut().map(view_mut).into_iter().fold(gradients, Gradients::bias);
        let problem = case.attention().backward(inputs, saved, gradients).expect("a good call");
        with_mods!(case, |mods| problem.run_once_with(Exec::serial(), Run::new().mods(&mods))).expect("memory");
        (written.map(|gradient| gradient.tensor()), dbias, of_rows)
    }

    /// Runs a rank's part.
    fn run(&self, ranks: &Ranks<'_>, rank: usize) -> Result<Answer, sdpa_mpi::Error> {
        let Shared { case, qkv, rows, keys } = &self.shared;
        let [q, k, v] = qkv.each_ref().map(Rounded::view);
        let cases: Vec<Case> = rows[rank].iter().map(|rows| self.shared.part(rows)).collect();
        let some = |x: &Tensor| -> Vec<Tensor> { rows[rank].iter().map(|rows| x.rows(rows.clone())).collect() };
        let (out, lse, d_lse) = (some(&self.out), some(&self.lse), self.d_lse.as_ref().map(some));
        let mut dq: Vec<_> = cases.iter().map(|case| Written::new(case.q.shape, self.dtype)).collect();
        let of_keys = |x: &Tensor, n| Written::new([x.shape[0], x.shape[1], n, x.shape[3]], self.dtype);
        let mut dkv: Vec<_> =
            keys[rank].iter().map(|keys| [&case.k, &case.v].map(|x| of_keys(x, keys.len()))).collect();
        let (mut share, mut of_rows) = (BackwardShare::new(), OfRows::new(case));
        let (mut sums, mut has_all) = (Some(&mut of_rows), false);
        let dbias = |(case, rows): (&Case, &Range<usize>)| {
            let bias = case.bias.as_ref().filter(|_| self.has_bias(rows.len()));
            bias.map(|bias| Tensor::filled(bias.wide.shape, f32::NAN))
        };
        let mut dbias: Vec<_> = cases.iter().zip(&rows[rank]).map(dbias).collect();
        for (n, (((case, rows), dq), dbias)) in cases.iter().zip(&rows[rank]).zip(&mut dq).zip(&mut dbias).enumerate() {
            let inputs = case.inputs_over(Inputs::new(q.rows_in(rows.clone()).expect("rows"), k, v));
            let inputs = case.kv_lens.as_ref().map_or(inputs, |lens| inputs.kv_lens(lens));
            let inputs = case.ragged.as_ref().map_or(inputs, |[q, k]| inputs.ragged(q, k));
            let d_out = self.d_out.view().rows_in(rows.clone()).expect("rows");
            let saved = Saved::new(out[n].view(), lse[n].view(), d_out);
            let saved = d_lse.as_ref().map_or(saved, |d_lse| saved.d_lse(d_lse[n].view()));
            let gradients = Gradients::new().q(dq.view());
            let gradients = dbias.as_mut().map(view_mut).into_iter().fold(gradients, Gradients::bias);
            let together = case.ragged.is_none() && !self.shared.is_one_by_one();
            let gradients = match sums.take_if(|_| together && rows.len() == self.out.shape[2]) {
                None => gradients,
                Some(sums) => {
                    has_all = true;
                    sums.asked(gradients)
                }
            };
            share = share.rows_with(rows.start, inputs, saved, gradients);
        }
        for (keys, [dk, dv]) in keys[rank].iter().zip(&mut dkv) {
            let [k, v] = [k, v].map(|x| x.rows_in(keys.clone()).expect("keys"));
            share = share.keys(keys.start, k, v, dk.view(), dv.view());
        }
        let attention = case.attention();
        let report = with_mods!(case, |mods| ranks.attention_backward_with(&attention, share, &mods))?;
        let dq = dq.iter().map(Written::tensor).collect();
        let dkv = dkv.iter().map(|dkv| dkv.each_ref().map(Written::tensor)).collect();
        Ok(Answer { report, dq, dbias, dkv, of_rows: has_all.then_some(of_rows) })
    }
}

fn view_mut(x: &mut Tensor) -> ViewMut<'_> {
    ViewMut::bhld(&mut x.data, x.shape).expect("dense")
}

pub(crate) fn run(world: &SimpleCommunicator, cases: u64, seed: u64) {
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("two threads");
    let ranks = [Ranks::new(world, PATIENT).exec(Exec::serial()), Ranks::new(world, PATIENT).pool(&pool)];
    let (mut moved, mut biased) = ([0usize; 2], 0);
    for case in 0..cases {
        let mut rng = Rng::new(seed * 2_000_003 + case);
        let back = Back::random(&mut rng, size, case);
        let ([q, k, v], bias, sums) = back.whole();
        let what = format!("seed {seed}, case {case}, rank {rank} of {size}");
        let Answer { report, dq, dbias, dkv, of_rows } =
            back.run(&ranks[case as usize % 2], rank).unwrap_or_else(|error| panic!("{what}: {error}"));
        for (dq, rows) in dq.iter().zip(&back.shared.rows[rank]) {
            assert_same_bits(&format!("{what}, rows {rows:?}: dq"), dq, &q.rows(rows.clone()));
        }
        for (dbias, rows) in dbias.iter().zip(&back.shared.rows[rank]) {
            let Some((dbias, bias)) = dbias.as_ref().zip(bias.as_ref()) else { continue };
            assert_same_bits(&format!("{what}, rows {rows:?}: dbias"), dbias, &back.shared.cut(bias, rows));
            biased += 1;
        }
        for ([dk, dv], keys) in dkv.iter().zip(&back.shared.keys[rank]) {
            assert_same_bits(&format!("{what}, keys {keys:?}: dk"), dk, &k.rows(keys.clone()));
            assert_same_bits(&format!("{what}, keys {keys:?}: dv"), dv, &v.rows(keys.clone()));
        }
        if let Some(of_rows) = of_rows {
            assert_eq!(of_rows.bits(), sums.bits(), "{what}: sinks, slopes and scale");
        }
        assert_eq!(report.computed + report.hidden, back.shared.keys_told(), "{what}");
        moved = [moved[0] + report.sent, moved[1] + report.received];
    }
    let mut all = [0usize; 2];
    world.all_reduce_into(&moved[..], &mut all[..], mpi::collective::SystemOperation::sum());
    assert_eq!(all[0], all[1], "what is sent is received");
    println!("{rank}: {FINE}; {biased} gradients of biases");
}
