//! The mistakes that callers of layers make, by number, with what becomes of each; those of calls of attention are in the root's
//! `tests/attention/mistakes.rs`.

mod layers;
mod models;

#[test]
fn every_mistake_has_its_answer() {
    let all = [models::mistakes(), layers::mistakes()];
    crate::mistake::check(all.into_iter().flatten().collect(), 4);
}
