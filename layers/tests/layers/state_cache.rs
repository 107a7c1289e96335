//! Caches of states of linear attention: memory, sizes of 0, refusals.

use sdpa::{Error, Exec, View, ViewMut};
use sdpa_layers::{Compute, Form, LinearAttention, LinearInputs, LinearState, Normaliser, Reach, StateCache, Update};

const SHAPE: [usize; 4] = [1, 2, 16, 32];
/// Bytes of a state of that shape.
const STATE: usize = 2 * 16 * 32 * 4;

fn cache(sequences: usize, room: usize) -> StateCache {
    StateCache::new(sequences, &LinearState::new(SHAPE).unwrap(), room).unwrap()
}

/// A call over some sequences of states of this shape.
fn decode_of(
    [_, heads, head_dim, value_dim]: [usize; 4],
    layer: LinearAttention,
    (cache, sequences): (&mut StateCache, &[usize]),
    len: usize,
    compute: &mut Compute,
) -> Result<(), Error> {
    let (one, batch) = ([0.25], sequences.len());
    let mut out = vec![0.0; batch * heads * len * value_dim];
    let rows = |dim| View::from_strides(&one, 0, [batch, heads, len, dim], [0; 4]).unwrap();
    let inputs = LinearInputs::new(rows(head_dim), rows(head_dim), rows(value_dim), Update::Linear);
    let out = ViewMut::bhld(&mut out, [batch, heads, len, value_dim]).unwrap();
    layer.decode(inputs, cache, sequences, out, compute)
}

fn decode(cache: &mut StateCache, sequences: &[usize], len: usize, compute: &mut Compute) -> Result<(), Error> {
    decode_of(SHAPE, LinearAttention::new(), (cache, sequences), len, compute)
}

/// `n + 2` states of a sequence, allocated as tokens come; forks share them until they write.
#[test]
fn memory_is_as_stated() {
    let mut compute = Compute::new(Exec::serial());
    let mut states = cache(3, 3);
    assert_eq!(states.bytes(), STATE, "with which all begin");
    for tokens in 1..10 {
        decode(&mut states, &[0], 1, &mut compute).unwrap();
        // The first one is that of sequences without tokens, too.
        assert_eq!(states.bytes(), STATE * (tokens + 1).min(6), "{tokens} tokens");
    }
    states.fork(0, 1).unwrap();
    states.fork(1, 2).unwrap();
    assert_eq!(states.bytes(), 6 * STATE);
    // The slots that two tokens write are those of the oldest states, which the others still have.
    decode(&mut states, &[1], 2, &mut compute).unwrap();
    assert_eq!(states.bytes(), 8 * STATE);
    decode(&mut states, &[2], 100, &mut compute).unwrap();
    assert_eq!(states.bytes(), 12 * STATE, "all but the state before the call");
    states.remove_sequence(2).unwrap();
    states.truncate(0, 0).unwrap();
    assert_eq!(states.bytes(), 6 * STATE);
    // A long prompt takes no more than a short one.
    let mut states = cache(1, 3);
    let chunked = LinearAttention::new().form(Form::Chunked(16));
    decode_of(SHAPE, chunked, (&mut states, &[0]), 100, &mut compute).unwrap();
    assert_eq!(states.bytes(), 5 * STATE);
}

/// Of the states' size, whatever it is, nothing.
#[test]
fn a_warm_call_allocates_lists_alone() {
    let (mut compute, mut states) = (Compute::new(Exec::serial()), cache(4, 2));
    // Every slot has been written.
    (0..2).for_each(|_| decode(&mut states, &[0, 1, 2, 3], 30, &mut compute).unwrap());
    for len in [1, 3, 30] {
        let run = || decode(&mut states, &[3, 1], len, &mut compute).unwrap();
        let (calls, bytes) = crate::counting::counted(run);
        let lists = (4 + 2) * size_of::<usize>();
        // The output is the test's own; a list that is collected with errors on the way begins with room for four.
        assert!(calls <= 3 && bytes <= 2 * 2 * len * 32 * 4 + lists + 2 * size_of::<usize>(), "{calls}, {bytes}");
    }
}

/// Wherever memory ends, the states are as they were. What can be taken back has the bits it had; it may be less.
#[test]
fn calls_without_memory_change_no_state() {
    let mut refused = 0;
    for number in 0.. {
        let mut compute = Compute::new(Exec::serial());
        let mut states = cache(3, 3);
        decode(&mut states, &[0, 2], 5, &mut compute).unwrap();
        states.fork(0, 1).unwrap();
        let before = states.clone();
        // Of a head's state, or more: lists are smaller.
        let call = || decode(&mut states, &[1, 2], 3, &mut compute);
        let (result, bytes) = crate::counting::refusing(number, STATE / 2, call);
        let Some(bytes) = bytes else { break };
        assert_eq!(result, Err(Error::Memory { what: "states", bytes }));
        for b in 0..3 {
            assert_eq!(states.len(b), before.len(b));
            for len in 0..=5 {
                let [mut now, mut then] = [states.clone(), before.clone()];
                let possible = [now.truncate(b, len), then.truncate(b, len)].map(|done| done.is_ok());
                assert!(possible[1] >= possible[0] && (possible[0] || ![0, 5].contains(&len)), "{b} to {len}");
                assert!(!possible[0] || now.state(b) == then.state(b), "{b} at {len}");
            }
        }
        refused += 1;
    }
    // Three slots of two heads, each of two sequences: of 2 as of 1, since `before` has its states, too.
    assert_eq!(refused, 12);
}

#[test]
fn nothing_of_something() {
    let mut compute = Compute::new(Exec::serial());
    let mut none = cache(0, 2);
    decode(&mut none, &[], 3, &mut compute).unwrap();
    assert_eq!((none.sequences(), none.add_sequence(), none.len(0)), (0, 0, Ok(0)));
    decode(&mut none, &[0], 0, &mut compute).unwrap();
    none.truncate(0, 0).unwrap();
    assert_eq!((none.len(0), none.bytes()), (Ok(0), STATE));
    // Without heads, tokens count.
    let shape = [1, 0, 16, 32];
    let mut headless = StateCache::new(1, &LinearState::new(shape).unwrap(), 2).unwrap();
    decode_of(shape, LinearAttention::new(), (&mut headless, &[0]), 7, &mut compute).unwrap();
    headless.truncate(0, 5).unwrap();
    assert!(headless.truncate(0, 4).is_err());
    assert_eq!((headless.len(0), headless.bytes()), (Ok(5), 0));
    assert!(headless.state(0).unwrap().as_slice().is_empty());
}

#[track_caller]
fn says<T: core::fmt::Debug>(result: Result<T, Error>, words: &str) {
    assert_eq!(result.map_err(|error| error.to_string()).expect_err(words), words);
}

#[test]
fn refusals() {
    let (layer, mut compute, mut states) = (LinearAttention::new(), Compute::new(Exec::serial()), cache(3, 2));
    decode(&mut states, &[0, 1, 2], 4, &mut compute).unwrap();
    decode(&mut states, &[0], 6, &mut compute).unwrap();
    says(states.truncate(0, 11), "length: number of tokens is 11, but must be at most 10, those of the sequence");
    let words = "length: number of tokens is 7, but must be at least 8, as earlier states of the sequence are not kept \
                 (the room of StateCache::new)";
    says(states.truncate(0, 7), words);
    states.remove_sequence(1).unwrap();
    for result in [
        states.truncate(1, 0),
        states.check_truncate(1, 0),
        states.remove_sequence(1),
        states.state(1).map(drop),
        states.len(1).map(drop),
    ] {
        says(result, "sequence: sequence 1 was removed");
    }
    says(states.fork(1, 0), "from: sequence 1 was removed");
    says(states.fork(0, 3), "to: there is no sequence 3, the cache has 3");
    for (sequences, words) in [
        (&[0, 1][..], "sequences: sequence 1 was removed"),
        (&[3], "sequences: there is no sequence 3, the cache has 3"),
        (&[2, 0, 2], "sequences: sequence 2 is named twice"),
    ] {
        says(decode(&mut states, sequences, 1, &mut compute), words);
    }
    let mut other = |layer, shape| decode_of(shape, layer, (&mut states, &[0]), 1, &mut compute);
    says(other(layer.reach(Reach::Whole), SHAPE), "decoding: needs causal reach: no row sees a later key");
    let words = "the normaliser: needs a state made by LinearState::normalised";
    says(other(layer.normaliser(Normaliser::KeySum), SHAPE), words);
    says(other(layer, [1, 1, 16, 32]), "state: heads is 2, but k has 1");
    says(other(layer, [1, 2, 16, 31]), "state: value_dim is 32, but v has 31");
    let (row, mut out) = ([0.5; 16], [0.0; 16]);
    let row = View::bhld(&row, [1, 1, 1, 16]).unwrap();
    let out = ViewMut::bhld(&mut out, [1, 1, 1, 16]).unwrap();
    let result =
        layer.decode(LinearInputs::new(row, row, row, Update::Linear), &mut states, &[0, 2], out, &mut compute);
    says(result, "sequences: length is 2, but the batch has 1");
    assert_eq!([states.len(0), states.len(2)], [Ok(10), Ok(4)]);
    says(StateCache::new(1, &LinearState::new([2, 2, 3, 3]).unwrap(), 1), "initial: batch is 2, but a sequence has 1");
    let words = "room: number of tokens is 16777217, but must be at most 16777216, the largest possible";
    says(StateCache::new(1, &LinearState::new(SHAPE).unwrap(), (1 << 24) + 1), words);
}

// Sizes beyond any machine's memory, which 32 bits cannot write down.
#[cfg(target_pointer_width = "64")]
#[test]
fn sizes_without_memory() {
    let state = LinearState::new(SHAPE).unwrap();
    assert!(matches!(StateCache::new(1 << 56, &state, 0), Err(Error::Memory { what: "states", .. })));
    assert!(matches!(StateCache::new(usize::MAX, &state, 0), Err(Error::Memory { what: "states", .. })));
}
