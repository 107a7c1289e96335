//! The mistakes that callers make, by number, with what becomes of each: the whole message, so that they can be read
//! side by side, or `accepted`. Whoever refuses has written nothing.

mod caches;
mod options;
mod oracle;
mod outputs;
mod pages;
mod runs;
mod sizes;
mod states;
mod views;

use crate::mistake::{ACCEPTED, Mistake, check, mistake, outcome};
use sdpa::{Attention, Inputs, Outputs, View, ViewMut};

/// Batch 2, 4 heads on 2, 3 rows, 5 keys, dims 6 and 7.
const Q: [usize; 4] = [2, 4, 3, 6];
const K: [usize; 4] = [2, 2, 5, 6];
const V: [usize; 4] = [2, 2, 5, 7];
const OUT: [usize; 4] = [2, 4, 3, 7];

static ZEROS: [f32; 4096] = [0.0; 4096];
static BYTES: [u8; 4096] = [0; 4096];

fn floats(shape: [usize; 4]) -> View<'static> {
    View::bhld(&ZEROS, shape).expect("small")
}

fn bytes(shape: [usize; 4]) -> View<'static, u8> {
    View::bhld(&BYTES, shape).expect("small")
}

/// An output besides `out`.
#[derive(Debug, Clone, Copy)]
enum More {
    Lse,
    Weights,
    Sums,
}

/// Outcome of a call that writes here, checked to have written nothing if it was refused.
fn call(attention: Attention, inputs: Inputs<'_>, out: [usize; 4], more: &[(More, [usize; 4])]) -> String {
    let memory = |shape: [usize; 4]| vec![42.0f32; shape.iter().product()];
    let mut first = memory(out);
    let mut rest: Vec<_> = more.iter().map(|&(kind, shape)| (kind, shape, memory(shape))).collect();
    let mut outputs = Outputs::new(ViewMut::bhld(&mut first, out).expect("dense"));
    for (kind, shape, memory) in &mut rest {
        let view = ViewMut::bhld(memory, *shape).expect("dense");
        outputs = match kind {
            More::Lse => outputs.lse(view),
            More::Weights => outputs.weights(view),
            More::Sums => outputs.key_weight_sums(view),
        };
    }
    let result = sdpa::attention(&attention, inputs, outputs);
    let untouched = first.iter().chain(rest.iter().flat_map(|(.., memory)| memory)).all(|&x| x == 42.0);
    assert!(result.is_ok() || untouched, "a refused call wrote: {result:?}");
    outcome(result)
}

/// Outcome of a call with default settings, and `out` of the shape that fits [`good`] inputs.
fn inputs(inputs: Inputs<'_>) -> String {
    call(Attention::new(), inputs, OUT, &[])
}

/// Inputs that fit together.
fn good() -> Inputs<'static> {
    Inputs::new(floats(Q), floats(K), floats(V))
}

/// Results of a good call.
fn answer(attention: Attention, inputs: Inputs<'_>, shape: [usize; 4]) -> Vec<f32> {
    let mut out = vec![42.0; shape.iter().product()];
    sdpa::attention(&attention, inputs, Outputs::new(ViewMut::bhld(&mut out, shape).expect("dense"))).expect("good");
    out
}

/// Numbers from −1 to 1 that differ.
fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect()
}

#[test]
fn good_calls_are_accepted() {
    assert_eq!(inputs(good()), ACCEPTED);
    let more = [(More::Lse, [2, 4, 3, 1]), (More::Weights, [2, 4, 3, 5]), (More::Sums, [2, 2, 5, 1])];
    assert_eq!(call(Attention::new(), good(), OUT, &more), ACCEPTED);
}

#[test]
fn every_mistake_has_its_answer() {
    let all = [
        sizes::mistakes(),
        views::mistakes(),
        options::mistakes(),
        oracle::mistakes(),
        options::lengths(),
        options::ragged(),
        options::backward(),
        pages::mistakes(),
        caches::mistakes(),
        caches::elements(),
        caches::cut_off(),
        runs::mistakes(),
        outputs::mistakes(),
        states::mistakes(),
    ];
    check(all.into_iter().flatten().collect(), 64);
}
