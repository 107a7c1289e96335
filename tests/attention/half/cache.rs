//! Caches of 16-bit elements: the bits of tensors that hold the rounded numbers.

use super::short::{DTYPES, Rounded, SHORT, append, cache_of, empty_cache, rounded};
use crate::kv_support::{cuts, same_full, same_oracle};
use crate::options::{Case, Full, Wanted, same_rows};
use crate::support::{LAYOUTS, Rng, Tensor, execs, indices};
use core::num::NonZeroUsize;
use sdpa::{Alignment, Dtype, Exec, Inputs, KvCache, KvShape, Window};

/// Queries of this type against a cache, and the case in `f32`.
fn attend(case: &Case, q: Dtype, cache: &KvCache, exec: Exec, wanted: Wanted) -> (Case, Full) {
    let q = Rounded::new(&case.q, q);
    let full = case.run_over(Inputs::cached(q.view(), cache), exec, wanted);
    (Case { q: q.wide.clone(), ..case.clone() }, full)
}

/// One sequence, causal, with any other options.
fn causal(rng: &mut Rng, length: usize) -> Case {
    let dims = [1, 3, 8, 16, 17, 33, 64, 80, 272];
    let (heads, kv_heads) = rng.pick(&[(1, 1), (4, 2), (3, 1), (2, 2)]);
    let sizes = [1, heads, kv_heads, length, length, rng.pick(&dims), rng.pick(&dims)];
    loop {
        let case = Case::of_sizes(rng, sizes);
        if case.ragged.is_none() {
            return Case { causal: true, kv_lens: None, alignment: Some(Alignment::TopLeft), ..case };
        }
    }
}

#[test]
fn any_call_over_a_cache_is_the_call_over_tensors() {
    for seed in 0..150 {
        let mut rng = Rng::new(50_000 + seed);
        let dtype = DTYPES[seed as usize % 3];
        let mut case = Case::random(&mut rng, 700_000).side_by_side();
        let cache = cache_of(&mut case, dtype, &mut rng);
        let q = rng.pick(&DTYPES);
        for (isa, exec) in execs() {
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                for exec in [exec, exec.threads(64)] {
                    let (wide, got) = attend(&case, q, &cache, exec, wanted);
                    same_full(&format!("seed {seed}, {dtype}, {isa}"), &got, &wide.run(exec, wanted));
                }
            }
        }
        if case.q.data.len() * case.k.shape[2] < 20_000 {
            let oracle = case.oracle_over::<f64>(Inputs::cached(case.q.view(), &cache));
            same_oracle(&format!("seed {seed}, {dtype}"), &oracle, &case.oracle());
        }
    }
}

/// Prompts in parts and tokens alone: the rows of the prefill.
#[test]
fn chunks_and_steps_are_the_prefill() {
    for length in [1, 15, 17, 255, 257, 513] {
        for n in 0..6 {
            let seed = 10 * length as u64 + n;
            let dtype = SHORT[n as usize % 2];
            for (isa, exec) in execs() {
                let mut rng = Rng::new(seed);
                let mut case = causal(&mut rng, length);
                case.q = Rounded::new(&case.q, dtype).wide;
                let mut cache = empty_cache(&case, dtype);
                let mut parts = cuts(length, &mut rng);
                // The last few tokens one at a time.
                let from = length.saturating_sub(4);
                parts.retain(|part| part.end <= from);
                let done = parts.last().map_or(0, |part| part.end);
                parts.extend((done < from).then_some(done..from));
                parts.extend((from..length).map(|i| i..i + 1));
                let mut answers = Vec::new();
                for rows in parts {
                    append((&mut cache, dtype), &mut case, 0, rows.clone(), &mut rng);
                    let chunk = Case { alignment: Some(Alignment::BottomRight), ..case.chunk(rows.clone(), rows.end) };
                    let wanted = [Wanted::LEAST, Wanted::ALL][rng.below(2)];
                    let (_, got) = attend(&chunk, dtype, &cache, exec, wanted);
                    same_full(&format!("seed {seed}, {isa}, {rows:?}"), &got, &chunk.run(exec, wanted));
                    answers.push((rows.start, chunk, got));
                }
                let whole = case.run(exec, Wanted { mass: false, ..Wanted::ALL });
                for (start, chunk, got) in answers {
                    let place = |[b, h, i]: [usize; 3]| Some([b, h, start + i]);
                    same_rows(&format!("seed {seed}, {isa}, from {start}"), (&chunk, &got), (&case, &whole), place);
                }
            }
        }
    }
}

/// Random appends, forks, rollbacks, and NaN or ∞ appended and rolled back; lists of rows say what there should be.
#[test]
fn histories() {
    const MOST: usize = 600;
    for seed in 0..24 {
        let mut rng = Rng::new(seed);
        let dtype = SHORT[seed as usize % 2];
        let [d, dv] = [(); 2].map(|()| rng.pick(&[3, 16, 20, 33, 80]));
        let mut case = Case::plain(&mut rng, [3, 4, 2, 2, MOST, d, dv]);
        let mut cache = empty_cache(&case, dtype);
        let mut lens = [0; 3];
        for step in 0..30 {
            let (b, to) = (rng.below(3), rng.below(3));
            let tokens = rng.pick(&[1, 1, 2, 15, 16, 17, 100, 255, 257]).min(MOST - lens[b]);
            match rng.below(8) {
                0 => {
                    lens[b] = rng.below(lens[b] + 1);
                    cache.truncate(b, lens[b]).unwrap();
                }
                1 => {
                    cache.fork(b, to).unwrap();
                    lens[to] = lens[b];
                    for x in [&mut case.k, &mut case.v] {
                        for [_, h, j, d] in indices([1, x.shape[1], lens[b], x.shape[3]]) {
                            x.set([to, h, j, d], x.get([b, h, j, d]));
                        }
                    }
                }
                2 | 3 => {
                    let x = rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
                    let [k, v] = [&case.k, &case.v]
                        .map(|like| Rounded::new(&Tensor::filled([1, like.shape[1], tokens, like.shape[3]], x), dtype));
                    cache.append_to(b, k.view(), v.view()).unwrap();
                    cache.truncate(b, lens[b]).unwrap();
                }
                _ => {
                    // Other numbers than those that were rolled back.
                    for x in [&mut case.k, &mut case.v] {
                        for [_, h, j, d] in indices([1, x.shape[1], tokens, x.shape[3]]) {
                            x.set([b, h, lens[b] + j, d], rng.normal());
                        }
                    }
                    append((&mut cache, dtype), &mut case, b, lens[b]..lens[b] + tokens, &mut rng);
                    lens[b] += tokens;
                }
            }
            assert_eq!(cache.lens(), lens);
            let longest = lens.into_iter().max().unwrap_or(0);
            let now = Case {
                k: case.k.rows(0..longest),
                v: case.v.rows(0..longest),
                kv_lens: Some(lens.to_vec()),
                ..case.clone()
            };
            let (isa, exec) = execs().nth(step % execs().count()).expect("there is one");
            let (wide, got) = attend(&now, dtype, &cache, exec, Wanted::ALL);
            same_full(&format!("seed {seed}, step {step}, {dtype}, {isa}"), &got, &wide.run(exec, Wanted::ALL));
        }
    }
}

/// A window over a cache that lets keys go.
#[test]
fn a_sliding_cache() {
    let (last, length) = (NonZeroUsize::new(270).unwrap(), 900);
    for dtype in SHORT {
        for (isa, exec) in execs() {
            let mut rng = Rng::new(1);
            let mut case = Case::plain(&mut rng, [1, 4, 2, length, length, 20, 33]);
            (case.causal, case.window) = (true, Some(Window::last_tokens(last).keep_first(4)));
            let mut cache = KvCache::sliding(1, KvShape { kv_heads: 2, head_dim: 20, value_dim: 33 }, last, 4)
                .unwrap()
                .dtype(dtype)
                .unwrap();
            let mut answers = Vec::new();
            for i in 0..length {
                append((&mut cache, dtype), &mut case, 0, i..i + 1, &mut rng);
                let step = Case { alignment: Some(Alignment::BottomRight), ..case.chunk(i..i + 1, i + 1) };
                if i % 9 == 0 || i > length - 20 {
                    let (_, got) = attend(&step, Dtype::F32, &cache, exec, Wanted::LEAST);
                    answers.push((i, step, got));
                }
            }
            // Four blocks at most: the first, and those of a window.
            assert!(cache.bytes() <= 4 * 256 * 2 * (20 + 48) * 2, "{} bytes", cache.bytes());
            case.alignment = Some(Alignment::TopLeft);
            let whole = case.run(exec, Wanted::LEAST);
            for (i, step, got) in answers {
                let place = |[b, h, _]: [usize; 3]| Some([b, h, i]);
                same_rows(&format!("{dtype}, token {i}, {isa}"), (&step, &got), (&case, &whole), place);
            }
        }
    }
}

/// However tensors lie that are appended, and of whatever types they are.
#[test]
fn layouts_of_what_is_appended_do_not_show() {
    let mut rng = Rng::new(3);
    for dtype in SHORT {
        for (length, d, dv) in [(5, 3, 15), (40, 16, 33), (300, 33, 20)] {
            let case = Case::plain(&mut rng, [2, 4, 2, 3, length, d, dv]);
            for (k, v) in LAYOUTS.iter().flat_map(|&k| LAYOUTS.map(|v| (k, v))) {
                let k = Rounded::new(&case.k.laid_out(k), rng.pick(&DTYPES));
                let v = Rounded::new(&case.v.laid_out(v), rng.pick(&DTYPES));
                let mut cache = empty_cache(&case, dtype);
                cache.append(k.view(), v.view()).unwrap();
                let held = |x: &Tensor| Tensor::from_fn(x.shape, |at| rounded(x.get(at), dtype));
                let case = Case { k: held(&k.wide), v: held(&v.wide), ..case.clone() };
                let (wide, got) = attend(&case, dtype, &cache, Exec::serial(), Wanted::ALL);
                let what = format!("{dtype}, {length} keys, {:?} {:?}", k.wide.strides, v.wide.strides);
                same_full(&what, &got, &wide.run(Exec::serial(), Wanted::ALL));
            }
        }
    }
}

/// Numbers that change when they are rounded, and kinds of numbers.
#[test]
fn what_is_appended_is_rounded_once() {
    let kinds =
        [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 2048.0, 65520.0, -1e6, 3e-8, 1e-40, f32::MAX, -0.0, f32::INFINITY, f32::NAN];
    for dtype in SHORT {
        // Finite numbers that f16 has no place for are refused: the largest there are in their place.
        let fits = |x: f32| if dtype == Dtype::F16 && x.is_finite() { x.clamp(-65519.0, 65519.0) } else { x };
        let kinds = kinds.map(fits);
        let mut case = Case::plain(&mut Rng::new(1), [1, 2, 1, 3, 20, 10, 10]);
        case.v = Tensor::from_fn(case.v.shape, |[.., d]| kinds[d]);
        case.k = Tensor::from_fn(case.k.shape, |[.., j, d]| kinds[d % 2] + j as f32);
        let mut cache = empty_cache(&case, dtype);
        cache.append(case.k.view(), case.v.view()).unwrap();
        for x in [&mut case.k, &mut case.v] {
            *x = Tensor::from_fn(x.shape, |at| rounded(x.get(at), dtype));
        }
        for (isa, exec) in execs() {
            let (wide, got) = attend(&case, Dtype::F32, &cache, exec, Wanted::ALL);
            same_full(&format!("{dtype}, {isa}"), &got, &wide.run(exec, Wanted::ALL));
        }
    }
}

#[test]
fn half_the_bytes() {
    for (dims, tokens) in [([64, 64], 1), ([20, 33], 300), ([1, 1], 256), ([3, 17], 1000)] {
        let case = Case::plain(&mut Rng::new(1), [2, 6, 3, 1, tokens, dims[0], dims[1]]);
        let bytes = DTYPES.map(|dtype| {
            let mut cache = empty_cache(&case, dtype);
            cache.append(case.k.view(), case.v.view()).unwrap();
            cache.bytes()
        });
        // The first block grows from 16 tokens to 256.
        let room = if tokens <= 256 { tokens.next_power_of_two().max(16) } else { tokens.next_multiple_of(256) };
        assert_eq!(bytes[0], 2 * room * 3 * (dims[0] + dims[1].next_multiple_of(16)) * 4);
        // Keys of bfloat16 are pairs of elements.
        let beside = 2 * room * 3 * (dims[0] % 2) * 2;
        assert_eq!([bytes[1], bytes[2]], [bytes[0] / 2 + beside, bytes[0] / 2]);
    }
}
