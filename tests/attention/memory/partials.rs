//! Partial results of key blocks that are divided among workers: a workspace holds as much for them as the plan says.

use crate::counting::counted;
use crate::support::{Rng, fewer};
use core::fmt;
use sdpa::{
    Attention, BlockTable, CacheFormat, Dtype, Exec, Executor, Inputs, KvCache, KvShape, Outputs, PagePool, Pages,
    Plan, Run, View, ViewMut, Workspace,
};

/// Threads that are this one: the allocator counts what one thread asks for.
struct Turns(usize);

impl Executor for Turns {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(task);
    }
}

/// Where keys and values lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Tensors,
    Ragged,
    Pages,
    PackedPages,
    Cache,
    LatentCache,
}

const KINDS: [Kind; 6] = [Kind::Tensors, Kind::Ragged, Kind::Pages, Kind::PackedPages, Kind::Cache, Kind::LatentCache];

impl Kind {
    /// Returns true if values lie in panels: then the blocks that one worker does have one result together.
    fn has_panels(self) -> bool {
        [Self::PackedPages, Self::Cache].contains(&self)
    }
}

/// Sizes of a call with any number of keys in each sequence.
struct Sizes {
    kind: Kind,
    heads: usize,
    rows: usize,
    kv: KvShape,
    lens: Vec<usize>,
    threads: usize,
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, heads, rows, kv, lens, threads } = self;
        write!(f, "{kind:?}, {heads} heads, {rows} rows, {kv:?}, {lens:?} keys, {threads} threads")
    }
}

impl Sizes {
    fn draw(rng: &mut Rng) -> Self {
        let kind = rng.pick(&KINDS);
        let (kv_heads, group) = (rng.pick(&[1, 2, 3]), rng.pick(&[1, 2, 4, 16]));
        let head_dim = rng.pick(&[1, 16, 20, 64, 128]);
        let value_dim = if kind == Kind::LatentCache { head_dim } else { rng.pick(&[1, 16, 33, 64, 128]) };
        let sequences = rng.pick(&[1, 1, 2, 5]);
        let most = rng.pick(&[257, 700, 2000]);
        Self {
            kind,
            heads: kv_heads * group,
            rows: rng.pick(&[1, 1, 1, 2, 3, 5, 16, 17, 40]),
            kv: KvShape { kv_heads, head_dim, value_dim },
            lens: (0..sequences).map(|_| rng.below(most + 1)).collect(),
            threads: rng.pick(&[1, 1, 2, 3, 16]),
        }
    }

    /// Runs the call in a new workspace. Returns its plan, and the bytes that the workspace holds and that were asked for.
    fn run(&self) -> (Plan, usize, usize) {
        let Self { kind, heads, rows, kv: shape @ KvShape { kv_heads, head_dim, value_dim }, ref lens, threads } =
            *self;
        let (row, batch, longest) = (vec![0.5f32; 128], lens.len(), lens.iter().copied().max().unwrap_or(0));
        let view =
            |batch, heads, rows, dim| View::from_strides(&row, 0, [batch, heads, rows, dim], [0, 0, 0, 1]).unwrap();
        let (q, [k, v]) =
            (view(batch, heads, rows, head_dim), [head_dim, value_dim].map(|dim| view(batch, kv_heads, longest, dim)));
        let ends = |each: &[usize]| {
            let all = each.iter().scan(0, |end, len| Some(core::mem::replace(end, *end + len)));
            all.chain([each.iter().sum()]).collect::<Vec<_>>()
        };
        let (q_ends, k_ends) = (ends(&vec![rows; batch]), ends(lens));
        let (entries, table_lens) = (vec![0; batch * longest.div_ceil(64)], lens.as_slice());
        let table = BlockTable { entries: &entries, lens: table_lens };
        let pool = PagePool::new(1, 64, shape, CacheFormat::Elements(Dtype::F32)).unwrap();
        let mut cache = KvCache::new(batch, shape).unwrap();
        if kind == Kind::LatentCache {
            cache = cache.latent().unwrap();
        }
        for (sequence, &len) in lens.iter().enumerate() {
            let [k, v] = [head_dim, value_dim].map(|dim| view(1, kv_heads, len, dim));
            cache.append_to(sequence, k, v).unwrap();
        }
        let inputs = match kind {
            Kind::Tensors => Inputs::new(q, k, v).kv_lens(lens),
            Kind::Ragged => {
                let [k, v] = [head_dim, value_dim].map(|dim| view(1, kv_heads, lens.iter().sum(), dim));
                Inputs::new(view(1, heads, batch * rows, head_dim), k, v).ragged(&q_ends, &k_ends)
            }
            Kind::Pages => {
                let [k, v] = [head_dim, value_dim].map(|dim| view(1, kv_heads, 64, dim));
                Inputs::paged(q, Pages::new(k, v, table).unwrap())
            }
            Kind::PackedPages => Inputs::paged(q, pool.pages(table).unwrap()),
            Kind::Cache | Kind::LatentCache => Inputs::cached(q, &cache),
        };
        let [b, h, l, _] = inputs.queries().shape();
        let mut out = vec![0.0; b * h * l * value_dim];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [b, h, l, value_dim]).unwrap());
        let problem = Attention::new().problem(inputs, outputs).unwrap();
        let (turns, mut workspace) = (Turns(threads), Workspace::new());
        let plan = Plan::new(&problem, Exec::on(&turns));
        let (_, asked) = counted(|| problem.run_with(&plan, &mut workspace, Run::new().executor(&turns)).unwrap());
        (plan, workspace.bytes(), asked)
    }
}

#[test]
fn a_workspace_holds_what_the_plan_says() {
    let mut divided = [0; KINDS.len()];
    for seed in 0..fewer(1500) {
        let sizes = Sizes::draw(&mut Rng::new(seed));
        let (plan, bytes, asked) = sizes.run();
        let stated = plan.workers() * plan.scratch_bytes() + plan.partials_bytes();
        let several = plan.workers() > 1 && sizes.lens.len() > 1;
        if sizes.kind.has_panels() && several {
            assert!(bytes <= stated, "seed {seed}, {sizes}: {bytes} held, {stated} stated");
        } else {
            assert_eq!(bytes, stated, "seed {seed}, {sizes}, on {} workers", plan.workers());
        }
        // Beside it there is the list of workers.
        let besides = asked - bytes;
        assert!(besides <= 256 + 64 * plan.workers(), "seed {seed}, {sizes}: {besides} bytes more than are held");
        divided[sizes.kind as usize] += usize::from(plan.partials_bytes() > 0);
    }
    assert!(fewer(1500) < 1500 || divided.iter().all(|&calls| calls > 20), "{divided:?}");
}

/// Of eight short sequences of a cache one at least lies in one of eight runs: its blocks have one result for each head.
#[test]
fn a_cache_takes_less_than_its_plan_says_if_one_worker_has_a_sequence() {
    let kv = KvShape { kv_heads: 8, head_dim: 64, value_dim: 64 };
    let lens = [[300; 8].as_slice(), &[2000; 4]].concat();
    let sizes = Sizes { kind: Kind::Cache, heads: 8, rows: 1, kv, lens, threads: 2 };
    let (plan, bytes, _) = sizes.run();
    assert_eq!((plan.workers(), plan.tasks()), (2, 8));
    assert!(bytes < 2 * plan.scratch_bytes() + plan.partials_bytes(), "{bytes} bytes, {plan}");
}

/// 32 heads that share 8, one row and 32,768 keys.
#[test]
fn a_step_over_many_keys_takes_what_its_plan_says() {
    let kv = KvShape { kv_heads: 8, head_dim: 128, value_dim: 128 };
    let sizes = Sizes { kind: Kind::Tensors, heads: 32, rows: 1, kv, lens: vec![1 << 15], threads: 1 };
    let (plan, bytes, _) = sizes.run();
    assert_eq!(bytes, plan.scratch_bytes() + plan.partials_bytes());
    // For each block of 256 keys and each key/value head maxima, sums and outputs of four rows; and half as much again.
    let results = 128 * 8 * 4 * (2 * 16 + 4 * 128);
    assert!((results / 2 * 3..results / 2 * 3 + 256).contains(&plan.partials_bytes()), "{plan}");
}
