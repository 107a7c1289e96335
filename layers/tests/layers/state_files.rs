//! Sequences of states to files and back: the same bits, wherever they go back to; what is no such file is refused.

use crate::linear_attention_support::{Case, RULES, Rule};
use crate::support::{Rng, Tensor, UNWRITTEN, assert_same_bits, fewer};
use sdpa::{Error, Exec, KvCache, KvShape, ViewMut};
use sdpa_layers::{Compute, Form, HybridCaches, LayerCache, LinearAttention, LinearState, Normaliser, StateCache};

/// Calls over a cache: their rule, normaliser and form, and `[kv_heads, head_dim, value_dim]`.
#[derive(Debug, Clone, Copy)]
struct Calls {
    rule: Rule,
    normaliser: Normaliser,
    form: Form,
    sizes: [usize; 3],
}

const CALLS: Calls =
    Calls { rule: Rule::GatedDelta, normaliser: Normaliser::None, form: Form::Recurrent, sizes: [2, 3, 5] };

impl Calls {
    /// State with which sequences begin.
    fn initial(&self) -> LinearState {
        let [h, d, dv] = self.sizes;
        Case::new(self.rule, self.normaliser, [1, h, 1, 0, 0, d, dv], 1).state
    }

    fn cache(&self, room: usize) -> StateCache {
        StateCache::new(2, &self.initial(), room).unwrap()
    }

    /// Takes random tokens, and returns their rows.
    fn decode(&self, cache: &mut StateCache, sequence: usize, tokens: usize, seed: u64) -> Tensor {
        let [h, d, dv] = self.sizes;
        let case = Case::new(self.rule, self.normaliser, [1, h, 1, tokens, tokens, d, dv], seed);
        let mut got = Tensor::filled(case.out_shape(), f32::from_bits(UNWRITTEN));
        let out = ViewMut::bhld(&mut got.data, case.out_shape()).unwrap();
        let layer = LinearAttention::new().form(self.form).normaliser(self.normaliser);
        layer.decode(case.inputs(), cache, &[sequence], out, &mut Compute::new(Exec::serial())).unwrap();
        got
    }
}

/// Bits of a sequence after each number of tokens that it can go back to.
fn seen(cache: &StateCache, sequence: usize) -> Vec<Option<Vec<u32>>> {
    let at = |len| {
        let mut back = cache.clone();
        back.truncate(sequence, len).ok()?;
        Some(back.state(sequence).unwrap().as_slice().iter().map(|x| x.to_bits()).collect())
    };
    (0..=cache.len(sequence).unwrap()).map(at).collect()
}

#[track_caller]
fn says<T: core::fmt::Debug>(result: Result<T, Error>, words: &str) {
    assert_eq!(result.map_err(|error| error.to_string()).expect_err(words), words);
}

/// Every state that is kept, and what comes after it.
#[test]
fn a_sequence_goes_on_with_the_same_bits() {
    for seed in 0..fewer(200) {
        let mut rng = Rng::new(seed);
        let rule = rng.pick(&RULES);
        let adds = matches!(rule, Rule::Linear | Rule::Gated);
        let normaliser = if adds && rng.below(2) == 0 { Normaliser::KeySum } else { Normaliser::None };
        let sizes = [1 + rng.below(3), 1 + rng.below(5), 1 + rng.below(20)];
        let calls = Calls { rule, normaliser, form: rng.pick(&[Form::Recurrent, Form::Chunked(4)]), sizes };
        let room = rng.below(5);
        let mut cache = calls.cache(room);
        for _ in 0..rng.below(8) {
            let tokens = rng.pick(&[0, 1, 1, 2, room, room + 1, room + 2, 12]);
            calls.decode(&mut cache, 1, tokens, rng.bits());
            let len = cache.len(1).unwrap().saturating_sub(rng.below(3));
            let _ = cache.truncate(1, len);
        }
        let file = cache.export_sequence(1).unwrap();
        // Into itself, and into caches with other room.
        let mut others = [cache.clone(), calls.cache(room), calls.cache(room + 2), calls.cache(room / 2)];
        for (i, other) in others.iter_mut().enumerate() {
            let said = format!("seed {seed}, {calls:?}, cache {i}");
            other.import_sequence(0, &file).expect(&said);
            let (got, expected) = (seen(other, 0), seen(&cache, 1));
            // With less room it goes back less far, but by that room.
            let (fewer, tokens) = (i == 3, expected.len() - 1);
            assert_eq!(got.len(), expected.len(), "{said}");
            for (len, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let kept = !fewer || tokens - len <= room / 2;
                assert!(got == expected || !kept && got.is_none(), "{said}: {len}");
            }
            assert!(fewer || other.export_sequence(0).unwrap() == file, "{said}");
            // Chunks end where room says.
            let tokens = if i < 2 || calls.form == Form::Recurrent { rng.pick(&[1, room + 1, 9]) } else { 1 };
            let (now, then) = (calls.decode(other, 0, tokens, seed), calls.decode(&mut cache.clone(), 1, tokens, seed));
            assert_same_bits(&said, &now, &then);
        }
    }
}

/// A file, with five states of a sequence of seven tokens.
fn file(calls: &Calls) -> Vec<u8> {
    let mut cache = calls.cache(3);
    calls.decode(&mut cache, 0, 6, 1);
    calls.decode(&mut cache, 0, 1, 2);
    let kept: Vec<bool> = seen(&cache, 0).iter().map(Option::is_some).collect();
    assert_eq!(kept, [true, false, false, true, true, true, true, true]);
    cache.export_sequence(0).unwrap()
}

/// Files cut off, or with a bit changed, are refused and change nothing; or the numbers are others, and all can be done.
#[test]
fn damaged_files() {
    let (file, mut refused) = (file(&CALLS), 0);
    let header = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let cut = (0..file.len()).map(|len| file[..len].to_vec());
    let changed = (0..file.len() * 8).map(|bit| {
        let mut file = file.clone();
        file[bit / 8] ^= 1 << (bit % 8);
        file
    });
    for (i, damaged) in cut.chain(changed).chain([[&file[..], &[0]].concat()]).enumerate() {
        let mut cache = CALLS.cache(3);
        CALLS.decode(&mut cache, 0, 2, 3);
        let before = [seen(&cache, 0), seen(&cache, 1)];
        match cache.import_sequence(1, &damaged) {
            Ok(()) => {
                // What stays a file has other numbers: of states or, in its description, of tokens.
                let at = damaged.iter().zip(&file).position(|(a, b)| a != b).expect("a change");
                assert!(
                    damaged.len() == file.len() && (at >= header || file[at].is_ascii_digit()),
                    "{i}: {at}: {}",
                    file[at] as char
                );
                let len = cache.len(1).unwrap();
                assert!((0..len + 2).filter(|&len| cache.clone().truncate(1, len).is_ok()).count() >= 2);
                CALLS.decode(&mut cache, 1, 6, 4);
                assert_eq!(cache.len(1), Ok(len + 6));
            }
            Err(error) => {
                assert!(matches!(error, Error::File { .. } | Error::Mismatch { .. }), "{i}: {error:?}");
                assert_eq!([seen(&cache, 0), seen(&cache, 1)], before, "{i}");
                refused += 1;
            }
        }
    }
    assert!(refused > file.len(), "{refused}");
}

/// A file with another description, as long as it says.
fn described(file: &[u8], was: &str, is: &str) -> Vec<u8> {
    let header = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let text = core::str::from_utf8(&file[8..8 + header]).unwrap();
    assert_eq!(text.matches(was).count(), 1, "{text}: {was}");
    let text = text.replace(was, is);
    [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &file[8 + header..]].concat()
}

#[test]
fn refused_files() {
    let (file, mut cache) = (file(&CALLS), CALLS.cache(3));
    let no_file = |what: &str| format!("import: {what}");
    for (was, is, words) in [
        (r#"\"len\":7"#, r#"\"len\":-7"#, r#"metadata "sdpa.state_cache": len is -7, but must be a whole number"#),
        (r#"\"len\":7"#, r#"\"lex\":7"#, r#"metadata "sdpa.state_cache": len is null, but must be a whole number"#),
        (r#"\"len\":7"#, r#"\"len\":4294967296"#, "4294967296 tokens, but must be at most 4294967295"),
        (r#"\"len\":7"#, r#"\"len\":3"#, "states: 5 are of the last tokens, but must be 1 to 4"),
        (r#"\"before\":null"#, r#"\"before\":5"#, "states: 4 are of the last tokens, but must be 1 to 2"),
        (r#"\"version\":1"#, r#"\"version\":2"#, "the file's version is 2, but must be 1"),
        (
            "sdpa.state_cache",
            "sdpa.kv_cache",
            r#"the file has another purpose: there are no metadata "sdpa.state_cache""#,
        ),
        (r#""states""#, r#""state""#, "states: no such tensor"),
        ("F32", "I32", "states: I32 [5, 2, 3, 5], but must be F32 with 4 dimensions"),
        ("[5,2,3,5]", "[5,2,15]", "states: F32 [5, 2, 15], but must be F32 with 4 dimensions"),
        (
            r#"\"none\""#,
            r#"\"key sum\""#,
            r#"metadata "sdpa.state_cache": normaliser is "key sum", but must be "none""#,
        ),
    ] {
        says(cache.import_sequence(1, &described(&file, was, is)), &no_file(words));
    }
    for (sizes, words) in [
        ([3, 3, 5], "file: kv_heads is 2, but the cache has 3"),
        ([2, 4, 5], "file: head_dim is 3, but the cache has 4"),
        ([2, 3, 4], "file: columns of a state is 5, but the cache has 4"),
    ] {
        says(Calls { sizes, ..CALLS }.cache(3).import_sequence(0, &file), words);
    }
    says(
        cache.import_sequence(1, &file[..file.len() - 1]),
        &no_file(&format!("the file has {} bytes, but its header speaks of {}", file.len() - 1, file.len())),
    );
    // Zeros are what most caches begin with.
    let mut empty = StateCache::new(1, &LinearState::new([1, 2, 3, 5]).unwrap(), 3).unwrap();
    let words = no_file("the state before the first token is not that of the cache");
    says(empty.import_sequence(0, &cache.export_sequence(0).unwrap()), &words);
    says(cache.import_sequence(2, &file), "sequence: there is no sequence 2, the cache has 2");
    cache.import_sequence(1, &file).unwrap();
    let words = "sequence: number of tokens is 7, but must be at most 0, that of an empty sequence";
    says(cache.import_sequence(1, &file), words);
    cache.remove_sequence(1).unwrap();
    says(cache.import_sequence(1, &file), "sequence: sequence 1 was removed");
    says(cache.export_sequence(1), "sequence: sequence 1 was removed");
    let none = StateCache::new(1, &LinearState::new([1, 0, 3, 5]).unwrap(), 3).unwrap();
    says(none.export_sequence(0), "cache: kv_heads is 0, but must be at least 1");
    says(none.clone().import_sequence(0, &file), "cache: kv_heads is 0, but must be at least 1");
}

/// Wherever memory ends, the cache is as it was.
#[test]
fn without_memory() {
    let calls = Calls { sizes: [2, 32, 32], ..CALLS };
    let (file, mut refused) = (file(&calls), 0);
    for number in 0.. {
        let mut cache = calls.cache(3);
        let before = seen(&cache, 1);
        // Of a head's state: what the header takes is smaller.
        let call = || cache.import_sequence(1, &file);
        let (result, bytes) = crate::counting::refusing(number, 32 * 32 * 4, call);
        if bytes.is_none() {
            result.unwrap();
            break;
        }
        if let Err(error) = result {
            assert!(matches!(error, Error::Memory { what: "states", .. }), "{error:?}");
            refused += 1;
        }
        assert_eq!(seen(&cache, 1), before);
    }
    assert_eq!(refused, 10);
}

const SHAPE: KvShape = KvShape { kv_heads: 1, head_dim: 4, value_dim: 6 };

/// Caches of four layers; a sequence of five tokens, with a step that only some layers took.
fn hybrid(room: usize) -> HybridCaches {
    let states = LayerCache::States(CALLS.cache(room));
    let keys = LayerCache::Keys(KvCache::new(2, SHAPE).unwrap());
    HybridCaches::new(vec![states.clone(), keys.clone(), states, keys]).unwrap()
}

fn step(caches: &mut HybridCaches, sequence: usize, tokens: usize, layers: usize) {
    for layer in 0..layers {
        match caches.layer_mut(layer).unwrap() {
            LayerCache::States(states) => drop(CALLS.decode(states, sequence, tokens, layer as u64)),
            LayerCache::Keys(keys) => {
                let mut rng = Rng::new(layer as u64);
                let [k, v] = [4, 6].map(|dim| Tensor::normal([1, 1, tokens, dim], &mut rng));
                keys.append_to(sequence, k.view(), v.view()).unwrap();
            }
            layer => panic!("a new kind: {layer:?}"),
        }
    }
}

/// Files of a sequence of each layer, which say all that it holds.
fn layers(caches: &HybridCaches, sequence: usize) -> Vec<Vec<u8>> {
    let of_layer = |layer: &LayerCache| match layer {
        LayerCache::Keys(keys) => keys.export_sequence(sequence).unwrap(),
        LayerCache::States(states) => states.export_sequence(sequence).unwrap(),
        layer => panic!("a new kind: {layer:?}"),
    };
    caches.layers().iter().map(of_layer).collect()
}

#[test]
fn sequences_of_all_layers() {
    let mut caches = hybrid(3);
    step(&mut caches, 0, 5, 4);
    step(&mut caches, 0, 1, 2);
    let file = caches.export_sequence(0).unwrap();
    caches.import_sequence(1, &file).unwrap();
    assert_eq!(layers(&caches, 1), layers(&caches, 0));
    caches.roll_back().unwrap();
    caches.truncate(0, 4).unwrap();
    caches.truncate(1, 4).unwrap();
    assert_eq!(layers(&caches, 1), layers(&caches, 0));
    // All layers, or none.
    let empty = hybrid(3);
    for layer in 0..4 {
        let mut other = hybrid(3);
        if let LayerCache::Keys(keys) = other.layer_mut(layer).unwrap() {
            *keys = KvCache::new(2, KvShape { head_dim: 5, ..SHAPE }).unwrap();
        } else if let LayerCache::States(states) = other.layer_mut(layer).unwrap() {
            *states = Calls { sizes: [2, 3, 4], ..CALLS }.cache(3);
        }
        let nothing = layers(&other, 1);
        assert!(matches!(other.import_sequence(1, &file), Err(Error::Mismatch { argument: "file", .. })), "{layer}");
        assert_eq!(layers(&other, 1), nothing);
    }
    for len in 0..file.len() {
        let mut other = empty.clone();
        assert!(matches!(other.import_sequence(1, &file[..len]), Err(Error::File { .. })), "{len}");
        assert_eq!(layers(&other, 1), layers(&empty, 1));
    }
    // No empty sequence, in a layer alone.
    for layer in 0..4 {
        let mut other = empty.clone();
        let mut whole = other.clone();
        whole.import_sequence(1, &file).unwrap();
        *other.layer_mut(layer).unwrap() = whole.layers()[layer].clone();
        let before = layers(&other, 1);
        assert!(matches!(other.import_sequence(1, &file), Err(Error::Range { .. })), "{layer}");
        assert_eq!(layers(&other, 1), before);
    }
}

#[test]
fn refused_files_of_all_layers() {
    let (mut caches, states) = (hybrid(3), LayerCache::States(CALLS.cache(3)));
    let file = caches.export_sequence(0).unwrap();
    let mut short = HybridCaches::new(vec![states.clone()]).unwrap();
    says(short.import_sequence(0, &file), "file: number of layers is 4, but the model has 1");
    let mut others = HybridCaches::new(vec![states; 4]).unwrap();
    says(others.import_sequence(0, &file), "import: layers.1.states: no such tensor");
    let words = r#"import: the file has another purpose: there are no metadata "sdpa.hybrid_caches""#;
    says(caches.import_sequence(0, &layers(&caches, 0)[0]), words);
    // Layers further apart than a step.
    let (mut apart, nothing) = (hybrid(3), layers(&caches, 1));
    step(&mut apart, 0, 5, 4);
    (0..6).for_each(|_| step(&mut apart, 0, 1, 2));
    let uneven = apart.export_sequence(0).unwrap();
    says(caches.import_sequence(1, &uneven), "import: not all layers can go back to the 5 tokens that all have");
    assert_eq!(layers(&caches, 1), nothing);
    says(caches.import_sequence(2, &file), "sequence: there is no sequence 2, the cache has 2");
    says(caches.export_sequence(2), "sequence: there is no sequence 2, the cache has 2");
}
