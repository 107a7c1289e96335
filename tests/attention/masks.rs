//! Stock mask functions: what they keep, that their classes are exact, and what mask functions are asked.

use crate::functions::run_as;
use crate::support::{Rng, Tensors, assert_same, execs};
use sdpa::masks::{Documents, MaskError, PerSequence, PrefixLm, Tree};
use sdpa::{
    Alignment, Attention, BlockClass, BlockPosition, Error, KvCache, KvShape, MaskMod, Mods, Outputs, Position, Run,
    ViewMut,
};
use std::sync::Mutex;

fn at(position: isize, key: usize) -> Position {
    Position { batch: 0, head: 0, row: 0, key, position, distance: position.saturating_sub_unsigned(key) }
}

/// Documents of random lengths, some of them empty, some in two parts.
fn random_ids(rng: &mut Rng, keys: usize) -> Vec<usize> {
    let (mut ids, longest) = (Vec::new(), rng.pick(&[1, 3, 20, 100]));
    while ids.len() < keys {
        let (id, len) = (rng.below(5), 1 + rng.below(longest));
        ids.extend(std::iter::repeat_n(id, len.min(keys - ids.len())));
    }
    ids
}

fn random_parents(rng: &mut Rng, tokens: usize) -> Vec<Option<usize>> {
    let roots = rng.pick(&[2, 10]);
    (0..tokens).map(|t| (t > 0 && rng.below(roots) > 0).then(|| t - 1 - rng.below(t.min(4)))).collect()
}

/// Ancestors by going up, one parent after the other.
fn sees(parents: &[Option<usize>], committed: usize, position: isize, key: usize) -> bool {
    let drafted = position - committed as isize;
    if key < committed {
        return key as isize <= position;
    }
    let mut token = usize::try_from(drafted).ok().filter(|&t| t < parents.len());
    while let Some(t) = token {
        if t == key - committed {
            return true;
        }
        token = parents[t];
    }
    false
}

#[test]
fn masks_keep_what_they_say() {
    let mut rng = Rng::new(1);
    for _ in 0..200 {
        let ids = random_ids(&mut rng, 40);
        let (documents, committed) = (Documents::by_ids(&ids), rng.below(12));
        let parents = random_parents(&mut rng, 25);
        let tree = Tree::new(committed, &parents).expect("parents in front");
        let prefix = PrefixLm::new(committed);
        for (position, key) in (-3..45).flat_map(|p| (0..45).map(move |key| (p, key))) {
            let id = |key: usize| ids.get(key);
            let same = usize::try_from(position).is_ok_and(|row| id(row) == id(key));
            assert_eq!(documents.keep(at(position, key)), same, "{ids:?}: {position}, {key}");
            let expected = sees(&parents, committed, position, key);
            assert_eq!(tree.keep(at(position, key)), expected, "{committed}, {parents:?}: {position}, {key}");
            assert_eq!(prefix.keep(at(position, key)), key < committed || key as isize <= position);
        }
    }
    let ends = Documents::by_ends(&[0, 3, 3, 5]).expect("in order");
    assert!(!ends.keep(at(3, 2)));
    assert!((3..5).all(|key| ends.keep(at(3, key))) && !ends.keep(at(3, 5)));
    assert!(ends.keep(at(5, 99)), "keys behind the last end are one more document");
}

/// Asserts that a mask's class of a block is what it says of all pairs; `exact`, not just compatible with it.
fn assert_class(what: &str, mask: &dyn MaskMod, block: &BlockPosition, exact: bool) {
    let expected = block.pairs().map(|at| mask.keep(at)).collect();
    let got = mask.class(block.clone());
    assert!(got == expected || !exact && got == BlockClass::Mixed, "{what}: {got:?}, not {expected:?}, {block:?}");
}

#[test]
fn classes_are_exact() {
    let tree = Tree::new(3, &[None, Some(0), Some(0), None, Some(1), Some(3)]).expect("parents in front");
    let documents = [Documents::by_ends(&[2, 2, 7]).expect("in order"), Documents::by_ids(&[0, 1, 1, 0, 0, 2, 1])];
    let two = PerSequence::new([PrefixLm::new(4), PrefixLm::new(1)]);
    let [first, second] = &documents;
    let masks: [(&str, Box<dyn MaskMod + '_>, bool); 8] = [
        ("ends", Box::new(first.clone()), true),
        ("ids", Box::new(second.clone()), true),
        ("tree", Box::new(tree.clone()), true),
        ("prefix", Box::new(PrefixLm::new(3)), true),
        ("per sequence", Box::new(two), true),
        ("not", Box::new(second.clone().not()), true),
        ("and", Box::new(second.clone().and(PrefixLm::new(2))), false),
        ("or", Box::new(tree.or(first.clone()).and(|at: Position| at.key != 2)), false),
    ];
    for (what, mask, exact) in &masks {
        for (position, rows) in (-3..9).flat_map(|position| (1..5).map(move |rows| (position, rows))) {
            for (start, end) in (0..9).flat_map(|start| (start + 1..10).map(move |end| (start, end))) {
                for batch in 0..2 {
                    let block = BlockPosition { batch, head: 0, rows: 2..2 + rows, keys: start..end, position };
                    assert_class(what, &**mask, &block, *exact);
                }
            }
        }
        for position in [isize::MIN, isize::MAX - 1, isize::MAX] {
            let block = BlockPosition { batch: 0, head: 0, rows: 0..3, keys: 0..2, position };
            assert_class(what, &**mask, &block, *exact);
        }
    }
}

#[test]
fn classes_of_random_masks_are_exact() {
    let mut rng = Rng::new(2);
    for _ in 0..400 {
        let (keys, committed) = (1 + rng.below(300), rng.below(200));
        let documents = Documents::by_ids(&random_ids(&mut rng, keys));
        let tree = Tree::new(committed, &random_parents(&mut rng, 80)).expect("parents in front");
        for _ in 0..20 {
            let (start, row) = (rng.below(300), rng.below(3));
            let rows = row..row + 1 + rng.below(96);
            let keys = start..start + 1 + rng.below(64);
            let block = BlockPosition { batch: 0, head: 1, rows, keys, position: rng.below(320) as isize - 10 };
            assert_class("documents", &documents, &block, true);
            assert_class("tree", &tree, &block, true);
            assert_class("prefix", &PrefixLm::new(committed), &block, true);
            assert_class("and", &documents.clone().and(tree.clone()), &block, false);
            assert_class("or", &documents.clone().or(tree.clone().not()), &block, false);
        }
    }
}

#[test]
fn combinations_know_what_one_of_the_two_decides() {
    let block = BlockPosition { batch: 0, head: 0, rows: 0..4, keys: 0..4, position: 0 };
    let class = |mask: &dyn MaskMod| mask.class(block.clone());
    let (all, mixed) = (PrefixLm::new(4), PrefixLm::new(0));
    let none = all.not();
    assert_eq!([class(&all), class(&none), class(&mixed)], [BlockClass::All, BlockClass::None, BlockClass::Mixed]);
    for other in [&all as &dyn MaskMod, &none, &mixed] {
        assert_eq!([class(&none.and(other)), class(&other.and(none))], [BlockClass::None; 2]);
        assert_eq!([class(&all.or(other)), class(&other.or(all))], [BlockClass::All; 2]);
        assert_eq!([class(&all.and(other)), class(&none.or(other))], [class(other); 2]);
        assert_eq!([class(&other.and(all)), class(&other.or(none))], [class(other); 2]);
    }
}

#[test]
fn bad_masks_are_refused() {
    let error = Documents::by_ends(&[3, 7, 5]).unwrap_err();
    assert_eq!(error, MaskError::Ends { document: 2, end: 5, previous: 7 });
    let said = "ends: document 2 ends at 5, before the one in front of it, which ends at 7; ends are cumulative";
    assert_eq!(Error::from(error).to_string(), said);
    for (parents, token, parent) in [(&[Some(0)][..], 0, 0), (&[None, Some(0), Some(7)], 2, 7)] {
        let error = Tree::new(5, parents).unwrap_err();
        assert_eq!(error, MaskError::Parent { token, parent });
        let said = format!("parents: token {token} has parent {parent}; a parent is an earlier token");
        assert!(error.to_string().starts_with(&said), "{error}");
    }
    let outside =
        std::panic::catch_unwind(|| PerSequence::new([PrefixLm::new(1)]).keep(Position { batch: 1, ..at(0, 0) }));
    let said = *outside.unwrap_err().downcast::<String>().expect("a message");
    assert_eq!(said, "sequence 1 of a batch with masks for 1");
}

/// Mask without its class.
struct PairByPair<M>(M);

impl<M: MaskMod> MaskMod for PairByPair<M> {
    fn keep(&self, at: Position) -> bool {
        self.0.keep(at)
    }
}

/// Prompt, chunks and single rows over a cache give the same rows; classes change no bit.
#[test]
fn prompts_chunks_and_steps_agree() {
    const KEYS: usize = 300;
    let tensors = Tensors::normal([1, 4, 2, KEYS, KEYS, 16, 16], 3);
    let mut cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 16, value_dim: 16 }).expect("a cache");
    cache.append(tensors.k.view(), tensors.v.view()).expect("room");
    let mut rng = Rng::new(4);
    let masks: [Box<dyn MaskMod>; 4] = [
        Box::new(Documents::by_ids(&random_ids(&mut rng, 280))),
        Box::new(PrefixLm::new(70)),
        Box::new(Tree::new(200, &random_parents(&mut rng, 100)).expect("parents in front")),
        Box::new(
            Documents::by_ends(&[90, 250]).expect("in order").and(PrefixLm::new(100)).or(|at: Position| at.key == 1),
        ),
    ];
    for (n, mask) in masks.iter().enumerate() {
        for (isa, exec) in execs() {
            let attention = |first: usize| Attention::new().align(Alignment::Offset(first as isize));
            let mods = Mods::new().mask(&**mask);
            let whole = run_as(&attention(0), tensors.inputs(), exec, &mods);
            let pairs = Mods::new().mask(PairByPair(&**mask));
            assert_same(&format!("{n}, {isa}"), &run_as(&attention(0), tensors.inputs(), exec, &pairs), &whole);
            for chunk in [0..1, 3..40, 150..151, 190..300, 299..300] {
                let q = tensors.q.rows(chunk.clone());
                let inputs = sdpa::Inputs::cached(q.view(), &cache);
                let mut out = vec![0.0; 4 * chunk.len() * 16];
                let view = ViewMut::bhld(&mut out, [1, 4, chunk.len(), 16]).expect("dense");
                let problem = attention(chunk.start).problem(inputs, Outputs::new(view)).expect("a good call");
                problem.run_once_with(exec, Run::new().mods(&mods)).expect("functions that fit");
                let expected = whole.out.rows(chunk.clone());
                let expected = expected.data.iter().map(|x| x.to_bits());
                assert!(out.iter().map(|x| x.to_bits()).eq(expected), "{n}, {isa}, rows {chunk:?}");
            }
        }
    }
}

/// Mask that notes what it is asked.
struct Recorder {
    blocks: Mutex<Vec<BlockPosition>>,
    pairs: Mutex<Vec<Position>>,
    answer: BlockClass,
}

impl Recorder {
    fn new(answer: BlockClass) -> Self {
        Self { blocks: Mutex::default(), pairs: Mutex::default(), answer }
    }
}

impl MaskMod for Recorder {
    fn keep(&self, at: Position) -> bool {
        self.pairs.lock().expect("no panic").push(at);
        at.key % 3 != 1
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        self.blocks.lock().expect("no panic").push(block);
        self.answer
    }

    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        assert_eq!(block.rows.len(), 1, "{block:?}");
        self.blocks.lock().expect("no panic").push(block);
        None
    }
}

#[test]
fn blocks_asked_about_are_of_the_call() {
    // Heads in groups, rows in parts of tiles and of row blocks, keys in parts of panels and blocks; few rows of many keys.
    for sizes in [[2, 6, 2, 131, 530, 8, 8], [1, 2, 1, 7, 15, 8, 8], [2, 4, 1, 2, 1100, 8, 8]] {
        let [batch, heads, _, rows, keys, ..] = sizes;
        let (tensors, lens) = (Tensors::normal(sizes, 5), vec![keys - 3; batch]);
        let plain = Attention::new().align(Alignment::BottomRight);
        for attention in [plain, plain.causal()] {
            for (answer, (_, exec)) in [BlockClass::Mixed, BlockClass::All, BlockClass::None]
                .into_iter()
                .flat_map(|a| execs().map(move |e| (a, e)))
            {
                let recorder = Recorder::new(answer);
                let mods = Mods::new().mask(&recorder as &dyn MaskMod);
                run_as(&attention, tensors.inputs().kv_lens(&lens), exec, &mods);
                let (blocks, pairs) = (recorder.blocks.into_inner().unwrap(), recorder.pairs.into_inner().unwrap());
                assert!(!blocks.is_empty());
                let offset = (keys - 3) as isize - rows as isize;
                for block in blocks {
                    let BlockPosition { batch: b, head, rows: asked, keys: of, position } = &block;
                    assert!(*b < batch && *head < heads && !asked.is_empty() && !of.is_empty(), "{block:?}");
                    assert!(asked.end <= rows && of.end <= keys - 3, "{block:?}");
                    assert_eq!(
                        (of.start / 256, *position),
                        ((of.end - 1) / 256, asked.start as isize + offset),
                        "{block:?}"
                    );
                }
                assert_eq!(pairs.is_empty(), answer != BlockClass::Mixed, "{answer:?}");
                for at in pairs {
                    assert!(at.batch < batch && at.head < heads && at.row < rows && at.key < keys - 3, "{at:?}");
                    assert_eq!(at.position, at.row as isize + offset, "{at:?}");
                }
            }
        }
    }
}

/// Mask that keeps a few keys of each row, strewn over all, and knows which panels of sixteen keys have none.
struct Strewn {
    keys: usize,
    kept: Vec<bool>,
}

impl MaskMod for Strewn {
    fn keep(&self, at: Position) -> bool {
        self.kept[at.row * self.keys + at.key]
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        BlockClass::from_iter(block.pairs().map(|at| self.keep(at)))
    }
}

/// Mask of the same keys, which it finds.
struct Found<'a>(&'a Strewn);

impl MaskMod for Found<'_> {
    fn keep(&self, at: Position) -> bool {
        panic!("{at:?} is found, not asked about")
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        self.0.class(block)
    }

    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        let end = block.keys.end;
        Some(block.pairs().find(|&at| self.0.keep(at)).map_or(end, |at| at.key))
    }
}

/// Panels that no row of a tile sees, or no row alone, are left out: of few rows and many, with passes over their scores in between, and of NaN.
#[test]
fn keys_strewn_over_all_have_the_same_bits_in_every_form() {
    let mut rng = Rng::new(6);
    let sizes = [
        ([150, 700], [16, 40], 60),
        ([40, 300], [24, 64], 60),
        ([9, 520], [8, 16], 60),
        // Most rows see so few panels that each is computed by itself, and some rows none.
        ([101, 530], [64, 72], 250),
    ];
    for ([rows, keys], dims, of) in sizes {
        let mut tensors = Tensors::normal([1, 4, 2, rows, keys, dims[0], dims[1]], 7);
        let kept: Vec<bool> = (0..rows * keys).map(|i| i % keys != 5 && rng.below(of) == 0).collect();
        for x in [&mut tensors.k, &mut tensors.v] {
            for head in 0..2 {
                let dim = x.shape[3];
                x.data[(head * keys + 5) * dim..][..dim].fill(f32::NAN);
            }
        }
        let bytes: Vec<u8> = kept.iter().map(|&kept| u8::from(kept)).collect();
        let bytes = sdpa::View::bhld(&bytes, [1, 1, rows, keys]).expect("dense");
        let mask = Strewn { keys, kept };
        let slopes = sdpa::alibi_slopes(4);
        let plain = Attention::new().align(Alignment::BottomRight);
        for attention in [plain, plain.softcap(3.0), plain.causal()] {
            let inputs = tensors.inputs().alibi(&slopes);
            for (isa, exec) in execs() {
                let classes = run_as(&attention, inputs, exec, &Mods::new().mask(&mask as &dyn MaskMod));
                let pairs = run_as(&attention, inputs, exec, &Mods::new().mask(PairByPair(&mask as &dyn MaskMod)));
                let found = run_as(&attention, inputs, exec, &Mods::new().mask(Found(&mask)));
                let tensor = run_as(&attention, inputs.mask(sdpa::Mask::Keep(bytes)), exec, &Mods::new());
                assert_same(&format!("{rows} rows, {isa}: pair by pair"), &pairs, &classes);
                assert_same(&format!("{rows} rows, {isa}: as a tensor"), &tensor, &classes);
                assert_same(&format!("{rows} rows, {isa}: key by key"), &found, &classes);
                assert!(classes.out.data.iter().all(|x| x.is_finite()), "{rows} rows, {isa}");
            }
        }
    }
}

/// The gradient of a panel that is left out is never computed: what a workspace holds does not show.
#[test]
fn keys_strewn_over_all_have_the_same_gradients_in_every_form() {
    const ROWS: usize = 120;
    const KEYS: usize = 500;
    const DIM: usize = 24;
    let mut rng = Rng::new(8);
    let kept: Vec<bool> = (0..ROWS * KEYS).map(|_| rng.below(60) == 0).collect();
    let bytes: Vec<u8> = kept.iter().map(|&kept| u8::from(kept)).collect();
    let bytes = sdpa::View::bhld(&bytes, [1, 1, ROWS, KEYS]).expect("dense");
    let mask = Strewn { keys: KEYS, kept };
    let tensors = Tensors::normal([1, 2, 1, ROWS, KEYS, DIM, DIM], 9);
    let attention = Attention::new().align(Alignment::BottomRight);
    let gradients = |inputs: sdpa::Inputs<'_>, d_out: &[f32], workspace: &mut sdpa::Workspace, mods: &Masked<'_>| {
        let (shape, rows) = ([1, 2, ROWS, DIM], [1, 2, ROWS, 1]);
        let (mut out, mut lse) = (vec![0.0f32; 2 * ROWS * DIM], vec![0.0f32; 2 * ROWS]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, shape).expect("dense"));
        let outputs = outputs.lse(ViewMut::bhld(&mut lse, rows).expect("dense"));
        sdpa::attention_with(&attention, inputs, outputs, Run::new().mods(mods)).expect("a good call");
        let [out, d_out] = [&out[..], d_out].map(|x| sdpa::View::bhld(x, shape).expect("dense"));
        let saved = sdpa::Saved::new(out, sdpa::View::bhld(&lse, rows).expect("dense"), d_out);
        let [mut dq, mut dk, mut dv] = [2 * ROWS, KEYS, KEYS].map(|len| vec![f32::NAN; len * DIM]);
        let written = sdpa::Gradients::new()
            .q(ViewMut::bhld(&mut dq, shape).expect("dense"))
            .k(ViewMut::bhld(&mut dk, [1, 1, KEYS, DIM]).expect("dense"))
            .v(ViewMut::bhld(&mut dv, [1, 1, KEYS, DIM]).expect("dense"));
        let problem = attention.backward(inputs, saved, written).expect("a good call");
        let plan = sdpa::BackwardPlan::new(&problem, sdpa::Exec::serial());
        problem.run_with(&plan, workspace, Run::new().mods(mods)).expect("functions that fit");
        [dq, dk, dv]
    };
    let (mut workspace, none) = (sdpa::Workspace::new(), Mods::new().mask(&() as &dyn MaskMod));
    let d_out: Vec<f32> = (0..2 * ROWS * DIM).map(|i| (i as f32).sin()).collect();
    // Leaves NaN wherever gradients are computed.
    gradients(tensors.inputs(), &vec![f32::NAN; d_out.len()], &mut workspace, &none);
    let classes = gradients(tensors.inputs(), &d_out, &mut workspace, &Mods::new().mask(&mask as &dyn MaskMod));
    let mut fresh = sdpa::Workspace::new();
    let tensor = gradients(tensors.inputs().mask(sdpa::Mask::Keep(bytes)), &d_out, &mut fresh, &none);
    let pairs = PairByPair(&mask as &dyn MaskMod);
    let pairs = gradients(tensors.inputs(), &d_out, &mut fresh, &Mods::new().mask(&pairs as &dyn MaskMod));
    assert!(classes == tensor && classes == pairs && classes.iter().flatten().all(|x| x.is_finite()));
}

/// A mask chosen at run time.
type Masked<'a> = Mods<(), &'a dyn MaskMod>;
