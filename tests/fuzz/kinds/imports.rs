//! Files of caches, damaged: refused, or a cache that can be used like any other.

use super::cache::exported;
use crate::fuzzer::array::Array;
use crate::fuzzer::rng::Rng;
use sdpa::{Alignment, Attention, Error, Exec, Inputs, KvCache, KvShape, Outputs, View, ViewMut, Window};

/// Longest sequence, evicted keys included, over which calls are made.
const MOST_KEYS: usize = 100_000;

pub(super) fn check(rng: &mut Rng) {
    let mut bytes = exported(rng);
    let other = if rng.one_in(4) { exported(rng) } else { Vec::new() };
    for _ in 0..1 + rng.below(3) {
        damage(rng, &mut bytes, &other);
    }
    import(rng, &bytes);
}

/// Imports a file, and does with the cache whatever can be done, if there is one.
pub(crate) fn import(rng: &mut Rng, file: &[u8]) {
    match KvCache::import(file) {
        Ok(cache) => use_all(rng, cache, file.len()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Changes something, mostly in the description.
fn damage(rng: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    let header = bytes.first_chunk::<8>().map_or(0, |len| u64::from_le_bytes(*len) as usize);
    let header = 8 + header.min(bytes.len().saturating_sub(8));
    if bytes.len() < 9 {
        return bytes.push(rng.bits() as u8);
    }
    let part = if rng.one_in(4) { bytes.len() } else { header };
    let at = rng.below(part);
    match rng.below(10) {
        0 => bytes[at] ^= 1 << rng.below(8),
        1 => bytes[at] = rng.pick(b"0123456789\"{}[],: n-.e"),
        2 => bytes.truncate(at),
        3 => bytes.extend((0..1 + rng.below(40)).map(|i| i as u8)),
        4 => bytes[..8].copy_from_slice(&rng.pick(&[0, 1, 1 << 40, u64::MAX, header as u64]).to_le_bytes()),
        5 if !other.is_empty() => {
            let at = at.min(other.len());
            *bytes = [&bytes[..at.min(bytes.len())], &other[at..]].concat();
        }
        _ => number(rng, bytes, header),
    }
}

/// Puts another number in place of one of the header's, which is then as long as it says.
fn number(rng: &mut Rng, bytes: &mut Vec<u8>, header: usize) {
    let header = header.min(bytes.len());
    let starts: Vec<usize> =
        (9..header).filter(|&i| bytes[i].is_ascii_digit() && !bytes[i - 1].is_ascii_alphanumeric()).collect();
    if starts.is_empty() {
        return;
    }
    let start = rng.pick(&starts);
    let len = bytes[start..header].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let was: u64 = String::from_utf8_lossy(&bytes[start..start + len]).parse().unwrap_or(0);
    let other = [0, 1, 2, 16, 255, 256, 257, 1 << 31, u64::from(u32::MAX), 1 << 32, 1 << 60, u64::MAX];
    let number = match rng.below(3) {
        0 => was.wrapping_add(1),
        1 => was.wrapping_sub(1),
        _ => rng.pick(&other),
    };
    bytes.splice(start..start + len, number.to_string().into_bytes());
    let new = (header - 8 + number.to_string().len() - len) as u64;
    bytes[..8].copy_from_slice(&new.to_le_bytes());
}

/// Whatever can be done with a cache.
fn use_all(rng: &mut Rng, mut cache: KvCache, file: usize) {
    let (lens, KvShape { kv_heads: g, head_dim: d, value_dim: dv }) = (cache.lens().to_vec(), cache.shape());
    // A block has 256 keys; integers take half as much for what they are multiplied by.
    let blocks: usize = 1 + 2 * lens.len();
    let all = 4 * (file + blocks * 256 * g * (d + dv + 16));
    assert!(cache.bytes() <= all, "{} bytes of a file of {file}", cache.bytes());
    if g * (d + dv) > 10_000 || lens.iter().any(|&len| len > MOST_KEYS) {
        return;
    }
    attend(rng, &cache);
    let exported = cache.export().expect("it has heads");
    assert_eq!(KvCache::import(&exported).expect("it was exported").lens(), lens);
    for (b, &len) in lens.iter().enumerate() {
        let zeros = Array::from_fn([1, g, 2, d.max(dv)], |_| 0.0);
        let rows = View::bhld(&zeros.data, [1, g, 2, d.max(dv)]).expect("dense");
        let column = |dim| rows.columns(0..dim).expect("no wider than the whole");
        match (cache.has_sequence(b), cache.append_to(b, column(d), column(dv))) {
            (true, Ok(())) => assert_eq!(cache.lens()[b], len + 2),
            (false, Err(Error::Removed { .. })) => {}
            // Values of a latent cache are no columns of these.
            (true, Err(e)) => assert!(cache.is_latent(), "{e}"),
            (removed, result) => panic!("{removed}: {result:?}"),
        }
        let _ = cache.truncate(b, len / 2);
        let _ = cache.keep(b, 0, &[]);
        let _ = cache.fork(b, 0);
    }
    attend(rng, &cache);
}

fn attend(rng: &mut Rng, cache: &KvCache) {
    let (batch, KvShape { kv_heads: g, head_dim: d, value_dim: dv }) = (cache.lens().len(), cache.shape());
    let rows = rng.up_to(2);
    let q: Vec<f32> = (0..batch * g * rows * d).map(|_| rng.normal()).collect();
    let (mut out, blank) = (vec![f32::from_bits(u32::MAX); batch * g * rows * dv], u32::MAX);
    let mut attention = Attention::new().causal().align(Alignment::BottomRight);
    if let Some(keys) = cache.sliding_window() {
        attention = attention.window(Window::last_tokens(keys.last).keep_first(keys.first));
    }
    let inputs = Inputs::cached(View::bhld(&q, [batch, g, rows, d]).expect("dense"), cache);
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [batch, g, rows, dv]).expect("dense"));
    match attention.problem(inputs, outputs) {
        Ok(problem) => {
            problem.run_once(Exec::serial());
            assert!(out.iter().all(|x| x.to_bits() != blank), "not all was written");
        }
        Err(Error::Evicted { .. } | Error::Removed { .. } | Error::Wider { .. }) => {
            assert!(out.iter().all(|x| x.to_bits() == blank), "a refused call wrote");
        }
        Err(e) => panic!("{e}"),
    }
}
