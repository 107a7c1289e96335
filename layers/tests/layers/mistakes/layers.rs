//! 3 and 4: rows, sequences and lists that do not fit a layer, and parts that do not fit together.

use crate::mistake::{Mistake, mistake, outcome};
use sdpa_layers::{Compute, Dictionary, Embedding, Linear, MultiHeadAttention, Rope, RopePairs, Sequences, Weights};

static ZEROS: [f32; 64] = [0.0; 64];

pub(super) fn mistakes() -> Vec<Mistake> {
    let mut all = rows();
    all.extend(parts());
    all
}

/// 3: rows, and what belongs to each of them.
fn rows() -> Vec<Mistake> {
    let compute = &mut Compute::default();
    let linear = linear([2, 8]);
    let mut forward = |x: usize, out: usize| outcome(linear.forward(&ZEROS[..x], &mut vec![0.0; out], compute));
    let (whole, more) = (forward(30, 6), forward(24, 12));
    let table = Embedding::new([0.5; 10 * 4], 4).unwrap();
    let mut out = [0.0; 8];
    let tokens = table.look_up(&[3, 10], &mut out, compute);
    let rows = table.add_positions(&mut out, Sequences::one(3), 0, compute);
    let places = table.add_positions(&mut out, Sequences::one(2), 9, compute);
    let ends = table.add_positions(&mut out, Sequences::Ragged(&[0, 3, 1, 2]), 0, compute);
    let mut dictionary = Dictionary::<f32>::new(2, 1.0).unwrap();
    dictionary.insert(&[1.0, 0.0], 1.0).unwrap();
    let found = dictionary.get_many(&[1.0, 0.0, 1.0], &mut out, compute);
    vec![
        mistake(3, "x of no whole rows", whole, "x: length is 30, but must be a multiple of 8, the width of a row"),
        mistake(
            3,
            "out of more rows",
            more,
            "out: length is 12, but must be exactly 6, the number of rows × their width",
        ),
        mistake(
            3,
            "a token beyond the table",
            outcome(tokens),
            "tokens: entry 1 is 10, but must be at most 9, the last row of the table",
        ),
        mistake(
            3,
            "rows of other sequences",
            outcome(rows),
            "x: rows is 2, but must be exactly 3, the tokens of all sequences",
        ),
        mistake(
            3,
            "a position beyond the table",
            outcome(places),
            "positions: entry 1 is 10, but must be at most 9, the last row of the table",
        ),
        mistake(
            3,
            "sequences that fall",
            outcome(ends),
            "sequences: entry 2 is 1, but must be at least 3, the entry before it",
        ),
        mistake(
            3,
            "queries of no whole rows",
            outcome(found),
            "queries: length is 3, but must be a multiple of 2, the width of the dictionary",
        ),
    ]
}

/// 4: parts of layers.
fn parts() -> Vec<Mistake> {
    let heads =
        |heads, shapes: [[usize; 2]; 4]| outcome(MultiHeadAttention::new(heads, shapes.map(linear)).map(|_| ()));
    let weights = Weights::rows(&ZEROS[..6], [2, 3]).unwrap();
    let mut x = [0.0; 4];
    let rope = Rope::new(8, 4, 1e4, RopePairs::Half).unwrap();
    let narrow = rope.rotate(&mut x, [2, 2], Sequences::one(1), 0, &mut Compute::default());
    vec![
        mistake(
            4,
            "weights of another size",
            outcome(Weights::rows(&ZEROS[..6], [2, 4]).map(|_| ())),
            "weights: length is 6, but must be exactly 8, outputs × inputs",
        ),
        mistake(
            4,
            "more outputs than there are",
            outcome(weights.part(1..3).map(|_| ())),
            "part: end is 3, but must be at most 2, the outputs of the weights",
        ),
        mistake(
            4,
            "q of no whole heads",
            heads([2, 2], [[5, 4], [4, 4], [4, 4], [4, 4]]),
            "q projection: outputs is 5, but must be a multiple of 2, the number of query heads",
        ),
        mistake(
            4,
            "k of other heads",
            heads([2, 1], [[4, 4], [4, 4], [2, 4], [4, 4]]),
            "k projection: outputs is 4, but must be exactly 2, kv_heads × the head_dim of q",
        ),
        mistake(
            4,
            "out of other values",
            heads([2, 2], [[4, 4], [4, 4], [6, 4], [4, 4]]),
            "out projection: inputs is 4, but must be exactly 6, query heads × the value_dim of v",
        ),
        mistake(
            4,
            "heads narrower than a rope",
            outcome(narrow),
            "x: head_dim is 2, but must be at least 4, the dim of the rope",
        ),
    ]
}

fn linear([outputs, inputs]: [usize; 2]) -> Linear {
    Linear::new(Weights::rows(&ZEROS[..outputs * inputs], [outputs, inputs]).unwrap())
}
