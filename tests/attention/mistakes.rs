//! The mistakes that callers make, by number, with what becomes of each: the whole message, so that they can be read
//! side by side, or `accepted`. Whoever refuses has written nothing.

mod caches;
mod exchanged;
mod layers;
mod models;
mod options;
mod oracle;
mod outputs;
mod pages;
mod runs;
mod sizes;
mod states;
mod views;

use sdpa::{Attention, Inputs, Outputs, View, ViewMut};
use std::collections::BTreeSet;

/// Batch 2, 4 heads on 2, 3 rows, 5 keys, dims 6 and 7.
const Q: [usize; 4] = [2, 4, 3, 6];
const K: [usize; 4] = [2, 2, 5, 6];
const V: [usize; 4] = [2, 2, 5, 7];
const OUT: [usize; 4] = [2, 4, 3, 7];

const ACCEPTED: &str = "accepted";
/// What is added to a message where the sizes give a cause away.
const KEY_HEADS: &str = "; that is the number of key/value heads, and query heads count here";

static ZEROS: [f32; 4096] = [0.0; 4096];
static BYTES: [u8; 4096] = [0; 4096];

fn floats(shape: [usize; 4]) -> View<'static> {
    View::bhld(&ZEROS, shape).expect("small")
}

fn bytes(shape: [usize; 4]) -> View<'static, u8> {
    View::bhld(&BYTES, shape).expect("small")
}

/// A mistake, what became of it, and what should.
struct Mistake {
    number: usize,
    what: &'static str,
    got: String,
    expected: String,
}

fn mistake(number: usize, what: &'static str, got: String, expected: impl Into<String>) -> Mistake {
    Mistake { number, what, got, expected: expected.into() }
}

/// The message of an error, or [`ACCEPTED`].
fn outcome<T, E: core::fmt::Display>(result: Result<T, E>) -> String {
    result.map_or_else(|error| error.to_string(), |_| ACCEPTED.to_owned())
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
        exchanged::mistakes(),
        views::mistakes(),
        options::mistakes(),
        oracle::mistakes(),
        options::lengths(),
        options::ragged(),
        options::backward(),
        pages::mistakes(),
        caches::mistakes(),
        caches::elements(),
        runs::mistakes(),
        outputs::mistakes(),
        states::mistakes(),
        models::mistakes(),
        layers::mistakes(),
    ];
    let mut wrong = 0;
    let mut seen = BTreeSet::new();
    let mut all: Vec<Mistake> = all.into_iter().flatten().collect();
    all.sort_by_key(|mistake| mistake.number);
    for Mistake { number, what, got, expected } in &all {
        println!("{number:2} {what}: {got}");
        if got != expected {
            println!("   should be: {expected}");
            wrong += 1;
        }
        seen.insert(*number);
    }
    assert_eq!(wrong, 0, "of {} answers", all.len());
    assert_eq!(seen, (1..=67).collect(), "every mistake has a case");
}
