//! Trees of drafted tokens: each sees its ancestors as if they had been decoded one by one; what is kept of a tree is what
//! tensors of the accepted tokens are.

use super::masks::{Both, bits_of_mask, check_mask};
use crate::fuzzer::array::Array;
use crate::fuzzer::bits::{Recorder, settle};
use crate::fuzzer::case::{Case, Sides};
use crate::fuzzer::draw::{DTYPES, Home, numbers, options, small};
use crate::fuzzer::functions::Functions;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::sources::{Source, place};
use crate::fuzzer::stage::Stage;
use sdpa::masks::Tree;
use sdpa::{Alignment, Dtype, Exec, Position};

pub(super) fn check(rng: &mut Rng) {
    let (committed, parents) = tree(rng);
    refused(rng, committed, &parents);
    let (mut case, home) = drafted_somewhere(rng, committed, parents.len());
    let mut both = both(committed, parents.clone());
    // Without given positions rows of a tree stand at distances that nobody knows.
    match rng.below(8) {
        0 => case.alibi = Some(vec![0.5; case.heads()]),
        1 => case.settings.window = Some(Sides { left: Some(rng.below(300)), right: None, first: rng.below(3) }),
        _ => {}
    }
    if rng.one_in(2) {
        let drafted = Tree::new(committed, &parents).expect("parents come first").positions();
        let keys = (0..committed as i32).chain(drafted.iter().copied()).collect();
        case.positions = [Some(vec![drafted]), Some(vec![keys])];
    }
    both.fits = case.positions[0].is_some() || case.alibi.is_none() && case.settings.window.is_none();
    check_mask(rng, &case, home, &both);
    if let Home::Cache(_) = home {
        keep_path(rng, case, committed, &parents);
    }
}

/// What the rows of a tree give.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let (committed, parents) = tree(rng);
    let (mut case, home) = drafted_somewhere(rng, committed, parents.len());
    settle(rng, &mut case);
    bits_of_mask(rng, recorder, &case, home, &both(committed, parents));
}

/// Tokens before a tree, and the parents of its own.
fn tree(rng: &mut Rng) -> (usize, Vec<Option<usize>>) {
    let (committed, nodes) = (rng.pick(&[0, 1, 5, 16, 100, 250, 256, 300]), 1 + rng.below(24));
    let reach = rng.pick(&[1, 3, nodes]);
    let parent = |node: usize| {
        let parent = node.checked_sub(1 + rng.below(reach));
        if rng.one_in(6) { None } else { parent }
    };
    (committed, (0..nodes).map(parent).collect())
}

fn drafted_somewhere(rng: &mut Rng, committed: usize, nodes: usize) -> (Case, Home) {
    let dtype = rng.pick(&DTYPES);
    let home = rng.pick(&[Home::Tensors, Home::Pages, Home::Pool(dtype), Home::Cache(dtype), Home::Cache(dtype)]);
    (drafted(rng, committed + nodes, nodes, dtype), home)
}

/// A tree, and its definition: a key is a row's ancestor if the row's parents lead there.
fn both(committed: usize, parents: Vec<Option<usize>>) -> Both {
    let tree = Tree::new(committed, &parents).expect("parents come first");
    let what = format!("a tree behind {committed}: {parents:?}");
    let plain = move |at: Position| {
        let Some(key) = at.key.checked_sub(committed) else { return at.key as isize <= at.position };
        let mut row = usize::try_from(at.position).ok().and_then(|position| position.checked_sub(committed));
        while let Some(node) = row.filter(|&node| node < parents.len()) {
            if node == key {
                return true;
            }
            row = parents[node];
        }
        false
    };
    Both { stock: Box::new(tree), plain: Box::new(plain), what, fits: true }
}

/// Trees with parents that do not come first.
fn refused(rng: &mut Rng, committed: usize, parents: &[Option<usize>]) {
    let mut bad = parents.to_vec();
    let token = rng.below(bad.len());
    bad[token] = Some(rng.pick(&[token, token + 1, usize::MAX]));
    assert!(Tree::new(committed, &bad).is_err(), "{bad:?}");
}

/// A call of the last rows of a sequence, without anything that goes by distance.
fn drafted(rng: &mut Rng, keys: usize, rows: usize, dtype: Dtype) -> Case {
    let kv_heads = rng.up_to(2);
    let kv = [(); 2].map(|()| {
        let dim = rng.pick(&[1, 5, 16, 33]);
        numbers(rng, [1, kv_heads, keys, dim], dtype)
    });
    let mut case = small(rng, kv, [dtype; 2], vec![keys]);
    case.q = numbers(rng, [1, case.heads(), rows, case.q.shape[3]], Dtype::F32);
    (case.bias, case.mask, case.alibi, case.sinks) = (None, None, None, None);
    options(rng, &mut case);
    (case.alibi, case.settings.window, case.settings.alignment) = (None, None, Some(Alignment::BottomRight));
    case.functions = Functions::default();
    case.settle_precision();
    case
}

/// Takes up one path of the tree: the cache then holds what it would without the rest.
fn keep_path(rng: &mut Rng, mut case: Case, committed: usize, parents: &[Option<usize>]) {
    let mut path = Vec::new();
    let mut next = Some(rng.below(parents.len()));
    while let Some(node) = next {
        path.insert(0, node);
        next = parents[node];
    }
    let Source::Cache(mut cache) = place(rng, &case, Home::Cache(case.dtypes[1])) else { unreachable!("a cache") };
    cache.keep(0, committed, &path).expect("they are in order");
    let keys: Vec<usize> = (0..committed).chain(path.iter().map(|node| committed + node)).collect();
    for x in [&mut case.k, &mut case.v] {
        let [_, heads, _, dim] = x.shape;
        *x = Array::from_fn([1, heads, keys.len(), dim], |[_, h, j, c]| x.get([0, h, keys[j], c]));
    }
    case.kv_lens = Some(vec![keys.len()]);
    (case.bias, case.mask, case.positions) = (None, None, [None, None]);
    let what = format!("path {path:?} behind {committed}: {}", case.describe());
    let expected =
        Stage::new(rng, &case, Home::Tensors).run(&what, &mut Outs::blank(rng, &case, Wanted::ALL), Exec::serial());
    let kept = Stage::over(rng, &case, Source::Cache(cache));
    kept.run(&what, &mut Outs::blank(rng, &case, Wanted::ALL), Exec::serial()).same(&what, &expected);
}
