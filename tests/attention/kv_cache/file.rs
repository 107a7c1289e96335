//! Caches to files and back: the same bits; and whatever is no such file is refused in words.

use crate::counting::counted;
use crate::kv_support::{append_tokens, exact_and_others, new_tokens, same_cache};
use crate::support::Rng;
use core::num::NonZeroUsize;
use safetensors::SafeTensors;
use sdpa::{Error, F16, KeyScales, KvCache, KvShape};

fn sliding(sequences: usize, last: usize, first: usize) -> KvCache {
    KvCache::sliding(
        sequences,
        KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 },
        NonZeroUsize::new(last).unwrap(),
        first,
    )
    .unwrap()
}

/// Four sequences: one with a gap if the cache is a sliding one, one that was removed, a fork, an empty one.
fn four(empty: &KvCache) -> KvCache {
    let (mut cache, rng) = (empty.clone(), &mut Rng::new(1));
    for n in [600, 1] {
        append_tokens(&mut cache, 0, &new_tokens(empty, n, rng));
    }
    append_tokens(&mut cache, 1, &new_tokens(empty, 5, rng));
    cache.remove_sequence(1).unwrap();
    cache.fork(0, 2).unwrap();
    append_tokens(&mut cache, 2, &new_tokens(empty, 3, rng));
    cache
}

#[test]
fn an_imported_cache_is_the_one_exported() {
    for empty in [
        KvCache::new(4, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap(),
        sliding(4, 16, 4).rollback_room(9).unwrap(),
        sliding(4, 300, 0),
    ] {
        for (name, empty) in exact_and_others(&empty) {
            let cache = four(&empty);
            let bytes = cache.export().unwrap();
            let mut imported = KvCache::import(&bytes).unwrap();
            same_cache(name, &imported, &cache);
            assert_eq!(imported.format(), cache.format());
            assert_eq!(imported.sliding_window(), cache.sliding_window());
            assert_eq!([0, 1, 2, 3].map(|i| imported.has_sequence(i)), [true, false, true, true]);
            assert_eq!(imported.export().unwrap().len(), bytes.len());
            // It goes on as the other does.
            let mut cache = cache;
            let tokens = new_tokens(&empty, 40, &mut Rng::new(2));
            for cache in [&mut imported, &mut cache] {
                append_tokens(cache, 0, &tokens);
                cache.keep(2, 590, &[0, 3, 5, 13]).unwrap();
                assert_eq!(cache.add_sequence(), 1);
                append_tokens(cache, 1, &tokens);
            }
            same_cache(&format!("{name}, goes on"), &imported, &cache);
        }
    }
}

/// Any bits of floats; caches of nothing.
#[test]
fn corners_are_exported() {
    let strange = [f32::from_bits(0x7fc1_2345), f32::NEG_INFINITY, -0.0, f32::from_bits(1)];
    let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 4, value_dim: 4 }).unwrap();
    let rows = sdpa::View::bhld(&strange, [1, 1, 1, 4]).unwrap();
    cache.append(rows, rows).unwrap();
    let imported = KvCache::import(&cache.export().unwrap()).unwrap();
    let held = sdpa::Inputs::cached(rows, &imported).key_values().unwrap();
    for (d, x) in strange.into_iter().enumerate() {
        assert_eq!([held.key([0, 0, 0, d]), held.value([0, 0, 0, d])].map(|y| y.unwrap().to_bits()), [x.to_bits(); 2]);
    }
    for sequences in [0, 3] {
        for (_, empty) in
            exact_and_others(&KvCache::new(sequences, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap())
        {
            let imported = KvCache::import(&empty.export().unwrap()).unwrap();
            assert_eq!((imported.sequences(), imported.format()), (sequences, empty.format()));
        }
    }
    let error = KvCache::new(1, KvShape { kv_heads: 0, head_dim: 4, value_dim: 4 }).unwrap().export().unwrap_err();
    assert_eq!(error.to_string(), "cache: kv_heads is 0, but must be at least 1");
}

/// Tensors as the documentation states them, for whoever reads the file with another library.
#[test]
fn the_file_is_plain_tensors() {
    let mut cache = KvCache::new(1, KvShape { kv_heads: 2, head_dim: 3, value_dim: 5 }).unwrap();
    let tokens = new_tokens(&cache, 4, &mut Rng::new(3));
    append_tokens(&mut cache, 0, &tokens);
    let bytes = cache.export().unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, x) in [("sequences.0.keys", &tokens[0]), ("sequences.0.values", &tokens[1])] {
        let tensor = file.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (safetensors::Dtype::F32, &x.shape[1..]));
        assert_eq!(tensor.data(), x.data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    }
    assert_eq!(file.len(), 2);
    let int8 =
        KvCache::new(1, KvShape { kv_heads: 2, head_dim: 3, value_dim: 5 }).unwrap().int8(KeyScales::PerToken).unwrap();
    let bytes = {
        let mut cache = int8;
        append_tokens(&mut cache, 0, &tokens);
        cache.export().unwrap()
    };
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let shape = |name| file.tensor(name).unwrap().shape().to_vec();
    assert_eq!((shape("sequences.0.keys"), shape("sequences.0.value_scales")), (vec![2, 4, 3], vec![2, 4]));
}

/// The file of a cache, its description changed.
fn described(cache: &KvCache, from: &str, to: &str) -> Vec<u8> {
    let bytes = cache.export().unwrap();
    let len = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let header = core::str::from_utf8(&bytes[8..8 + len]).unwrap();
    let [from, to] = [from, to].map(|text| text.replace('"', "\\\""));
    assert!(header.contains(&from), "{header}");
    let header = header.replace(&from, &to);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(&bytes[8 + len..]);
    file
}

#[test]
fn wrong_descriptions_are_refused_in_words() {
    let slid = four(&sliding(4, 16, 4));
    let full = four(&KvCache::new(4, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap());
    let bytes =
        four(&exact_and_others(&KvCache::new(4, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap())[4].1);
    #[track_caller]
    fn says(words: &str, (cache, from, to): (&KvCache, &str, &str)) {
        let error = KvCache::import(&described(cache, from, to)).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
    let import = |words: &str, change| says(&format!("import: {words}"), change);
    import("the file's version is 3, but must be 1 or 2", (&full, r#""version":1"#, r#""version":3"#));
    import(r#"metadata "sdpa.kv_cache": missing field `version`"#, (&full, r#""version":1,"#, ""));
    import(r#"metadata "sdpa.kv_cache": missing field `kv_heads`"#, (&full, r#""kv_heads":2,"#, ""));
    import(r#"metadata "sdpa.kv_cache": unknown variant `f64`"#, (&full, r#""f32""#, r#""f64""#));
    import(
        "sequences.0.keys: F32 [2, 601, 17], but by the description must be F16 [2, 601, 17]",
        (&full, r#""f32""#, r#""f16""#),
    );
    import(
        "sequences.0.keys: F32 [2, 601, 17], but by the description must be F32 [2, 602, 17]",
        (&full, r#"{"len":601}"#, r#"{"len":602}"#),
    );
    import("sequences.3.keys: no such tensor", (&full, r#"{"len":0}"#, r#"{"len":1}"#));
    import("sequences.0.key_scales: no such tensor", (&bytes, "per channel", "per token"));
    import("sequences.0.keys: F32 [2, 601, 17]", (&full, r#""kv_heads":2"#, r#""kv_heads":1"#));
    says("cache: kv_heads is 0, but must be at least 1", (&full, r#""kv_heads":2"#, r#""kv_heads":0"#));
    says("cache: head_dim is 0, but must be at least 1", (&full, r#""head_dim":17"#, r#""head_dim":0"#));
    says("cache: value_dim is 999999999", (&full, r#""value_dim":20"#, r#""value_dim":999999999"#));
    says("cache: sizes", (&full, r#""kv_heads":2"#, r#""kv_heads":9999999999999999"#));
    let gap = r#"{"len":601,"evicted":[256,512]}"#;
    for (to, gap_words) in [
        (r#"{"len":526,"evicted":[256,512]}"#, "526 keys without 256..512"),
        (r#"{"len":601,"evicted":[0,512]}"#, "601 keys without 0..512"),
        (r#"{"len":601,"evicted":[256,500]}"#, "601 keys without 256..500"),
        (r#"{"len":601,"evicted":[512,256]}"#, "601 keys without 512..256"),
        (r#"{"len":601,"evicted":[256,256]}"#, "601 keys without 256..256"),
        (r#"{"len":601,"evicted":[256,18446744073709551360]}"#, "601 keys without 256..18446744073709551360"),
        (r#"{"len":0,"evicted":[256,512]}"#, "0 keys without 256..512"),
        (r#"{"len":18446744073709551615,"evicted":[256,512]}"#, "18446744073709551615 keys without 256..512"),
    ] {
        import(&format!("sequence 0: no cache with this window has {gap_words}"), (&slid, gap, to));
    }
    import(
        "sequence 0: no cache with this window has 601 keys without 256..512",
        (&slid, r#"{"last":16,"first":4,"rollback":0}"#, "null"),
    );
    let ever = r#"{"len":9000000000000000089,"evicted":[256,9000000000000000000]}"#;
    import("sequence 0: it has 9000000000000000089 keys, but must have at most 4294967295", (&slid, gap, ever));
}

/// A sequence that has run for long: what was evicted takes no memory.
#[test]
fn evicted_keys_take_no_memory() {
    let (cache, len) = (four(&sliding(4, 16, 4)), 1usize << 26);
    let to = format!(r#"{{"len":{},"evicted":[256,{len}]}}"#, len + 89);
    let file = described(&cache, r#"{"len":601,"evicted":[256,512]}"#, &to);
    let mut imported = KvCache::import(&file).unwrap();
    assert_eq!(imported.bytes(), KvCache::import(&cache.export().unwrap()).unwrap().bytes());
    assert_eq!((imported.lens()[0], imported.evicted(0)), (len + 89, Ok(256..len)));
    append_tokens(&mut imported, 0, &new_tokens(&cache, 300, &mut Rng::new(1)));
    assert_eq!(imported.evicted(0), Ok(256..len));
    append_tokens(&mut imported, 0, &new_tokens(&cache, 1, &mut Rng::new(1)));
    assert_eq!(imported.evicted(0), Ok(256..len + 256));
    let one = Rng::new(2).normal();
    let q = [one; 2 * 17];
    let mut out = [0.0; 2 * 20];
    let inputs = sdpa::Inputs::cached(sdpa::View::bhld(&q, [1, 2, 1, 17]).unwrap(), &imported).sequences(&[0]);
    let outputs = sdpa::Outputs::new(sdpa::ViewMut::bhld(&mut out, [1, 2, 1, 20]).unwrap());
    let window = sdpa::Window::last_tokens(NonZeroUsize::new(16).unwrap()).keep_first(4);
    let attention = sdpa::Attention::new().align(sdpa::Alignment::BottomRight).causal().window(window);
    sdpa::attention(&attention, inputs, outputs).unwrap();
    assert!(out.iter().all(|x| x.is_finite() && *x != 0.0));
}

/// Bytes of a tensor of a file, changed in the middle: what import says to that.
fn changed(bytes: &[u8], name: &str, with: &[u8]) -> Result<(), String> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let data = file.tensor(name).unwrap().data();
    let at = data.as_ptr() as usize - bytes.as_ptr() as usize + data.len() / 2 / 4 * 4;
    let mut changed = bytes.to_vec();
    changed[at..at + with.len()].copy_from_slice(with);
    KvCache::import(&changed).map(drop).map_err(|e| e.to_string())
}

/// Bytes and scales that no cache has.
#[test]
fn int8_tensors_are_looked_at() {
    let bytes =
        four(&exact_and_others(&KvCache::new(4, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap())[3].1)
            .export()
            .unwrap();
    for (part, with) in [("keys", 0x81), ("values", 0x7f)] {
        assert_eq!(changed(&bytes, &format!("sequences.0.{part}"), &[with]), Ok(()));
        let says = format!("import: sequences.0.{part}: an element is -128, but must be at least -127");
        assert_eq!(changed(&bytes, &format!("sequences.0.{part}"), &[0x80]), Err(says));
    }
    for part in ["key_scales", "value_scales"] {
        let name = format!("sequences.2.{part}");
        for good in [0.0, 1.5f32, f32::MIN_POSITIVE] {
            assert_eq!(changed(&bytes, &name, &good.to_le_bytes()), Ok(()));
        }
        for bad in [-1.0, f32::NAN, f32::INFINITY, f32::MAX, f32::from_bits(1), -0.0] {
            let says = format!("import: {name}: a scale is {bad}, but must be one that int8 rows have");
            assert_eq!(changed(&bytes, &name, &bad.to_le_bytes()), Err(says));
        }
    }
}

/// Elements and numbers that no int4 cache has.
#[test]
fn int4_tensors_are_looked_at() {
    for (i, centred) in [(5, false), (6, true)] {
        let bytes = four(
            &exact_and_others(&KvCache::new(4, KvShape { kv_heads: 2, head_dim: 17, value_dim: 20 }).unwrap())[i].1,
        )
        .export()
        .unwrap();
        for name in ["sequences.0.keys", "sequences.0.values"] {
            assert_eq!(changed(&bytes, name, &[0x97, 0x79]), Ok(()));
            for with in [0x08, 0x80] {
                let says = format!("import: {name}: an element is -8, but must be at least -7");
                assert_eq!(changed(&bytes, name, &[with]), Err(says));
            }
        }
        for name in ["sequences.2.key_scales", "sequences.2.value_scales"] {
            let number = |scale: f32, centre: f32| {
                let [scale, centre] = [scale, centre].map(|x| F16::from_f32(x).0.to_le_bytes());
                changed(&bytes, name, &[scale, centre].concat())
            };
            assert_eq!(number(2.0, 65504.0), Ok(()));
            let says = |bad: f32| Err(format!("import: {name}: a scale is {bad}, but must be finite and not negative"));
            // What is no centre is a scale.
            assert_eq!(number(2.0, -1.0), if centred { Ok(()) } else { says(-1.0) });
            for bad in [-1.0, f32::NAN, f32::INFINITY] {
                assert_eq!(number(bad, 1.0), says(bad));
            }
            let centre = Err(format!("import: {name}: a centre is -inf, but must be finite"));
            assert_eq!(number(1.0, f32::NEG_INFINITY), if centred { centre } else { says(f32::NEG_INFINITY) });
        }
    }
}

/// Cut off anywhere, or with any byte changed, a file is refused or a cache; it takes no more memory than its size allows.
#[test]
fn broken_files_never_panic() {
    let rng = &mut Rng::new(5);
    for empty in [KvCache::new(4, KvShape { kv_heads: 2, head_dim: 3, value_dim: 4 }).unwrap(), sliding(4, 16, 4)] {
        for (name, empty) in exact_and_others(&empty) {
            let mut cache = empty.clone();
            for (sequence, n) in [(0, 20), (1, 300), (0, 1), (3, 2), (1, 1)] {
                append_tokens(&mut cache, sequence, &new_tokens(&empty, n, rng));
            }
            cache.remove_sequence(3).unwrap();
            let bytes = cache.export().unwrap();
            for len in (0..600.min(bytes.len())).chain((0..40).map(|_| rng.below(bytes.len()))) {
                let error = KvCache::import(&bytes[..len]).unwrap_err();
                assert!(matches!(error, Error::File { what: "import", .. }), "{name}, {len} bytes: {error}");
            }
            let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize + 8;
            // Blocks, and what is parsed of the header.
            let (blocks, mut accepted) = (cache.bytes(), 0);
            let most = 2 * blocks + 20 * header;
            let places: Vec<usize> = (0..header).chain((0..100).map(|_| rng.below(bytes.len()))).collect();
            for i in places {
                let mut changed = bytes.clone();
                changed[i] = if rng.below(2) == 0 { b'0' + rng.below(10) as u8 } else { rng.bits() as u8 };
                let mut result = None;
                let (_, taken) = counted(|| result = Some(KvCache::import(&changed)));
                assert!(taken < most, "{name}: {taken} bytes for a file of {}", bytes.len());
                let result = result.expect("it was called");
                let Ok(imported) = result else { continue };
                accepted += 1;
                assert!(imported.bytes() <= blocks, "{name}");
                imported.export().unwrap();
            }
            assert!(accepted > 0, "{name}: some bytes may be anything");
        }
    }
}
