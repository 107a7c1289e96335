//! Trees of drafted tokens: each token is computed as if its path alone had been decoded; what measures distances is
//! refused.

use crate::kv_support::{append_tokens, every_format, picked};
use crate::support::{Rng, Tensor, Tensors, assert_same_bits, execs};
use sdpa::masks::{Documents, MaskError, PerSequence, Tree};
use sdpa::parts::BackwardState;
use sdpa::{
    Alignment, Attention, AttnState, BlockClass, BlockPosition, BlockTable, CacheFormat, CurrentPool, Error, Exec,
    Gradients, Inputs, KvCache, KvShape, Mask, MaskMod, Mods, Outputs, Pages, Plan, Position, Run, Saved, View,
    ViewMut, Window, Workspace, alibi_slopes, naive,
};
use std::sync::Arc;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIMS: [usize; 2] = [16, 24];

/// One sequence: committed tokens and a draft, with the options of its call.
#[derive(Clone)]
struct Draft {
    committed: usize,
    parents: Vec<Option<usize>>,
    /// Keys and values, committed ones first.
    tokens: [Tensor; 2],
    q: Tensor,
    bias: Tensor,
    /// 1 where a row may see a key.
    mask: Tensor,
    attention: Attention,
    sinks: Vec<f32>,
    /// With slopes, positions by depth.
    slopes: Option<[f32; HEADS]>,
}

impl Draft {
    fn random(rng: &mut Rng, committed: usize, drafted: usize) -> Self {
        let parents = (0..drafted).map(|t| (t > 0 && rng.below(6) > 0).then(|| t - 1 - rng.below(t.min(4)))).collect();
        let keys = committed + drafted;
        let plain = Attention::new().scale(rng.pick(&[0.25, -0.5, 1.0])).align(Alignment::BottomRight);
        let capped = if rng.below(2) == 0 { plain.softcap(3.0) } else { plain };
        let attention = if rng.below(2) == 0 { capped.causal() } else { capped };
        let own = |key, row: usize| key == committed + row;
        Self {
            committed,
            parents,
            tokens: DIMS.map(|dim| Tensor::normal([1, KV_HEADS, keys, dim], rng)),
            q: Tensor::normal([1, HEADS, drafted, DIMS[0]], rng),
            bias: Tensor::normal([1, HEADS, drafted, keys], rng),
            mask: Tensor::from_fn([1, 1, drafted, keys], |[_, _, i, j]| f32::from(own(j, i) || rng.below(5) > 0)),
            attention,
            sinks: (0..HEADS).map(|_| rng.normal()).collect(),
            slopes: None,
        }
    }

    /// Adds slopes and a window.
    fn measured(self, window: Window) -> Self {
        Self { attention: self.attention.window(window), slopes: Some([0.3, 0.1, 0.02, 0.5]), ..self }
    }

    /// A drafted token's ancestors and itself, in order.
    fn path(&self, token: usize) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(Some(token), |&token| self.parents[token]).collect();
        path.reverse();
        path
    }

    /// Output and log-sum-exp of some rows, over keys that are somewhere; `columns` are the keys' columns in the options.
    fn run<M: MaskMod>(&self, source: Inputs<'_>, rows: &[usize], columns: &[usize], exec: Exec, mask: M) -> Tensor {
        let pick = |x: &Tensor| {
            let shape = [1, x.shape[1], rows.len(), columns.len()];
            Tensor::from_fn(shape, |[_, h, i, j]| x.get([0, h, rows[i], columns[j]]))
        };
        let (bias, mask_rows) = (pick(&self.bias), pick(&self.mask));
        let bytes: Vec<u8> = mask_rows.data.iter().map(|&x| x as u8).collect();
        let bytes = View::bhld(&bytes, mask_rows.shape).expect("dense");
        let inputs = source.bias(bias.view()).mask(Mask::keep(bytes)).sinks(&self.sinks);
        let inputs = self.slopes.as_ref().map_or(inputs, |slopes| inputs.alibi(slopes));
        let mut out = Tensor::filled([1, HEADS, rows.len(), DIMS[1]], f32::NAN);
        let shape = out.shape;
        let outputs = Outputs::new(ViewMut::bhld(&mut out.data, shape).expect("dense"));
        let mods = Mods::new().mask(mask).score(|score: f32, at: Position| score * (1.0 + 0.1 * at.head as f32));
        self.attention
            .problem(inputs, outputs)
            .expect("a good call")
            .run_once_with(exec, Run::new().mods(&mods))
            .expect("it fits");
        out
    }

    /// Output of all rows of the draft at once.
    fn whole(&self, source: Inputs<'_>, exec: Exec, tree: &Tree) -> Tensor {
        let (rows, keys) = (self.parents.len(), self.committed + self.parents.len());
        let [rows, columns] = [rows, keys].map(|n| (0..n).collect::<Vec<_>>());
        let at = tree.positions();
        let keys: Vec<i32> = (0..self.committed as i32).chain(at.iter().copied()).collect();
        let (at, keys): ([&[i32]; 1], [&[i32]; 1]) = ([&at], [&keys]);
        let source = if self.slopes.is_some() { source.row_positions(&at).key_positions(&keys) } else { source };
        self.run(source, &rows, &columns, exec, tree as &dyn MaskMod)
    }

    /// The path to a token, decoded token by token: the output of its last row.
    fn step(&self, empty: &KvCache, token: usize, exec: Exec) -> Tensor {
        let (mut cache, path) = (empty.clone(), self.path(token));
        append_tokens(&mut cache, 0, &picked(&self.tokens, &(0..self.committed).collect::<Vec<_>>()));
        let columns: Vec<usize> = (0..self.committed).chain(path.iter().map(|t| self.committed + t)).collect();
        for n in self.committed..columns.len() {
            append_tokens(&mut cache, 0, &picked(&self.tokens, &columns[n..n + 1]));
        }
        let q = self.q.rows(token..token + 1);
        self.run(Inputs::cached(q.view(), &cache), &[token], &columns, exec, ())
    }

    /// Asserts that each row of a call over the whole tree is what decoding its path gives; the same bits where the path is
    /// the first tokens of the draft, so that all keys have their places. Returns the number of such rows.
    fn check(&self, what: &str, got: &Tensor, empty: &KvCache, exec: Exec, bound: f32) -> usize {
        let mut same = 0;
        for token in 0..self.parents.len() {
            let (row, expected) = (got.rows(token..token + 1), self.step(empty, token, exec));
            let in_place = self.path(token).len() == token + 1;
            same += usize::from(in_place);
            for (&x, &y) in row.data.iter().zip(&expected.data) {
                let fits = if in_place { x.to_bits() == y.to_bits() } else { (x - y).abs() <= bound };
                assert!(fits, "{what}, token {token} of {:?}: {x}, not {y}", self.parents);
            }
        }
        same
    }
}

/// The rows of a tree against the paths, over a cache in every format and over tensors and pages; some by positions, under
/// slopes and a window.
#[test]
fn a_token_of_a_tree_is_computed_as_its_path_decoded_token_by_token() {
    let (mut rng, mut same) = (Rng::new(1), 0);
    let empty =
        KvCache::new(1, KvShape { kv_heads: KV_HEADS, head_dim: DIMS[0], value_dim: DIMS[1] }).expect("good sizes");
    let [near, first] = [Window::inclusive(Some(3), None), Window::inclusive(Some(300), None).keep_first(2)];
    for (committed, drafted, window) in [
        (0, 9, None),
        (5, 1, None),
        (7, 20, None),
        (244, 17, None),
        (250, 12, None),
        (256, 7, None),
        (511, 30, None),
        (0, 9, Some(near)),
        (40, 17, Some(first)),
        (255, 7, Some(near)),
        (600, 20, Some(first)),
    ] {
        let draft = Draft::random(&mut rng, committed, drafted);
        let draft = window.map_or(draft.clone(), |window| draft.measured(window));
        let tree = Tree::new(committed, &draft.parents).expect("parents in front");
        for (isa, exec) in execs() {
            for (name, empty) in every_format(&empty) {
                let mut cache = empty.clone();
                append_tokens(&mut cache, 0, &draft.tokens);
                let what = format!("{committed} committed, {name}, {isa}");
                let got = draft.whole(Inputs::cached(draft.q.view(), &cache), exec, &tree);
                // Weights over integers are rounded, block by block of 256 keys.
                let bound = match cache.format().values {
                    CacheFormat::Int4(_) => 2e-2,
                    CacheFormat::Int8PerToken => 2e-4,
                    _ => 1e-5,
                };
                same += draft.check(&what, &got, &empty, exec, bound);
            }
            let [k, v] = draft.tokens.each_ref().map(Tensor::view);
            let what = format!("{committed} committed, {isa}");
            draft.check(&what, &draft.whole(Inputs::new(draft.q.view(), k, v), exec, &tree), &empty, exec, 1e-5);
            let table = BlockTable { entries: &[0], lens: &[committed + drafted] };
            let pages = Pages::new(k, v, table).expect("one page");
            draft.check(&what, &draft.whole(Inputs::paged(draft.q.view(), pages), exec, &tree), &empty, exec, 1e-5);
        }
    }
    assert!(same > 50, "{same} rows with all keys in their places");
}

/// A tree, a chunk of a prompt and a step in one call: each has the bits of a call of its own.
#[test]
fn a_tree_beside_a_prompt_and_a_step_is_each_alone() {
    let (mut rng, [dim, value_dim]) = (Rng::new(7), DIMS);
    let empty = KvCache::new(3, KvShape { kv_heads: KV_HEADS, head_dim: dim, value_dim }).expect("good sizes");
    for lens in [[17, 40, 9], [265, 257, 600]] {
        let mut cache = empty.clone();
        for (sequence, &len) in lens.iter().enumerate() {
            append_tokens(&mut cache, sequence, &DIMS.map(|dim| Tensor::normal([1, KV_HEADS, len, dim], &mut rng)));
        }
        // The last tokens of sequence 0 are a tree, the last 12 of sequence 1 a chunk; sequence 2 has a step.
        let parents = [None, Some(0), Some(0), Some(1), None];
        let tree = Tree::new(lens[0] - parents.len(), &parents).expect("parents in front");
        let (sequences, ends) = ([1, 0, 2], [0, 12, 17, 18]);
        let mask = PerSequence::new([None, Some(tree.clone()), None]);
        let q = Tensor::normal([1, HEADS, ends[3], dim], &mut rng);
        let attention = Attention::new().causal().align(Alignment::BottomRight);
        let run = |inputs: Inputs<'_>, rows: usize, exec: Exec, mask: &dyn MaskMod| {
            let mut out = Tensor::filled([1, HEADS, rows, value_dim], f32::NAN);
            let shape = out.shape;
            let outputs = Outputs::new(ViewMut::bhld(&mut out.data, shape).expect("dense"));
            let problem = attention.problem(inputs, outputs).expect("a good call");
            problem.run_once_with(exec, Run::new().mods(&Mods::new().mask(mask))).expect("it fits");
            out
        };
        for (isa, exec) in execs() {
            let inputs = Inputs::cached(q.view(), &cache).sequences(&sequences).ragged_queries(&ends);
            let together = run(inputs, ends[3], exec, &mask);
            for (n, sequence) in sequences.into_iter().enumerate() {
                let rows = q.rows(ends[n]..ends[n + 1]);
                let alone = [sequence];
                let inputs = Inputs::cached(rows.view(), &cache).sequences(&alone);
                let mask: &dyn MaskMod = if sequence == 0 { &tree } else { &() };
                let expected = run(inputs, rows.shape[2], exec, mask);
                let got = together.rows(ends[n]..ends[n + 1]);
                assert_same_bits(&format!("{lens:?}, sequence {sequence}, {isa}"), &got, &expected);
            }
        }
    }
}

/// A row behind a draft would not see its own key: the neutral tree of a chunk is none, not one of the keys before it.
#[test]
fn rows_behind_a_draft_are_refused_and_nothing_written() {
    let x = Tensor::normal([2, 2, 4, 8], &mut Rng::new(3));
    let inputs = Inputs::new(x.view(), x.view(), x.view());
    let last_at = |position: isize| Attention::new().align(Alignment::Offset(position - 3));
    for (committed, drafted) in [(0, 0), (3, 0), (1, 3), (9, 2)] {
        let tree = Tree::new(committed, &vec![None; drafted]).expect("parents in front");
        let end = committed + drafted;
        let fitting = Mods::new().mask(tree.clone());
        naive::answer::<f32, _, _, _>(&last_at(end as isize - 1), &inputs, &fitting)
            .expect("rows up to the last token");
        let any = |at: Position| at.key < 9;
        let masks: [(usize, Box<dyn MaskMod>); 6] = [
            (0, Box::new(tree.clone())),
            (0, Box::new(any.and(tree.clone()))),
            (0, Box::new(tree.clone().or(any).not())),
            (0, Box::new(Some(tree.clone()))),
            (0, Box::new(Arc::new(tree.clone()) as Arc<dyn MaskMod>)),
            (1, Box::new(PerSequence::new([None, Some(tree)]))),
        ];
        for position in [end as isize, end as isize + 7, isize::MAX] {
            for (sequence, mask) in &masks {
                let refused = Error::Mask(MaskError::Behind { sequence: *sequence, position, end });
                assert_refused(&last_at(position), inputs, &**mask, &refused);
                refused_in_states(&last_at(position), inputs, &**mask, &refused);
            }
        }
    }
    let words = Error::Mask(MaskError::Behind { sequence: 1, position: 9, end: 9 }).to_string();
    let expected =
        "mask function: the last row of sequence 1 is at position 9, but its tree of drafted tokens ends at 9";
    assert!(words.starts_with(expected), "{words}");
}

/// Asserts that states refuse a mask, wherever their first key lies.
fn refused_in_states(attention: &Attention, inputs: Inputs<'_>, mask: &dyn MaskMod, refused: &Error) {
    let mods = Mods::new().mask(mask);
    for first in [0, 256] {
        let state =
            AttnState::from_inputs(*attention, inputs, Exec::serial()).and_then(|state| state.starting_at(first));
        assert_eq!(state.expect("a state").mods(&mods).map(|_| ()), Err(refused.clone()), "keys from {first}");
    }
    let (x, lse) = (inputs.queries(), Tensor::filled([2, 2, 4, 1], 0.0));
    let state = BackwardState::new(*attention, inputs, Saved::new(x, lse.view(), x), Exec::serial());
    assert_eq!(state.expect("a state").mods(&mods).map(|_| ()), Err(refused.clone()));
}

/// Rows of a state that are said to lie behind a draft are refused, whichever is said first.
#[test]
fn rows_that_move_behind_a_draft_are_refused() {
    let (tree, tensors) = (Tree::new(8, &[None]).expect("a root"), Tensors::normal([1, 1, 1, 4, 0, 8, 8], 1));
    let (mods, lse) = (Mods::new().mask(tree), Tensor::filled([1, 1, 4, 1], 0.0));
    let (attention, inputs) = (Attention::new().causal().align(Alignment::TopLeft), tensors.inputs());
    for (first, behind) in [(5, None), (6, Some(9))] {
        let refused = behind.map(|position| Error::Mask(MaskError::Behind { sequence: 0, position, end: 9 }));
        let forward = || AttnState::from_inputs(attention, inputs, Exec::serial()).expect("a state");
        let saved = Saved::new(tensors.q.view(), lse.view(), tensors.q.view());
        let backward = || BackwardState::new(attention, inputs, saved, Exec::serial()).expect("a state");
        assert_eq!(forward().rows_from(first).and_then(|state| state.mods(&mods)).err(), refused);
        assert_eq!(forward().mods(&mods).and_then(|state| state.rows_from(first)).err(), refused);
        assert_eq!(backward().starting_at(first).and_then(|state| state.mods(&mods)).err(), refused);
        assert_eq!(backward().mods(&mods).and_then(|state| state.starting_at(first)).err(), refused);
    }
}

/// A mask that is `None` is none.
#[test]
fn no_mask_hides_nothing() {
    let none = None::<Tree>;
    let at = Position { batch: 0, head: 0, row: 0, key: 7, position: -1, distance: -8 };
    let block = BlockPosition { batch: 0, head: 0, rows: 0..3, keys: 5..9, position: -1 };
    assert!(none.keep(at) && none.class(block.clone()) == BlockClass::All && none.next_kept(block) == Some(5));
    assert!(!none.is_given() && Some(()).is_given() == ().is_given() && Some(|_: Position| true).is_given());
}

/// A window that shows all, and slopes.
fn measuring(attention: Attention, slopes: &[f32]) -> [(&'static str, Attention, Option<&[f32]>); 3] {
    let window = attention.window(Window::inclusive(Some(1000), None));
    [("window", window, None), ("alibi", attention, Some(slopes)), ("window", window, Some(slopes))]
}

/// Asserts that a call with a mask is refused in every way to make it, forward and backward, and nothing written.
fn assert_refused(attention: &Attention, inputs: Inputs<'_>, mask: &dyn MaskMod, refused: &Error) {
    let (mods, shape) = (Mods::new().mask(mask), inputs.queries().shape());
    let (x, lse) = (Tensor::filled(shape, 0.5), Tensor::filled([shape[0], shape[1], shape[2], 1], 0.0));
    let saved = Saved::new(x.view(), lse.view(), x.view());
    let mut memory = vec![42.0; x.data.len()];
    for way in 0..5 {
        let outputs = Outputs::new(ViewMut::bhld(&mut memory, shape).expect("dense"));
        let problem = attention.problem(inputs, outputs).expect("a good call");
        let (plan, mut workspace) = (Plan::new(&problem, Exec::default()), Workspace::new());
        let done = match way {
            0 => problem.run_with(&plan, &mut workspace, Run::new().mods(&mods)),
            1 => problem.run_with(&plan, &mut workspace, Run::new().mods(&mods).executor(&CurrentPool)),
            2 => problem.run_once_with(Exec::default(), Run::new().mods(&mods)),
            3 => problem.run_with(&plan, &mut workspace, Run::new().mods(&mods).until(&|| false)),
            _ => {
                let gradients = Gradients::new().q(ViewMut::bhld(&mut memory, shape).expect("dense"));
                sdpa::attention_backward_with(attention, inputs, saved, gradients, Run::new().mods(&mods))
            }
        };
        assert_eq!(done, Err(refused.clone()), "way {way}");
        assert!(memory.iter().all(|&x| x == 42.0), "way {way}");
    }
    assert_eq!(naive::answer::<f64, _, _, _>(attention, &inputs, &mods).unwrap_err(), *refused);
    let gradients = naive::gradients::<f64, _, _, _>(attention, &inputs, x.view(), None, &mods);
    assert_eq!(gradients.unwrap_err(), *refused);
}

#[test]
fn a_tree_in_a_call_that_measures_distances_is_refused_and_nothing_written() {
    let (shape, tree) = ([2, 2, 4, 8], Tree::new(1, &[None, Some(0), Some(0)]).expect("parents in front"));
    let any = |at: Position| at.key < 9;
    let masks: [Box<dyn MaskMod>; 9] = [
        Box::new(tree.clone()),
        Box::new(tree.clone().and(any)),
        Box::new(any.and(tree.clone())),
        Box::new(any.or(tree.clone())),
        Box::new(tree.clone().or(any)),
        Box::new(tree.clone().not()),
        Box::new(Arc::new(tree.clone()) as Arc<dyn MaskMod>),
        Box::new(PerSequence::new([Box::new(any) as Box<dyn MaskMod>, Box::new(tree.clone())])),
        Box::new(PerSequence::new([None, Some(tree.clone())])),
    ];
    let x = Tensor::normal(shape, &mut Rng::new(1));
    let slopes = alibi_slopes(2);
    for (option, attention, slopes) in measuring(Attention::new(), &slopes) {
        let inputs = Inputs::new(x.view(), x.view(), x.view());
        let inputs = slopes.map_or(inputs, |slopes| inputs.alibi(slopes));
        for mask in &masks {
            assert_refused(&attention, inputs, &**mask, &Error::Mask(MaskError::Distance { option }));
        }
        let documents = Mods::new().mask(Documents::by_ends(&[2, 4]).expect("in order"));
        naive::answer::<f32, _, _, _>(&attention, &inputs, &documents).expect("other masks go with distances");
    }
    let words = Error::Mask(MaskError::Distance { option: "alibi" }).to_string();
    assert!(words.starts_with("alibi: does not go with a tree of drafted tokens"), "{words}");
}
