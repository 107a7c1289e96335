//! Biases and masks by key/value head, over the last keys, with a period over the batch: the bits and numbers of those that
//! say it for every sequence, query head and key.

use crate::kv_support::{append_part, empty_cache, every_format};
use crate::options::{Case, Wanted, check_against_oracle};
use crate::positions::{assert_same_full, random_case};
use crate::support::{Rng, assert_same_bits, execs, fewer};
use sdpa::{Attention, AttnState, BlockTable, Error, Inputs, Mask, Outputs, Pages, View, ViewMut};

#[test]
fn they_have_the_bits_and_numbers_of_whole_ones() {
    for seed in 0..fewer(400) {
        let mut rng = Rng::new(seed);
        let case = match seed % 4 {
            0 => Case::of_sizes(&mut rng, [4, 4, 2, 3, 300, 8, 16]),
            _ => random_case(&mut rng, seed),
        };
        let case = case.partial(&mut rng);
        let (whole, oracle) = (case.whole(), case.oracle::<f64>());
        assert_eq!(format!("{oracle:?}"), format!("{:?}", whole.oracle::<f64>()), "seed {seed}");
        for (isa, exec) in execs() {
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                let (what, got) = (format!("seed {seed}, {isa}"), case.run(exec, wanted));
                assert_same_full(&what, &got, &whole.run(exec, wanted));
                check_against_oracle(&what, &case, &got, &oracle);
            }
        }
    }
}

/// The last keys are those of each sequence, by its own length.
#[test]
fn caches_and_pages_have_the_bits_of_whole_ones() {
    for seed in 0..fewer(30) {
        let mut rng = Rng::new(seed);
        let (rows, keys) = (rng.pick(&[1, 1, 3, 40]), 300 + rng.below(300));
        let case = Case::plain(&mut rng, [4, 4, 2, rows, keys, 16, 16]);
        let lens = [keys, rng.below(keys), 1 + rng.below(20), 256];
        let case = Case { kv_lens: Some(lens.to_vec()), ..case }.partial(&mut rng);
        let whole = case.whole();
        for (isa, exec) in execs() {
            for (name, empty) in every_format(&empty_cache(&case)) {
                let mut cache = empty;
                lens.iter().enumerate().for_each(|(b, &len)| append_part(&mut cache, &case, b, 0..len));
                let run = |case: &Case| case.run_over(Inputs::cached(case.q.view(), &cache), exec, Wanted::LEAST);
                assert_same_full(&format!("seed {seed}, {name}, {isa}"), &run(&case), &run(&whole));
            }
            let table = BlockTable { entries: &[0, 1, 2, 3], lens: &lens };
            let pages = Pages::new(case.k.view(), case.v.view(), table).expect("a page each");
            let got = case.run_over(Inputs::paged(case.q.view(), pages), exec, Wanted::ALL);
            assert_same_full(&format!("seed {seed}, pages, {isa}"), &got, &whole.run(exec, Wanted::ALL));
        }
    }
}

#[test]
fn states_take_them_by_head_and_period() {
    for seed in 0..fewer(40) {
        let mut rng = Rng::new(seed);
        let case = Case::plain(&mut rng, [4, 4, 2, 5, 600, 16, 16]).partial(&mut rng);
        for (isa, exec) in execs() {
            let state = AttnState::from_inputs(case.attention(), case.inputs(), exec);
            if case.suffix && (case.bias.is_some() || case.mask.is_some()) {
                let argument = if case.bias.is_some() { "bias suffix" } else { "mask suffix" };
                assert!(matches!(state, Err(Error::Needs { argument: got, .. }) if got == argument));
                continue;
            }
            let (mut state, mut got) = (state.expect("a good call"), case.unwritten(Wanted::LEAST));
            for keys in [0..300, 300..600] {
                state.push(case.k.rows(keys.clone()).view(), case.v.rows(keys).view()).expect("they fit");
            }
            state.read(got.outputs()).expect("they fit");
            assert_same_full(&format!("seed {seed}, {isa}"), &got, &case.whole().run(exec, Wanted::LEAST));
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let (x, bytes) = ([0.5; 6 * 4 * 5 * 5], [1u8; 300]);
    let floats = |shape: [usize; 4]| View::bhld(&x[..shape.iter().product()], shape).expect("dense");
    let kv = floats([6, 2, 5, 5]);
    let inputs = Inputs::new(floats([6, 4, 3, 5]), kv, kv);
    let mask = |shape: [usize; 4]| Mask::keep(View::bhld(&bytes[..shape.iter().product()], shape).expect("dense"));
    for (inputs, words) in [
        (inputs.bias_suffix(floats([1, 2, 3, 6])), "bias: columns is 6, but k (rows) has 5"),
        (inputs.mask_suffix(mask([1, 1, 1, 9])), "mask: columns is 9, but k (rows) has 5"),
        (inputs.bias(floats([1, 3, 3, 5])), "bias: heads is 3, but the call has 4"),
        (inputs.mask(mask([3, 1, 1, 5])), "mask: batch is 3, but the call has 6"),
        (inputs.mask(mask([2, 1, 1, 5])).batch_period(3), "mask: batch is 2, but the call has 6"),
        (inputs.batch_period(4), "batch period: number of sequences is 6, but must be a multiple of 4, the period"),
        (inputs.batch_period(0), "batch period: number of sequences is 6, but must be a multiple of 0, the period"),
        (inputs.batch_period(usize::MAX), "batch period: number of sequences is 6, but must be a multiple of"),
    ] {
        let mut out = [42.0; 6 * 4 * 3 * 5];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [6, 4, 3, 5]).expect("dense"));
        let error = sdpa::attention(&Attention::new(), inputs, outputs).expect_err(words).to_string();
        assert!(error.starts_with(words) && out == [42.0; 6 * 4 * 3 * 5], "{error}");
    }
}

/// Keys before the last ones, and columns for keys that a short sequence does not have, are not looked at.
#[test]
fn columns_without_keys_are_not_used() {
    let case = Case::plain(&mut Rng::new(7), [2, 2, 1, 3, 40, 8, 8]);
    let lens = Some(vec![40, 4]);
    let columns =
        |x: f32| crate::support::Tensor::from_fn([2, 1, 1, 9], |[b, _, _, j]| if b == 1 && j < 5 { x } else { 1.5 });
    let with = |x| Case { bias: Some(columns(x).into()), suffix: true, kv_lens: lens.clone(), ..case.clone() };
    for (isa, exec) in execs() {
        let [got, expected] = [f32::NAN, 0.0].map(|x| with(x).run(exec, Wanted::LEAST));
        assert_same_bits(&format!("{isa}"), &got.out, &expected.out);
    }
}
