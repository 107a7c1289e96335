//! Linear attention, recurrent against chunked: every rule, on states that fit the first-level cache and that do not. Then
//! decoding, in place and with the states kept that rollbacks need. Interleaved runs, medians.
//!
//! ```text
//! cargo bench -p sdpa-layers --bench linear_attention
//! ```

#[path = "../../benches/support/interleaved.rs"]
mod interleaved;

use interleaved::{medians, random};
use sdpa::{Exec, Isa, View, ViewMut};
use sdpa_layers::{Compute, Form, LinearAttention, LinearInputs, LinearState, StateCache, Update};

const FORMS: [Form; 4] = [Form::Recurrent, Form::Chunked(16), Form::Chunked(32), Form::Chunked(64)];

/// `[heads, kv_heads, len, dim]`, on one thread: nanoseconds for a token and key/value head.
fn shape([heads, kv_heads, len, dim]: [usize; 4], rounds: usize) {
    let scaled = |n: usize, seed, by: f32| random(n, seed).iter().map(|x| x * by).collect::<Vec<_>>();
    let unit = (dim as f32).sqrt().recip();
    let (q, k, v) =
        (random(heads * len * dim, 1), scaled(kv_heads * len * dim, 2, unit), random(kv_heads * len * dim, 3));
    let log_decay: Vec<f32> = random(kv_heads * len * dim, 4).iter().map(|x| -0.1 * x.abs()).collect();
    let beta: Vec<f32> = random(kv_heads * len, 5).iter().map(|x| x.abs().min(1.0)).collect();
    let view = |data, heads, dim| View::bhld(data, [1, heads, len, dim]).expect("sizes fit");
    let (log_decay, beta) = (view(&log_decay, kv_heads, dim), view(&beta, kv_heads, 1));
    println!("{heads} heads on {kv_heads}, {len} tokens, {dim} → {dim}: ns a token and key/value head, {FORMS:?}");
    for (name, update) in [
        ("linear", Update::Linear),
        ("gated", Update::Gated { log_decay }),
        ("delta", Update::Delta { beta }),
        ("gated delta", Update::GatedDelta { log_decay, beta }),
    ] {
        let inputs = LinearInputs::new(view(&q, heads, dim), view(&k, kv_heads, dim), view(&v, kv_heads, dim), update);
        let run = |form: Form| {
            let mut compute = Compute::new(Exec::serial());
            let mut state = LinearState::new([1, kv_heads, dim, dim]).expect("sizes fit");
            let mut out = vec![0.0; heads * len * dim];
            move || {
                state.as_mut_slice().fill(0.0);
                let out = ViewMut::bhld(&mut out, [1, heads, len, dim]).expect("sizes fit");
                LinearAttention::new().form(form).forward(inputs, &mut state, out, &mut compute).expect("sizes fit");
            }
        };
        let [mut a, mut b, mut c, mut d] = FORMS.map(run);
        let times = medians(rounds, [&mut a, &mut b, &mut c, &mut d]);
        let each = times.map(|seconds| format!("{:6.0}", seconds * 1e9 / (kv_heads * len) as f64));
        println!("  {name:11} {}", each.join(" "));
    }
}

/// Decoding of one sequence by some layers of `[heads, dim]`, on one thread: microseconds a layer.
fn decoding(layers: usize, [heads, dim]: [usize; 2], rounds: usize) {
    const ROOM: usize = 8;
    let len = ROOM + 1;
    let (x, log_decay) = (random(heads * len * dim, 1), vec![-0.1; heads]);
    let (x, beta) = (x.iter().map(|x| x / (dim as f32).sqrt()).collect::<Vec<_>>(), vec![0.5; heads]);
    let (log_decay, beta) = (View::bhld(&log_decay, [1, heads, 1, 1]), View::bhld(&beta, [1, heads, 1, 1]));
    let update = Update::GatedDelta { log_decay: log_decay.expect("sizes fit"), beta: beta.expect("sizes fit") };
    let inputs = |len| {
        let x = View::bhld(&x[..heads * len * dim], [1, heads, len, dim]).expect("sizes fit");
        LinearInputs::new(x, x, x, update)
    };
    let zeros = LinearState::new([1, heads, dim, dim]).expect("sizes fit");
    let cache = || StateCache::new(1, &zeros, ROOM).expect("sizes fit");
    let decode = |cache: &mut StateCache, len: usize, out: &mut [f32], compute: &mut Compute| {
        let out = ViewMut::bhld(&mut out[..heads * len * dim], [1, heads, len, dim]).expect("sizes fit");
        LinearAttention::new().decode(inputs(len), cache, &[0], out, compute).expect("sizes fit");
    };
    let [mut a, mut b, mut c] = [(); 3].map(|()| Compute::new(Exec::serial()));
    let [mut out_a, mut out_b, mut out_c] = [(); 3].map(|()| vec![0.0; heads * len * dim]);
    let mut states = vec![zeros.clone(); layers];
    let mut in_place = || {
        for state in &mut states {
            let out = ViewMut::bhld(&mut out_a[..heads * dim], [1, heads, 1, dim]).expect("sizes fit");
            LinearAttention::new().forward(inputs(1), state, out, &mut a).expect("sizes fit");
        }
    };
    let [mut kept, mut drafted, mut ahead] = [(); 3].map(|()| (0..layers).map(|_| cache()).collect::<Vec<_>>());
    let mut keeping = || kept.iter_mut().for_each(|cache| decode(cache, 1, &mut out_b, &mut b));
    let mut drafting = || {
        for cache in &mut drafted {
            decode(cache, len, &mut out_c, &mut c);
            cache.truncate(0, cache.len(0).expect("it is there") - ROOM).expect("there is room");
        }
    };
    for cache in &mut ahead {
        decode(cache, len, &mut vec![0.0; heads * len * dim], &mut Compute::new(Exec::serial()));
        cache.add_sequence();
    }
    // A fork, too: what is taken back once would have to be computed again.
    let mut taking_back = || {
        for cache in &mut ahead {
            cache.fork(0, 1).expect("both are there");
            cache.truncate(1, 1).expect("there is room");
        }
    };
    let times = medians(rounds, [&mut in_place, &mut keeping, &mut drafting, &mut taking_back]);
    let [in_place, keeping, drafting, taking_back] = times.map(|seconds| seconds * 1e6 / layers as f64);
    println!("decoding, {layers} layers of {heads} heads of {dim} by {dim}, microseconds a layer");
    println!("  a token: {in_place:.0} in place, {keeping:.0} kept ({:.2})", keeping / in_place);
    println!(
        "  {len} tokens, {ROOM} of them taken back: {drafting:.0}; a fork and {ROOM} taken back: {taking_back:.1}"
    );
}

fn main() {
    println!("{}, one thread", Isa::detect());
    // `cargo bench -- --test` only wants to see that it runs.
    if std::env::args().any(|arg| arg == "--test") {
        decoding(2, [2, 8], 1);
        return shape([2, 1, 20, 8], 1);
    }
    for sizes in [[4, 4, 512, 64], [16, 4, 512, 64], [4, 4, 512, 128], [4, 4, 512, 256]] {
        shape(sizes, 11);
    }
    for layers in [1, 24] {
        decoding(layers, [32, 128], 11);
    }
}
