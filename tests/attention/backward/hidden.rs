//! Hidden memory changes no bit of a gradient, and gets zeros.

use super::support::Back;
use crate::options::Case;
use crate::options::mods::{Functions, Score};
use crate::support::{Rng, Tensor, execs};

/// Keys and values that no row sees are NaN: nothing changes, and their gradients are 0.
#[test]
fn hidden_keys_do_not_matter() {
    let mut found = 0;
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let back = Back::random(&mut rng, 300_000);
        let rows = back.case.every_row();
        if rows.is_empty() {
            continue;
        }
        let oracle = back.case.oracle::<f64>();
        let unseen = back.case.unseen(|row, j| back.case.hides(&oracle, row, j), &rows);
        found += unseen.len();
        let mut poisoned = back.clone();
        for &[b, g, j] in &unseen {
            let (kb, key) = back.case.key_at(b, j);
            for x in [&mut poisoned.case.k, &mut poisoned.case.v] {
                (0..x.shape[3]).for_each(|d| x.set([kb, g, key, d], f32::NAN));
            }
        }
        for (isa, exec) in execs() {
            let (clean, dirty) = (back.run(exec), poisoned.run(exec));
            clean.same(&format!("seed {seed}, {isa}"), &dirty);
            for &[b, g, j] in &unseen {
                let (kb, key) = back.case.key_at(b, j);
                for x in [&clean.k, &clean.v] {
                    let zeros = (0..x.shape[3]).all(|d| x.get([kb, g, key, d]).to_bits() == 0);
                    assert!(zeros, "seed {seed}, {isa}: key {j} of {b} is hidden");
                }
            }
        }
    }
    assert!(found > 1000, "{found} hidden keys");
}

/// A query, or a gradient of its output, that is NaN changes no gradient of a key that the query does not see.
#[test]
fn rows_do_not_matter_to_keys_they_do_not_see() {
    let mut rng = Rng::new(5);
    let sizes = [1, 2, 1, 130, 300, 24, 40];
    let case = Case { causal: true, alignment: Some(sdpa::Alignment::TopLeft), ..Case::plain(&mut rng, sizes) };
    let back = Back::of(&mut rng, case);
    // Row 60 sees keys 0 to 60.
    for poison in [f32::NAN, f32::INFINITY] {
        let mut q = back.clone();
        q.case.q.fill_row(60, poison);
        let mut d_out = back.clone();
        d_out.d_out.fill_row(60, poison);
        for (isa, exec) in execs() {
            let clean = back.run(exec);
            for (what, dirty) in [("q", q.run(exec)), ("d_out", d_out.run(exec))] {
                for (x, y) in [(&clean.k, &dirty.k), (&clean.v, &dirty.v)] {
                    for key in 61..300 {
                        let same =
                            (0..x.shape[3]).all(|d| x.get([0, 0, key, d]).to_bits() == y.get([0, 0, key, d]).to_bits());
                        assert!(same, "{isa}: {what} of row 60 shows in key {key}");
                    }
                }
                for i in (0..130).filter(|&i| i != 60) {
                    let same =
                        (0..24).all(|d| clean.q.get([0, 1, i, d]).to_bits() == dirty.q.get([0, 1, i, d]).to_bits());
                    assert!(same, "{isa}: {what} of row 60 shows in row {i}");
                }
            }
        }
    }
}

/// However NaN came about, gradients have the quiet one, and zeros are positive.
#[test]
fn nan_has_no_sign() {
    let mut rng = Rng::new(11);
    let sizes = [1, 2, 1, 40, 300, 16, 16];
    for columns in [1, 300] {
        let case = Case {
            bias: Some(Tensor::filled([1, 2, 40, columns], 0.5).into()),
            alibi: Some(vec![0.1, 0.2]),
            alignment: Some(sdpa::Alignment::TopLeft),
            sinks: Some(vec![f32::INFINITY, 0.0]),
            functions: Functions { score: Some(Score::Bent), ..Functions::default() },
            ..Case::plain(&mut rng, sizes)
        };
        let mut back = Back::of(&mut rng, case);
        back.case.q.fill_row(7, -f32::NAN);
        for (isa, exec) in execs() {
            for (name, x) in back.run(exec).named() {
                let found = x.data.iter().filter(|x| x.is_nan()).count();
                assert!(found > 0, "{isa}: {name} has no NaN");
                let odd = |x: &&f32| x.is_nan() && x.to_bits() != 0x7fc0_0000 || x.to_bits() == 0x8000_0000;
                assert_eq!(x.data.iter().find(odd).map(|x| x.to_bits()), None, "{isa}: {name}, {columns} columns");
            }
        }
    }
}

#[test]
fn rows_that_see_nothing_get_zeros() {
    let mut rng = Rng::new(6);
    let sizes = [1, 2, 2, 40, 20, 16, 16];
    let case = Case { causal: true, alignment: Some(sdpa::Alignment::BottomRight), ..Case::plain(&mut rng, sizes) };
    let mut back = Back { d_lse: None, ..Back::of(&mut rng, case) };
    for (isa, exec) in execs() {
        let clean = back.run(exec);
        for i in 0..20 {
            assert!((0..16).all(|d| clean.q.get([0, 1, i, d]).to_bits() == 0), "{isa}: row {i} sees nothing");
        }
    }
    let before: Vec<_> = execs().map(|(_, exec)| back.run(exec)).collect();
    (0..20).for_each(|i| back.d_out.fill_row(i, f32::NAN));
    for ((isa, exec), before) in execs().zip(before) {
        before.same(&isa.to_string(), &back.run(exec));
    }
}
