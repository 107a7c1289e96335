//! One option at a time. Each tells rows of one sequence from those of another that see the same keys; and windows.

use super::{Family, check_forks_and_pages, every};
use crate::options::Case;
use crate::options::mods::Functions;
use sdpa::{Alignment, Window};

#[test]
fn with_each_option_alone() {
    let mut seen = [0; 5];
    every(300..340, false, |what, rng, family, exec| {
        let Case { bias, mask, alibi, functions, .. } = family.case.clone();
        let given = [
            bias.is_some(),
            mask.is_some(),
            alibi.is_some(),
            functions.score.is_some(),
            functions.mask.is_some() && functions.prob.is_none(),
        ];
        for option in (0..5).filter(|&option| given[option]) {
            let case = Case {
                bias: bias.clone().filter(|_| option == 0),
                mask: mask.clone().filter(|_| option == 1),
                alibi: alibi.clone().filter(|_| option == 2),
                functions: Functions {
                    score: functions.score.filter(|_| option == 3),
                    mask: functions.mask.filter(|_| option == 4),
                    prob: None,
                },
                ..family.case.clone()
            };
            let family = Family { case, origins: family.origins.clone() };
            check_forks_and_pages(&format!("{what}, option {option}"), rng, &family, exec);
            seen[option] += 1;
        }
    });
    assert!(seen.iter().all(|&seen| seen > 0), "{seen:?}");
}

/// Workers that have no rows take key blocks of a window; the first blocks are hidden.
#[test]
fn under_a_window() {
    every(400..412, true, |what, rng, family, exec| {
        for left in [10, 300, 700] {
            let window = Some(Window::inclusive(Some(left), None));
            let case = Case { window, causal: true, alignment: Some(Alignment::BottomRight), ..family.case.clone() };
            let family = Family { case, origins: family.origins.clone() };
            check_forks_and_pages(&format!("{what}, {left} keys to the left"), rng, &family, exec);
        }
    });
}
