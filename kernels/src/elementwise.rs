//! Functions of every element of a slice.

use crate::isa::{Isa, Visitor};
use crate::steps::Steps;

/// Computes `eˣ` of every element in place, as the softmax does: for x ≤ 0.
pub fn exp_in_place(isa: Isa, xs: &mut [f32]) {
    struct Exp<'a>(&'a mut [f32]);
    impl Visitor for Exp<'_> {
        type Output = ();
        fn visit<S: Steps>(self, s: S) {
            s.exp(self.0);
        }
    }
    isa.dispatch(Exp(xs));
}
