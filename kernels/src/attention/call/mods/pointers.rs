//! Functions behind pointers, chosen at run time.

use crate::attention::call::mods::{
    BlockClass, BlockPosition, CallFacts, MaskError, MaskMod, Position, ScoreMod, WeightMod,
};
use std::sync::Arc;

/// Implements the traits for a pointer to functions known only at run time. One generic implementation for all pointers
/// would overlap with those of closures.
macro_rules! through_pointer {
    ($score:ty, $mask:ty, $weight:ty) => {
        impl ScoreMod for $score {
            fn score(&self, score: f32, at: Position) -> f32 {
                (**self).score(score, at)
            }
            fn derivative(&self, score: f32, at: Position) -> Option<f32> {
                (**self).derivative(score, at)
            }
            fn parameters(&self) -> usize {
                (**self).parameters()
            }
            fn parameter_derivatives(&self, score: f32, at: Position, add: &mut dyn FnMut(usize, f32)) {
                (**self).parameter_derivatives(score, at, add);
            }
            fn is_given(&self) -> bool {
                (**self).is_given()
            }
        }

        impl MaskMod for $mask {
            fn keep(&self, at: Position) -> bool {
                (**self).keep(at)
            }
            fn class(&self, block: BlockPosition) -> BlockClass {
                (**self).class(block)
            }
            fn next_kept(&self, block: BlockPosition) -> Option<usize> {
                (**self).next_kept(block)
            }
            fn fits(&self, call: &CallFacts) -> Result<(), MaskError> {
                (**self).fits(call)
            }
            fn fits_rows(&self, rows: &BlockPosition) -> Result<(), MaskError> {
                (**self).fits_rows(rows)
            }
            fn is_given(&self) -> bool {
                (**self).is_given()
            }
        }

        impl WeightMod for $weight {
            fn weight(&self, weight: f32, at: Position) -> f32 {
                (**self).weight(weight, at)
            }
            fn is_given(&self) -> bool {
                (**self).is_given()
            }
        }
    };
}

through_pointer!(&(dyn ScoreMod + '_), &(dyn MaskMod + '_), &(dyn WeightMod + '_));
through_pointer!(Box<dyn ScoreMod + '_>, Box<dyn MaskMod + '_>, Box<dyn WeightMod + '_>);
through_pointer!(Arc<dyn ScoreMod + '_>, Arc<dyn MaskMod + '_>, Arc<dyn WeightMod + '_>);
