//! BERT: a small one against the same model in f64; the same bits however texts are laid out and on whatever threads.

use crate::counting::counted;
use crate::support::{Rng, UNWRITTEN};
use crate::tiny_bert::{CONFIG, Model, Reference, model, source};
use crate::vectors::{bits, unwritten};
use sdpa::{Bound, Error, Exec, Isa};
use sdpa_layers::{Bert, BertInput, Compute, Pooling, Sequences, Tensor, normalise};
use std::collections::HashMap;

const WIDTH: usize = CONFIG.hidden_size;

fn bert(model: &Model) -> Bert {
    Bert::new(CONFIG, &source(model)).unwrap()
}

fn embed(bert: &Bert, input: BertInput<'_>, count: usize, exec: Exec) -> Vec<f32> {
    let mut out = unwritten(count * WIDTH);
    bert.embed(input, Pooling::Mean, &mut out, &mut Compute::new(exec)).unwrap();
    out
}

/// Texts of all lengths, the empty and the longest included, end to end: tokens, types, ends.
fn texts(count: usize) -> (Vec<u32>, Vec<u32>, Vec<usize>) {
    let mut rng = Rng::new(5);
    let mut ends = vec![0];
    for text in 0..count {
        let len = if text == 1 { 0 } else { (7 * text + 20) % (CONFIG.max_position_embeddings + 1) };
        ends.push(ends[text] + len);
    }
    let mut draw = |below| (0..ends[count]).map(|_| rng.below(below) as u32).collect();
    (draw(CONFIG.vocab_size), draw(CONFIG.type_vocab_size), ends)
}

fn assert_close(what: &str, got: &[f32], expected: &[f64], bound: f64) {
    let (error, at) = crate::support::worst(got, expected);
    assert!(error < bound, "{what}: element {at} is {}, expected {}", got[at], expected[at]);
}

#[test]
fn hidden_states_are_those_of_the_model_in_f64() {
    let model = model();
    let (bert, reference) = (bert(&model), Reference(&model));
    let (tokens, types, ends) = texts(6);
    for isa in Isa::available() {
        for layers in 0..=CONFIG.num_hidden_layers {
            let mut compute = Compute::new(Exec::serial().isa(isa));
            for (types, all_zero) in [(&types, false), (&vec![0; tokens.len()], true)] {
                let plain = BertInput::new(&tokens, Sequences::Ragged(&ends));
                let mut out = unwritten(tokens.len() * WIDTH);
                bert.forward_to(layers, plain.types(types), &mut out, &mut compute).unwrap();
                for s in ends.windows(2) {
                    let expected = reference.hidden(layers, &tokens[s[0]..s[1]], &types[s[0]..s[1]]);
                    assert_close(&format!("{isa}, layer {layers}"), &out[s[0] * WIDTH..s[1] * WIDTH], &expected, 1e-5);
                }
                if all_zero {
                    let mut without = unwritten(out.len());
                    bert.forward_to(layers, plain, &mut without, &mut compute).unwrap();
                    assert_eq!(bits(&without), bits(&out), "types that are all 0, and none");
                }
            }
        }
    }
    let mut all = unwritten(tokens.len() * WIDTH);
    let mut last = all.clone();
    let input = BertInput::new(&tokens, Sequences::Ragged(&ends));
    bert.forward(input, &mut all, &mut Compute::default()).unwrap();
    bert.forward_to(CONFIG.num_hidden_layers, input, &mut last, &mut Compute::default()).unwrap();
    assert_eq!(bits(&all), bits(&last));
}

#[test]
fn embeddings_are_pooled_and_of_length_one() {
    let model = model();
    let (bert, reference) = (bert(&model), Reference(&model));
    let (tokens, types, ends) = texts(6);
    let input = BertInput::new(&tokens, Sequences::Ragged(&ends)).types(&types);
    let got = embed(&bert, input, 6, Exec::default());
    for (s, row) in got.chunks_exact(WIDTH).enumerate() {
        let rows = ends[s]..ends[s + 1];
        if rows.is_empty() {
            assert_eq!(row, [0.0; WIDTH], "a text without tokens");
        } else {
            let expected = reference.embedding(&tokens[rows.clone()], &types[rows]);
            assert_close("embedding", row, &expected, 2e-6);
        }
    }
    let (mut first, mut hidden) = (unwritten(6 * WIDTH), unwritten(tokens.len() * WIDTH));
    bert.embed(input, Pooling::First, &mut first, &mut Compute::default()).unwrap();
    bert.forward(input, &mut hidden, &mut Compute::default()).unwrap();
    normalise(&mut hidden, WIDTH).unwrap();
    assert_eq!(bits(&first[..WIDTH]), bits(&hidden[..WIDTH]));
    assert_eq!(bits(&first[2 * WIDTH..3 * WIDTH]), bits(&hidden[ends[2] * WIDTH..][..WIDTH]));
}

#[test]
fn pooling_refuses_what_is_no_cumulative_lengths() {
    let entry = |index, got, bound, limit, of| Error::Entry { argument: "sequences", index, got, bound, limit, of };
    let begin = |got| entry(0, got, Bound::Exactly, 0, "where cumulative lengths begin");
    let end = |index, got| entry(index, got, Bound::Exactly, 3, "the number of rows");
    let empty = Error::Empty { argument: "sequences", what: "the list of cumulative lengths" };
    for (ends, error) in [
        (&[0, 5, 3][..], entry(2, 3, Bound::AtLeast, 5, "the entry before it")),
        (&[0, 2, 1, 3], entry(2, 1, Bound::AtLeast, 2, "the entry before it")),
        (&[1, 3], begin(1)),
        (&[usize::MAX, 3], begin(usize::MAX)),
        (&[3], begin(3)),
        (&[0, usize::MAX, 3], entry(2, 3, Bound::AtLeast, usize::MAX, "the entry before it")),
        (&[0, 2], end(1, 2)),
        (&[0, 1, 4], end(2, 4)),
        (&[], empty),
    ] {
        for pooling in [Pooling::Mean, Pooling::First] {
            let mut out = unwritten(2 * ends.len().saturating_sub(1));
            let refused = pooling.forward(&[1.0; 6], 2, Sequences::Ragged(ends), &mut out);
            assert_eq!(refused, Err(error.clone()), "{ends:?}");
            assert!(out.iter().all(|x| x.to_bits() == UNWRITTEN), "a refused call wrote");
        }
    }
    let mut out = unwritten(4);
    Pooling::Mean.forward(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, Sequences::Ragged(&[0, 1, 3]), &mut out).unwrap();
    assert_eq!(out, [1.0, 2.0, 4.0, 5.0]);
}

/// 700 texts are several batches of `embed`.
#[test]
fn texts_have_the_same_bits_alone_and_together_and_on_any_threads() {
    let bert = bert(&model());
    let (tokens, types, ends) = texts(700);
    let input = BertInput::new(&tokens, Sequences::Ragged(&ends)).types(&types);
    let together = embed(&bert, input, 700, Exec::serial());
    for s in 0..700 {
        let rows = ends[s]..ends[s + 1];
        let alone = BertInput::new(&tokens[rows.clone()], Sequences::one(rows.len())).types(&types[rows]);
        assert_eq!(bits(&embed(&bert, alone, 1, Exec::serial())), bits(&together[s * WIDTH..][..WIDTH]), "text {s}");
    }
    for threads in [2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let shared = pool.install(|| embed(&bert, input, 700, Exec::default()));
        assert_eq!(bits(&shared), bits(&together), "{threads} threads");
    }
    let even = BertInput::new(&tokens[..4200], Sequences::Even { batch: 300, len: 14 });
    let ends: Vec<usize> = (0..=300).map(|s| 14 * s).collect();
    let ragged = BertInput::new(&tokens[..4200], Sequences::Ragged(&ends));
    assert_eq!(
        bits(&embed(&bert, even, 300, Exec::default())),
        bits(&embed(&bert, ragged, 300, Exec::default())),
        "even and ragged"
    );
}

#[test]
fn no_texts_are_no_work() {
    let bert = bert(&model());
    assert!(embed(&bert, BertInput::new(&[], Sequences::Ragged(&[0])), 0, Exec::default()).is_empty());
    assert_eq!(embed(&bert, BertInput::new(&[], Sequences::Ragged(&[0, 0])), 1, Exec::default()), [0.0; WIDTH]);
    bert.forward(BertInput::new(&[], Sequences::one(0)), &mut [], &mut Compute::default()).unwrap();
}

#[test]
fn a_warm_call_allocates_nothing() {
    let bert = bert(&model());
    let (tokens, types, ends) = texts(300);
    let input = BertInput::new(&tokens, Sequences::Ragged(&ends)).types(&types);
    let (mut out, mut rows) = (unwritten(tokens.len() * WIDTH), unwritten(300 * WIDTH));
    let mut compute = Compute::new(Exec::serial());
    let mut call = || {
        bert.forward(input, &mut out, &mut compute).unwrap();
        bert.embed(input, Pooling::Mean, &mut rows, &mut compute).unwrap();
    };
    call();
    call();
    assert_eq!(counted(call), (0, 0));
}

#[test]
fn names_of_other_files_are_understood() {
    let model = model();
    let (tokens, _, ends) = texts(4);
    let input = BertInput::new(&tokens, Sequences::Ragged(&ends));
    let want = embed(&bert(&model), input, 4, Exec::serial());
    let renamed = |rename: &dyn Fn(&str) -> String| -> HashMap<String, Tensor<'_>> {
        source(&model).into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect()
    };
    let old =
        |name: &str| name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
    for source in
        [renamed(&|name| format!("bert.{name}")), renamed(&old), renamed(&|name| format!("bert.{}", old(name)))]
    {
        let bert = Bert::new(CONFIG, &source).unwrap();
        assert_eq!(bits(&embed(&bert, input, 4, Exec::serial())), bits(&want));
    }
}
