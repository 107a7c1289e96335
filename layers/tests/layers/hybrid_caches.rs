//! Caches of all layers of hybrid models: speculative decoding gives the bits of decoding from scratch; all layers change, or none.

use crate::support::{Rng, fewer};
use core::num::NonZeroUsize;
use sdpa::{Alignment, Attention, Error, Exec, Inputs, KvCache, KvShape, Outputs, View, ViewMut};
use sdpa_layers::{Compute, HybridCaches, LayerCache, LinearAttention, LinearInputs, LinearState, StateCache, Update};

const HEADS: usize = 2;
const DIM: usize = 8;
const WIDTH: usize = HEADS * DIM;
const SHAPE: KvShape = KvShape { kv_heads: HEADS, head_dim: DIM, value_dim: DIM };

/// A model of two layers of linear attention and one of attention. Projections are permutations with signs.
struct Model {
    embedding: Vec<f32>,
}

impl Model {
    fn new() -> Self {
        let mut rng = Rng::new(1);
        Self { embedding: (0..10 * WIDTH).map(|_| rng.normal() / (DIM as f32).sqrt()).collect() }
    }

    fn caches(sequences: usize, room: usize) -> HybridCaches {
        let keys = KvCache::new(sequences, SHAPE).unwrap();
        let states = LayerCache::States(states(sequences, room));
        HybridCaches::new(vec![states.clone(), LayerCache::Keys(keys), states]).unwrap()
    }

    /// Takes tokens of one sequence up to a layer, and returns what each token ends as.
    fn step(&self, caches: &mut HybridCaches, sequence: usize, tokens: &[usize], layers: usize) -> Vec<f32> {
        let (n, mut compute) = (tokens.len(), Compute::new(Exec::serial()));
        let mut x: Vec<f32> =
            tokens.iter().flat_map(|&token| &self.embedding[token * WIDTH..][..WIDTH]).copied().collect();
        for layer in 0..layers {
            let project = |by: usize| -> Vec<f32> {
                let sign = |i: usize| if i.is_multiple_of(by) { -0.5 } else { 0.75 };
                (0..x.len()).map(|i| sign(i % WIDTH) * x[i / WIDTH * WIDTH + (i + by) % WIDTH]).collect()
            };
            let [q, k, v] = [2, 3, 5].map(project);
            let [q, k, v] = [&q, &k, &v].map(|x| View::blhd(x, [1, n, HEADS, DIM]).unwrap());
            let mut out = vec![0.0; n * WIDTH];
            let written = ViewMut::blhd(&mut out, [1, n, HEADS, DIM]).unwrap();
            match caches.layer_mut(layer).unwrap() {
                LayerCache::States(states) => {
                    let (log_decay, beta) = ([-0.125, -0.5], [0.75]);
                    let log_decay = View::bhld(&log_decay, [1, HEADS, 1, 1]).unwrap();
                    let update = Update::GatedDelta { log_decay, beta: View::bhld(&beta, [1; 4]).unwrap() };
                    let inputs = LinearInputs::new(q, k, v, update);
                    LinearAttention::new().decode(inputs, states, &[sequence], written, &mut compute).unwrap();
                }
                LayerCache::Keys(keys) => {
                    keys.append_to(sequence, k, v).unwrap();
                    let listed = [sequence];
                    let inputs = Inputs::cached(q, keys).sequences(&listed);
                    let attention = Attention::new().causal().align(Alignment::BottomRight);
                    sdpa::attention(&attention, inputs, Outputs::new(written)).unwrap();
                }
                layer => panic!("a new kind: {layer:?}"),
            }
            x.iter_mut().zip(&out).for_each(|(x, y)| *x += y);
        }
        x
    }
}

fn states(sequences: usize, room: usize) -> StateCache {
    StateCache::new(sequences, &LinearState::new([1, HEADS, DIM, DIM]).unwrap(), room).unwrap()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Drafts accepted and rejected at random, in two sequences, with forks and steps that fail in the middle.
#[test]
fn speculative_decoding_gives_the_bits_of_decoding_from_scratch() {
    let model = Model::new();
    for seed in 0..fewer(40) {
        let mut rng = Rng::new(seed);
        let drafts = rng.below(5);
        let mut caches = Model::caches(2, drafts);
        // Accepted tokens of each sequence, and what they ended as.
        let mut accepted = [(vec![], vec![]), (vec![], vec![])];
        for (b, accepted) in accepted.iter_mut().enumerate() {
            let prompt: Vec<usize> = (0..1 + rng.below(12)).map(|_| rng.below(10)).collect();
            let ends = model.step(&mut caches, b, &prompt, 3);
            *accepted = (prompt, ends);
        }
        for _ in 0..15 {
            let b = rng.below(2);
            let tokens: Vec<usize> = (0..1 + rng.below(drafts + 1)).map(|_| rng.below(10)).collect();
            match rng.below(6) {
                0 => {
                    // A step that ends early, of any length.
                    let long: Vec<usize> = (0..rng.below(20)).map(|_| rng.below(10)).collect();
                    model.step(&mut caches, b, &long, rng.below(3));
                    caches.roll_back().unwrap();
                }
                1 => {
                    caches.fork(b, 1 - b).unwrap();
                    accepted[1 - b] = accepted[b].clone();
                }
                _ => {
                    let before = caches.len(b).unwrap();
                    let ends = model.step(&mut caches, b, &tokens, 3);
                    let good = 1 + rng.below(tokens.len());
                    caches.truncate(b, before + good).unwrap();
                    accepted[b].0.extend_from_slice(&tokens[..good]);
                    accepted[b].1.extend_from_slice(&ends[..good * WIDTH]);
                }
            }
            for (b, (tokens, ends)) in accepted.iter().enumerate() {
                assert_eq!(caches.len(b).unwrap(), tokens.len());
                let scratch = model.step(&mut Model::caches(1, 0), 0, tokens, 3);
                assert_eq!(bits(&scratch), bits(ends), "seed {seed}, {drafts} drafts, sequence {b}");
            }
        }
    }
}

/// Lengths and states of all caches.
fn seen(caches: &HybridCaches) -> Vec<(Vec<usize>, Vec<u32>)> {
    let of_layer = |layer: &LayerCache| match layer {
        LayerCache::Keys(keys) => (keys.lens().to_vec(), vec![]),
        LayerCache::States(states) => {
            let there = (0..states.sequences()).filter(|&b| states.has_sequence(b));
            (
                there.clone().map(|b| states.len(b).unwrap()).collect(),
                there.flat_map(|b| bits(states.state(b).unwrap().as_slice())).collect(),
            )
        }
        layer => panic!("a new kind: {layer:?}"),
    };
    caches.layers().iter().map(of_layer).collect()
}

/// A change that is refused, with these words, and changes no layer.
#[track_caller]
fn refuses(caches: &mut HybridCaches, change: impl Fn(&mut HybridCaches) -> Result<(), Error>, words: &str) {
    let before = seen(caches);
    assert_eq!(change(caches).map_err(|error| error.to_string()), Err(words.to_owned()));
    assert_eq!(seen(caches), before, "{words}");
}

fn remove(layer: &mut LayerCache, sequence: usize) {
    match layer {
        LayerCache::Keys(keys) => keys.remove_sequence(sequence).unwrap(),
        LayerCache::States(states) => states.remove_sequence(sequence).unwrap(),
        layer => panic!("a new kind: {layer:?}"),
    }
}

#[test]
fn all_layers_change_or_none() {
    let model = Model::new();
    let mut caches = Model::caches(2, 3);
    model.step(&mut caches, 0, &[1; 9], 3);
    model.step(&mut caches, 0, &[2], 3);
    model.step(&mut caches, 1, &[3; 4], 3);
    // Keys can go back, states cannot; the length before the prompt is 0.
    let words = "length: number of tokens is 5, but must be at least 6, as earlier states of the sequence are not kept \
                 (the room of StateCache::new)";
    refuses(&mut caches, |caches| caches.truncate(0, 5), words);
    // Keys are first asked in the second layer.
    refuses(
        &mut caches,
        |caches| caches.truncate(0, 11),
        "length: number of tokens is 11, but must be at most 10, those of the sequence",
    );
    for (change, words) in [
        (
            &(|caches: &mut HybridCaches| caches.fork(2, 0)) as &dyn Fn(&mut HybridCaches) -> _,
            "sequence: there is no sequence 2, the cache has 2",
        ),
        (&|caches| caches.fork(0, 2), "sequence: there is no sequence 2, the cache has 2"),
        (&|caches| caches.remove_sequence(2), "sequence: there is no sequence 2, the cache has 2"),
        (&|caches| caches.len(2).map(drop), "sequence: there is no sequence 2, the cache has 2"),
        (&|caches| caches.layer_mut(3).map(drop), "layer: index is 3, but must be at most 2, the last layer"),
    ] {
        refuses(&mut caches, change, words);
    }
    // Of a layer alone, whichever.
    for layer in 0..3 {
        let mut caches = caches.clone();
        remove(caches.layer_mut(layer).unwrap(), 1);
        for change in [
            &(|caches: &mut HybridCaches| caches.truncate(1, 3)) as &dyn Fn(&mut HybridCaches) -> _,
            &|caches| caches.remove_sequence(1),
            &|caches| caches.fork(0, 1),
            &|caches| caches.fork(1, 0),
        ] {
            refuses(&mut caches, change, "sequence: sequence 1 was removed");
        }
        let words = "layers: sequence 1 was removed";
        assert_eq!(HybridCaches::new(caches.layers().to_vec()).unwrap_err().to_string(), words);
    }
    caches.truncate(0, 9).unwrap();
    assert_eq!(caches.len(0), Ok(9));
    caches.remove_sequence(0).unwrap();
    refuses(&mut caches, |caches| caches.truncate(0, 0), "sequence: sequence 0 was removed");
    caches.roll_back().unwrap();
    assert_eq!((caches.add_sequence(), caches.add_sequence(), caches.len(0), caches.len(1)), (0, 2, Ok(0), Ok(4)));
}

/// Sequences change in all layers only if those of all of them can: here of a sliding cache, for the second sequence.
#[test]
fn rolling_back_checks_every_sequence_first() {
    let keys = KvCache::sliding(2, SHAPE, NonZeroUsize::new(4).unwrap(), 0).unwrap();
    let mut caches = HybridCaches::new(vec![LayerCache::States(states(2, 0)), LayerCache::Keys(keys)]).unwrap();
    let model = Model::new();
    for (b, len) in [(0, 3), (1, 500)] {
        model.step(&mut caches, b, &vec![1; len], 1);
        let rows = vec![0.5; WIDTH * len];
        let rows = View::bhld(&rows, [1, HEADS, len, DIM]).unwrap();
        let LayerCache::Keys(keys) = caches.layer_mut(1).unwrap() else { panic!("keys come second") };
        keys.append_to(b, rows, rows).unwrap();
    }
    model.step(&mut caches, 0, &[1], 1);
    // Three steps that one layer alone has taken: more than the others can go back.
    let rows = vec![0.5; WIDTH * 300];
    let rows = View::bhld(&rows, [1, HEADS, 300, DIM]).unwrap();
    for _ in 0..3 {
        let LayerCache::Keys(keys) = caches.layer_mut(1).unwrap() else { panic!("keys come second") };
        keys.append_to(1, rows, rows).unwrap();
    }
    assert_eq!([caches.len(0), caches.len(1)], [Ok(3), Ok(500)]);
    let before = seen(&caches);
    assert!(matches!(caches.roll_back(), Err(Error::Length { sequence: 1, got: 500, .. })));
    assert_eq!(seen(&caches), before);
}

/// A fork is a snapshot: it takes no memory, and holds what changes later do not reach.
#[test]
fn forks_are_snapshots() {
    let model = Model::new();
    let mut caches = Model::caches(1, 2);
    model.step(&mut caches, 0, &[1, 2, 3, 4, 5], 3);
    let bytes = caches.bytes();
    let snapshot = caches.add_sequence();
    caches.fork(0, snapshot).unwrap();
    assert_eq!(caches.bytes(), bytes);
    let first = model.step(&mut caches, 0, &[6, 7, 8, 9, 1, 2], 3);
    assert!(caches.bytes() > bytes);
    assert!(caches.truncate(0, 6).is_err());
    caches.fork(snapshot, 0).unwrap();
    assert_eq!(caches.len(0), Ok(5));
    assert_eq!(bits(&model.step(&mut caches, 0, &[6, 7, 8, 9, 1, 2], 3)), bits(&first));
    // The snapshot goes back, too.
    caches.truncate(snapshot, 4).unwrap();
    let again = model.step(&mut caches, snapshot, &[5, 6, 7], 3);
    assert_eq!(bits(&again[WIDTH..]), bits(&first[..2 * WIDTH]));
}

#[test]
fn layers_that_do_not_go_together() {
    let new = |layers: Vec<LayerCache>| HybridCaches::new(layers).map(drop).map_err(|error| error.to_string());
    let of_states = |sequences| LayerCache::States(states(sequences, 1));
    let keys = |sequences| LayerCache::Keys(KvCache::new(sequences, SHAPE).unwrap());
    assert_eq!(new(vec![]), Err("layers: number of caches is 0, but must be at least 1".to_owned()));
    let words = "a layer: number of sequences is 3, but the first layer has 2";
    assert_eq!(new(vec![keys(2), of_states(3)]), Err(words.to_owned()));
    assert_eq!([new(vec![of_states(2)]), new(vec![keys(0), of_states(0)])], [Ok(()), Ok(())]);
    // Removed in all of them is no difference.
    let mut layers = vec![of_states(2), keys(2)];
    layers.iter_mut().for_each(|layer| remove(layer, 0));
    assert_eq!(new(layers), Ok(()));
}
