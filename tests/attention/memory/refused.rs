//! Memory that the system refuses, at each request in turn: an error, and nothing has changed.

use crate::counting::refusing;
use crate::kv_support::{append_tokens, every_format, new_tokens, same_cache};
use crate::support::{Rng, Tensor};
use sdpa::parts::{BlockStates, RowStates};
use sdpa::{
    Alignment, Attention, AttnState, CacheFormat, Dtype, Error, Exec, Gradients, Inputs, Int4, KvCache, KvShape,
    Outputs, PagePool, Precision, Saved, View, ViewMut,
};
use std::num::NonZeroUsize;

/// Smallest request that is refused where files are read or written: larger than the lists of their headers.
const LEAST: usize = 2048;
const SHAPE: KvShape = KvShape { kv_heads: 2, head_dim: 20, value_dim: 33 };

/// Calls `attempt` with the number of a request for memory to refuse, one after the other, until it says that there was no such
/// request.
fn for_each_request(what: &str, attempt: impl Fn(usize) -> Option<usize>) {
    let requests = (0..).take_while(|&number| attempt(number).is_some()).count();
    assert!(requests > 0, "{what}: nothing was asked for");
}

/// Runs `change` on copies of a cache, where one request for memory after the other is refused.
fn with_refusals(what: &str, cache: impl Fn() -> KvCache, change: impl Fn(&mut KvCache) -> Result<(), Error>) {
    let (before, mut changed) = (cache(), cache());
    change(&mut changed).expect(what);
    for_each_request(what, |number| {
        let mut it = cache();
        let (result, refused) = refusing(number, 256, || change(&mut it));
        if let Err(error) = result {
            assert!(matches!(error, Error::Memory { what: "cache", .. }), "{what}: {error}");
            same_cache(what, &it, &before);
            change(&mut it).expect(what);
        }
        same_cache(what, &it, &changed);
        refused
    });
}

/// Calls `make`, where one request for memory after the other is refused. An error says that so much was wanted, or more, but for
/// what it takes to begin with a cache line.
fn each_refusal<T: PartialEq + core::fmt::Debug>(what: &str, make: impl Fn() -> Result<T, Error>) {
    let expected = make().expect(what);
    for_each_request(what, |number| {
        let (result, refused) = refusing(number, LEAST, &make);
        match result {
            Ok(made) => assert_eq!(made, expected, "{what}"),
            // Of a pool's pages the elements are counted, not the scales beside them.
            Err(Error::Memory { bytes, what: said }) => {
                let least = refused.map(|all| if said == "page pool" { all / 4 * 3 } else { all - 64 });
                assert!(Some(bytes) >= least, "{what}: {bytes} of {refused:?}");
            }
            Err(error) => panic!("{what}: {error}"),
        }
        refused
    });
}

#[test]
fn what_is_made_says_so() {
    let (x, large) = (vec![0.5f32; 2 * 600 * 16], KvShape { kv_heads: 2, head_dim: 16, value_dim: 16 });
    let view = |rows| View::bhld(&x[..2 * rows * 16], [1, 2, rows, 16]).unwrap();
    each_refusal("a cache of many sequences", || KvCache::new(500, large).map(|cache| cache.sequences()));
    for format in [CacheFormat::Elements(Dtype::F16), CacheFormat::Int8PerToken, CacheFormat::Int4(Int4::Centred)] {
        each_refusal("a pool", || PagePool::new(9, 32, large, format).map(|pool| pool.bytes()));
        let shrunk = || {
            let mut pool = PagePool::new(40, 32, large, format)?;
            pool.shrink(7)?;
            Ok(pool.bytes())
        };
        each_refusal("fewer pages", shrunk);
    }
    let mut cache = KvCache::new(3, large).unwrap();
    cache.append_to(1, view(600), view(600)).unwrap();
    // The package that writes files does not ask; so the library does before.
    let (file, _) = refusing(0, LEAST, || cache.export());
    assert!(matches!(file, Err(Error::Memory { what: "export", .. })));
    let file = cache.export().unwrap();
    each_refusal("an import", || KvCache::import(&file).map(|cache| cache.lens().to_vec()));
    let attention = Attention::new().causal().align(Alignment::Offset(500));
    for precision in [Precision::Exact, Precision::Native] {
        each_refusal("a state", || {
            let inputs = Inputs::new(view(3), view(0), view(0));
            let mut state = AttnState::from_inputs(attention.precision(precision), inputs, Exec::serial())?;
            state.push(view(20), view(20))?;
            state.push(view(570), view(570))?;
            let mut out = vec![0.0f32; 2 * 3 * 16];
            let read = state.finish(Outputs::new(ViewMut::bhld(&mut out, [1, 2, 3, 16]).unwrap()));
            read.map(|_| out)
        });
    }
    each_refusal("states of blocks", || {
        let mut blocks = BlockStates::new();
        blocks.compute(&attention, Inputs::new(view(3), view(600), view(600)), 0, Exec::serial())?;
        let mut states = RowStates::new([1, 2, 3, 16])?;
        states.fold(&blocks)?;
        Ok(states.as_slice().to_vec())
    });
}

#[test]
fn caches_say_so_and_stay_as_they_are() {
    let rng = &mut Rng::new(4);
    let plain = KvCache::new(3, SHAPE).unwrap();
    let sliding = KvCache::sliding(3, SHAPE, NonZeroUsize::new(30).unwrap(), 3).unwrap();
    for (kind, empty) in [("all keys", plain), ("sliding", sliding)] {
        for (name, empty) in every_format(&empty) {
            let what = |doing: &str| format!("{kind}, {name}, {doing}");
            let (many, few) = (new_tokens(&empty, 300, rng), new_tokens(&empty, 3, rng));
            let append =
                |cache: &mut KvCache, sequence, [k, v]: &[Tensor; 2]| cache.append_to(sequence, k.view(), v.view());
            with_refusals(&what("first tokens"), || empty.clone(), |cache| append(cache, 1, &few));
            with_refusals(&what("a prompt"), || empty.clone(), |cache| append(cache, 1, &many));
            let filled = || {
                let mut cache = empty.clone();
                append_tokens(&mut cache, 0, &many);
                append_tokens(&mut cache, 2, &few);
                cache.fork(0, 1).unwrap();
                cache
            };
            with_refusals(&what("tokens of a fork"), filled, |cache| append(cache, 1, &few));
            with_refusals(&what("a block more"), filled, |cache| append(cache, 2, &many));
            with_refusals(&what("tokens kept"), filled, |cache| cache.keep(1, 290, &[1, 2, 5]));
        }
    }
}

/// Without memory for partial results rows are divided in place of keys; without memory for derivatives there is an error.
#[test]
fn calls_say_so() {
    let x = vec![0.5f32; 2 * 600 * 16];
    let view = |rows| View::bhld(&x[..2 * rows * 16], [1, 2, rows, 16]).unwrap();
    for rows in [1, 40] {
        let inputs = Inputs::new(view(rows), view(600), view(600));
        each_refusal("a call", || {
            let mut out = [0.0f32; 2 * 40 * 16];
            let outputs = Outputs::new(ViewMut::bhld(&mut out[..2 * rows * 16], [1, 2, rows, 16]).unwrap());
            sdpa::attention(&Attention::new(), inputs, outputs).map(|()| out)
        });
        let (lse, d_out) = (vec![6.0f32; 2 * rows], view(rows));
        let saved = Saved::new(view(rows), View::bhl(&lse, [1, 2, rows]).unwrap(), d_out);
        each_refusal("a backward call", || {
            // Not from the heap.
            let mut gradients = [0.0f32; 2 * (40 + 600 + 600) * 16];
            let (dq, rest) = gradients.split_at_mut(2 * rows * 16);
            let (dk, dv) = rest[..2 * 2 * 600 * 16].split_at_mut(2 * 600 * 16);
            let [dq, dk, dv] =
                [(dq, rows), (dk, 600), (dv, 600)].map(|(x, n)| ViewMut::bhld(x, [1, 2, n, 16]).unwrap());
            let all = Gradients::new().q(dq).k(dk).v(dv);
            Attention::new().backward(inputs, saved, all)?.run_once(Exec::serial())?;
            Ok(gradients)
        });
    }
}
