//! The fuzzer finds what it looks for.

use super::array::{Array, Layout};
use super::compare::Results;
use super::draw::draw;
use super::kinds::attention::Whole;
use super::memory::{Flush, Memory};
use super::oracle::Oracle;
use super::outs::Wanted;
use super::place::Placed;
use super::rng::Rng;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Every output of a call, one element of it wrong in turn.
#[test]
fn a_wrong_element_is_found() {
    let (mut found, mut tried) = ([0; 7], 0);
    for number in 0..60 {
        let rng = &mut Rng::of_call(5, number);
        let (case, home) = draw(rng);
        if case.products() == 0 || home.is_integers() {
            continue;
        }
        let whole = Whole { case: &case, home, exec: sdpa::Exec::serial() };
        let (answer, good) = (Oracle::of(&case).answer(), whole.run(rng, "good", &case, Wanted::ALL));
        good.check("good", &answer);
        tried += 1;
        for (output, found) in found.iter_mut().enumerate() {
            let mut bad = good.clone();
            let Results { out, lse, points: [a, b, c, d], mass } = &mut bad;
            let some = [lse, a, b, c, d, mass].map(|x| &mut x.as_mut().expect("all were asked for").bits.data);
            let bits =
                if output == 0 { &mut out.bits.data } else { &mut *some.into_iter().nth(output - 1).expect("six") };
            let at = rng.below(bits.len());
            // A hundredth more, and something if it was nothing.
            bits[at] = (f32::from_bits(bits[at]) * 1.01 + 1e-4).to_bits();
            let is_found = catch_unwind(AssertUnwindSafe(|| bad.check("bad", &answer))).is_err();
            *found += usize::from(is_found);
        }
    }
    println!("of {tried} calls with an element wrong, found by output: {found:?}");
    // Not all: NaN stays NaN, −∞ stays −∞, and some numbers may be anything.
    assert!(tried > 30 && found.iter().all(|&found| 2 * found > tried), "{found:?} of {tried}");
}

#[test]
fn a_write_beside_a_view_is_found() {
    let layout = Layout { shape: [1, 1, 2, 2], strides: [9, 9, 3, 1], offset: 0, len: 5 };
    let mut placed = Placed::<f32>::blank(&mut Rng::of_call(0, 0), layout);
    assert!(placed.is_blank());
    *placed.view_mut().get_mut([0, 0, 1, 0]).expect("it is there") = 1.0;
    assert!(!placed.is_blank());
    assert_eq!(placed.take("good").data[2], 1f32.to_bits());
    assert!(placed.is_blank());
    placed.memory_mut()[2] = 1.0;
    assert!(catch_unwind(AssertUnwindSafe(|| placed.take("bad"))).is_err());
}

#[test]
fn slices_lie_where_they_are_to() {
    for flush in [Flush::Low, Flush::High] {
        let mut memory = Memory::of(&[1.0f32, 2.0, 3.0], flush);
        assert_eq!(memory.slice(), [1.0, 2.0, 3.0]);
        (0..3).for_each(|i| memory.blank(i));
        assert!(memory.is_blank() && memory.slice().iter().all(|x| x.is_nan()));
    }
    let repeated = Array { shape: [2, 1, 3, 1], data: vec![5.0; 6] };
    for number in 0..50 {
        let rng = &mut Rng::of_call(1, number);
        let placed = Placed::<f32>::of(rng, &repeated);
        let view = placed.view();
        assert!(super::array::indices(repeated.shape).all(|at| view.get(at) == Some(&5.0)));
    }
}

/// Which call it was is said even if it ends the program: another one, that runs this test alone.
#[test]
#[cfg(all(unix, not(miri)))]
fn a_touched_page_is_reported() {
    const CHILD: &str = "FUZZ_TOUCHES_A_PAGE";
    if std::env::var_os(CHILD).is_some() {
        super::watch();
        let _running = super::memory::begin(&"some", 123, 456);
        println!("{}", super::memory::touch());
        return;
    }
    let mut again = std::process::Command::new(std::env::current_exe().expect("this program"));
    let again = again.args(["--nocapture", "a_touched_page_is_reported"]).env(CHILD, "1");
    let output = again.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("touched: --kind some --seed 123 --only 456"), "{said}");
}
