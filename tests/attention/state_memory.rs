//! Memory that a finished state or a call leaves to the next one: no number in it shows.

use sdpa::{
    Alignment, Attention, AttnState, BackwardPlan, Exec, Gradients, Inputs, Outputs, Plan, Saved, View, ViewMut,
    Window, Workspace,
};

const HEADS: usize = 2;
const ROWS: usize = 100;
const KEYS: usize = 600;
const DIM: usize = 24;
const VALUE_DIM: usize = 20;

/// Numbers from −1 to 1.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let number = |n: u64| ((n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(seed as u32) >> 40) as f32;
    (0..len as u64).map(|n| number(n) / (1 << 23) as f32 - 1.0).collect()
}

/// Outputs, then log-sum-exps.
type Results = Vec<f32>;

fn views(results: &mut Results) -> Outputs<'_> {
    let (out, lse) = results.split_at_mut(HEADS * ROWS * VALUE_DIM);
    let out = ViewMut::bhld(out, [1, HEADS, ROWS, VALUE_DIM]).unwrap();
    Outputs::new(out).lse(ViewMut::bhl(lse, [1, HEADS, ROWS]).unwrap())
}

fn empty() -> Results {
    vec![7.0; HEADS * ROWS * (VALUE_DIM + 1)]
}

fn read(state: &mut AttnState<'_>) -> Vec<u32> {
    let mut results = empty();
    state.read(views(&mut results)).unwrap();
    results.iter().map(|x| x.to_bits()).collect()
}

/// Memory of a state that has seen keys, which a forward and a backward call have used too.
fn used(inputs: Inputs<'_>, [k, v]: [View<'_>; 2]) -> Workspace {
    let mut state = AttnState::from_inputs(Attention::new(), inputs, Exec::serial()).unwrap();
    state.push(k, v).unwrap();
    let mut workspace = state.finish(views(&mut empty())).unwrap();
    let mut results = empty();
    let problem = Attention::new().problem(inputs, views(&mut results)).unwrap();
    let plan = Plan::new(&problem, Exec::serial());
    problem.run(&plan, &mut workspace);
    let (out, lse) = results.split_at(HEADS * ROWS * VALUE_DIM);
    let out = View::bhld(out, [1, HEADS, ROWS, VALUE_DIM]).unwrap();
    let saved = Saved::new(out, View::bhl(lse, [1, HEADS, ROWS]).unwrap(), out);
    let problem = Attention::new().backward(inputs, saved, Gradients::new()).unwrap();
    let plan = BackwardPlan::new(&problem, Exec::serial());
    let before = workspace.bytes();
    problem.run(&plan, &mut workspace).unwrap();
    assert!(workspace.bytes() > before);
    workspace
}

#[test]
fn a_state_in_used_memory_has_the_bits_of_one_call_however_keys_are_pushed_or_states_merged() {
    let (q, k) = (numbers(HEADS * ROWS * DIM, 1), numbers(HEADS * KEYS * DIM, 2));
    let v = numbers(HEADS * KEYS * VALUE_DIM, 3);
    let q = View::bhld(&q, [1, HEADS, ROWS, DIM]).unwrap();
    let k = View::bhld(&k, [1, HEADS, KEYS, DIM]).unwrap();
    let v = View::bhld(&v, [1, HEADS, KEYS, VALUE_DIM]).unwrap();
    let inputs = Inputs::new(q, k, v);
    let causal = Attention::new().causal().align(Alignment::Offset(400));
    let state = |attention, memory| AttnState::from_inputs_in(attention, inputs, Exec::serial(), memory).unwrap();
    let mut whole = empty();
    causal.problem(inputs, views(&mut whole)).unwrap().run_once(Exec::serial());
    let whole: Vec<u32> = whole.iter().map(|x| x.to_bits()).collect();
    let nothing: Vec<u32> = {
        let (out, lse) = (vec![0.0f32; HEADS * ROWS * VALUE_DIM], vec![f32::NEG_INFINITY; HEADS * ROWS]);
        out.iter().chain(&lse).map(|x| x.to_bits()).collect()
    };
    let push = |state: &mut AttnState<'_>, keys: core::ops::Range<usize>| {
        state.push(k.rows(keys.clone()).unwrap(), v.rows(keys).unwrap()).unwrap();
    };
    for is_used in [false, true] {
        let memory = || if is_used { used(inputs, [k, v]) } else { Workspace::new() };
        let mut parts = state(causal, memory());
        assert_eq!(read(&mut parts), nothing);
        for keys in [0..7, 7..300, 300..556, 556..600] {
            push(&mut parts, keys);
        }
        assert_eq!(read(&mut parts), whole);
        let mut results = empty();
        parts.finish(views(&mut results)).unwrap();
        assert_eq!(results.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), whole);

        let mut merged = state(causal, memory());
        for keys in [0..256, 256..512, 512..600] {
            let mut later = state(causal, memory()).starting_at(keys.start).unwrap();
            push(&mut later, keys);
            merged.merge(&later).unwrap();
        }
        assert_eq!(read(&mut merged), whole);

        let mut some = state(causal, memory());
        push(&mut some, 0..512);
        let before = read(&mut some);
        some.merge(&state(causal, memory()).starting_at(512).unwrap()).unwrap();
        assert_eq!(read(&mut some), before);

        let window = Attention::new().window(Window::inclusive(Some(50), Some(0))).align(Alignment::Offset(600));
        let mut passed = state(window, memory());
        passed.skip(512).unwrap();
        assert_eq!(read(&mut passed), nothing);
    }
}
