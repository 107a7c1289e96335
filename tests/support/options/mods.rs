//! The closures of random cases, as values: functions of score, position and weight that can be moved with a case when
//! it is cut into parts.

use sdpa::{BlockClass, BlockPosition, MaskMod, Position, ScoreMod, WeightMod};

/// Where a part lies in the case it was cut from, so that functions of positions stay the same functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub first_row: usize,
    pub batches: [usize; 8],
}

impl Place {
    pub const WHOLE: Self = Self { first_row: 0, batches: [0, 1, 2, 3, 4, 5, 6, 7] };

    fn at(&self, p: Position) -> Position {
        Position { batch: self.batches[p.batch], row: self.first_row + p.row, ..p }
    }
}

/// A number that any change of position changes.
fn mix(p: Position) -> usize {
    31 * p.row + 17 * p.key + 7 * p.head + 5 * p.batch
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Score {
    Same,
    /// Something for every step between row and key.
    Relative(f32),
    /// Hides one position in n; the rest are damped.
    Holes(usize),
    /// Hides all keys after this many from the row on.
    Causal(isize),
    /// Twice the score where it is small, and less than 8 where it is large.
    Bent,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Keep {
    All,
    /// Bands along the diagonal, different for every head and sequence.
    Bands(usize),
    /// Keys up to n after the row.
    Causal(isize),
    /// One position in n is hidden.
    Holes(usize),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Prob {
    Same,
    /// Some keys count more than others.
    Tilted,
    /// One position in n counts nothing: dropout with a known pattern.
    Dropped(usize),
}

/// Number of parameters of a score function.
pub const PARAMETERS: usize = 5;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreFn(pub Score, pub Place);

/// The flag: whether to say what is known of whole blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskFn(pub Keep, pub Place, pub bool);

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbFn(pub Prob, pub Place);

impl ScoreMod for ScoreFn {
    fn score(&self, score: f32, p: Position) -> f32 {
        let p = self.1.at(p);
        match self.0 {
            Score::Same => score,
            Score::Relative(step) => score + step * (p.row as f32 - p.key as f32),
            Score::Holes(n) if mix(p).is_multiple_of(n) => f32::NEG_INFINITY,
            Score::Holes(_) => 0.75 * score,
            Score::Causal(offset) if p.key as isize > p.row as isize + offset => f32::NEG_INFINITY,
            Score::Causal(_) => score,
            Score::Bent => 2.0 * score / (1.0 + score * score / 16.0).sqrt(),
        }
    }

    /// Nothing good where the key is hidden.
    fn derivative(&self, score: f32, p: Position) -> Option<f32> {
        let p = self.1.at(p);
        Some(match self.0 {
            Score::Same | Score::Relative(_) => 1.0,
            Score::Holes(n) if mix(p).is_multiple_of(n) => f32::NAN,
            Score::Holes(_) => 0.75,
            Score::Causal(offset) if p.key as isize > p.row as isize + offset => f32::INFINITY,
            Score::Causal(_) => 1.0,
            Score::Bent => {
                let root = (1.0 + score * score / 16.0).sqrt();
                2.0 / (root * root * root)
            }
        })
    }

    fn parameters(&self) -> usize {
        PARAMETERS
    }

    /// A factor, and entries of a table, whatever the function. None that there is where the key is hidden.
    fn parameter_derivatives(&self, score: f32, p: Position, add: &mut dyn FnMut(usize, f32)) {
        if self.score(score, p) == f32::NEG_INFINITY {
            return add(PARAMETERS, f32::NAN);
        }
        add(0, score);
        add(1 + mix(self.1.at(p)) % (PARAMETERS - 1), 0.5);
    }
}

impl MaskMod for MaskFn {
    fn keep(&self, p: Position) -> bool {
        let p = self.1.at(p);
        match self.0 {
            Keep::All => true,
            Keep::Bands(n) => !((p.row + 2 * p.key) / n + p.head + p.batch).is_multiple_of(3),
            Keep::Causal(offset) => p.key as isize <= p.row as isize + offset,
            Keep::Holes(n) => !mix(p).is_multiple_of(n),
        }
    }

    /// By asking for every pair: right by definition.
    fn class(&self, block: BlockPosition) -> BlockClass {
        if !self.2 {
            return BlockClass::Mixed;
        }
        block.pairs().map(|p| self.keep(p)).collect()
    }
}

impl WeightMod for ProbFn {
    fn weight(&self, weight: f32, p: Position) -> f32 {
        let p = self.1.at(p);
        match self.0 {
            Prob::Same => weight,
            Prob::Tilted => weight * (0.5 + 0.25 * (p.key % 4) as f32),
            Prob::Dropped(n) if mix(p).is_multiple_of(n) => 0.0,
            Prob::Dropped(_) => weight,
        }
    }
}

/// The functions of a case; `None` where there is none at all.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Functions {
    pub score: Option<Score>,
    pub mask: Option<(Keep, bool)>,
    pub prob: Option<Prob>,
}

impl Functions {
    /// Those that have a backward pass.
    pub fn with_derivatives(self) -> Self {
        Self { prob: None, ..self }
    }
}

/// Evaluates `$body` with `$mods` bound to the functions of `$case`. Each combination is compiled for every instruction
/// set, so those of a weight function and another go by way of all three.
macro_rules! with_mods {
    ($case:expr, |$mods:ident| $body:expr) => {{
        use $crate::options::mods::{Keep, MaskFn, Prob, ProbFn, Score, ScoreFn};
        let (functions, place) = ($case.functions, $case.place);
        let none = sdpa::Mods::new();
        match (functions.score, functions.mask, functions.prob) {
            (None, None, None) => {
                let $mods = none;
                $body
            }
            (Some(score), None, None) => {
                let $mods = none.score(ScoreFn(score, place));
                $body
            }
            (None, Some((keep, hint)), None) => {
                let $mods = none.mask(MaskFn(keep, place, hint));
                $body
            }
            (None, None, Some(prob)) => {
                let $mods = none.weight(ProbFn(prob, place));
                $body
            }
            (Some(score), Some((keep, hint)), None) => {
                let $mods = none.score(ScoreFn(score, place)).mask(MaskFn(keep, place, hint));
                $body
            }
            (score, mask, prob) => {
                let (keep, hint) = mask.unwrap_or((Keep::All, true));
                let $mods = none
                    .score(ScoreFn(score.unwrap_or(Score::Same), place))
                    .mask(MaskFn(keep, place, hint))
                    .weight(ProbFn(prob.unwrap_or(Prob::Same), place));
                $body
            }
        }
    }};
}
pub(crate) use with_mods;
