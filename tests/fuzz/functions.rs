//! Functions of scores, positions and weights: good ones, and ones that lie or panic.

use core::sync::atomic::{AtomicIsize, Ordering::Relaxed};
use sdpa::{BlockClass, BlockPosition, MaskMod, Position, ScoreMod, WeightMod};

/// Where a part lies in the case it was cut from, so that functions of positions stay the same functions.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Origin {
    pub(crate) batch: usize,
    pub(crate) row: usize,
}

/// Sequence, head, row and key in the whole case, and where the row stands among the keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pair {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) row: usize,
    pub(crate) key: usize,
    pub(crate) position: isize,
}

impl Pair {
    /// A number that any change of position changes.
    fn mix(self) -> usize {
        31 * self.row + 17 * self.key + 7 * self.head + 5 * self.batch
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Score {
    Same,
    /// Something for every step between the row's position and the key.
    Relative(f32),
    /// Hides one position in n; the rest are damped.
    Holes(usize),
}

impl Score {
    /// The new score is `factor·score + shift`; hidden if there is none.
    // Not inlined, nor are the two below: where they are, the compiler tests what another variant holds before it tests which one
    // this is, and memcheck complains.
    #[inline(never)]
    pub(crate) fn line(self, p: Pair) -> Option<(f32, f32)> {
        match self {
            Self::Same => Some((1.0, 0.0)),
            Self::Relative(step) => Some((1.0, step * (p.position as f32 - p.key as f32))),
            Self::Holes(n) => (!p.mix().is_multiple_of(n)).then_some((0.75, 0.0)),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Keep {
    All,
    /// Bands along the diagonal, different for every head and sequence.
    Bands(usize),
    /// Keys up to n after the row.
    Diagonal(isize),
    /// One position in n is hidden.
    Holes(usize),
}

impl Keep {
    #[inline(never)]
    pub(crate) fn keeps(self, p: Pair) -> bool {
        match self {
            Self::All => true,
            Self::Bands(n) => !((p.row + 2 * p.key) / n + p.head + p.batch).is_multiple_of(3),
            Self::Diagonal(offset) => p.key as isize <= p.row as isize + offset,
            Self::Holes(n) => !p.mix().is_multiple_of(n),
        }
    }
}

/// What a mask function says of whole blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hint {
    Nothing,
    Truth,
    /// The truth, and each key that a row sees.
    Keys,
    /// Anything, by this seed.
    Lies(usize),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Prob {
    Same,
    /// Some keys count more than others, some nothing.
    Tilted(usize),
}

impl Prob {
    /// What a weight is multiplied by.
    #[inline(never)]
    pub(crate) fn factor(self, p: Pair) -> f32 {
        match self {
            Self::Same => 1.0,
            Self::Tilted(n) if p.mix().is_multiple_of(n) => 0.0,
            Self::Tilted(_) => 0.5 + 0.25 * (p.key % 4) as f32,
        }
    }
}

/// The functions of a case; `None` where there is none at all.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Functions {
    pub(crate) score: Option<Score>,
    pub(crate) mask: Option<(Keep, Hint)>,
    pub(crate) prob: Option<Prob>,
    pub(crate) origin: Origin,
}

/// What a function that panics throws.
#[derive(Debug)]
pub(crate) struct Thrown;

/// Which function is to panic, and after how many calls.
#[derive(Debug)]
pub(crate) struct Fuse {
    part: Part,
    left: AtomicIsize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Score,
    Derivative,
    Keep,
    Class,
    Prob,
}

impl Fuse {
    pub(crate) fn new(part: Part, after: usize) -> Self {
        Self { part, left: AtomicIsize::new(after as isize) }
    }

    fn burn(fuse: Option<&Self>, part: Part) {
        if let Some(fuse) = fuse
            && fuse.part == part
            && fuse.left.fetch_sub(1, Relaxed) <= 0
        {
            // A panic like any other, but that nothing is printed.
            std::panic::resume_unwind(Box::new(Thrown));
        }
    }
}

/// A function with what it takes to call it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound<'a, F> {
    pub(crate) function: F,
    pub(crate) origin: Origin,
    pub(crate) fuse: Option<&'a Fuse>,
}

impl<F> Bound<'_, F> {
    fn at(&self, p: Position) -> Pair {
        let Origin { batch, row } = self.origin;
        Pair { batch: batch + p.batch, head: p.head, row: row + p.row, key: p.key, position: p.position }
    }
}

/// Number of parameters of a score function.
pub(crate) const PARAMETERS: usize = 4;

impl ScoreMod for Bound<'_, Score> {
    fn score(&self, score: f32, p: Position) -> f32 {
        Fuse::burn(self.fuse, Part::Score);
        self.function.line(self.at(p)).map_or(f32::NEG_INFINITY, |(factor, shift)| factor * score + shift)
    }

    /// Nothing good where the key is hidden.
    fn derivative(&self, _: f32, p: Position) -> Option<f32> {
        Fuse::burn(self.fuse, Part::Derivative);
        Some(self.function.line(self.at(p)).map_or(f32::NAN, |(factor, _)| factor))
    }

    fn parameters(&self) -> usize {
        PARAMETERS
    }

    /// The factor, and an entry of a table that is added. None that there is where the key is hidden.
    fn parameter_derivatives(&self, score: f32, p: Position, add: &mut dyn FnMut(usize, f32)) {
        Fuse::burn(self.fuse, Part::Derivative);
        let pair = self.at(p);
        match self.function.line(pair) {
            Some(_) => {
                add(0, score);
                add(1 + pair.mix() % (PARAMETERS - 1), 1.0);
            }
            None => add(PARAMETERS, f32::NAN),
        }
    }
}

impl MaskMod for Bound<'_, (Keep, Hint)> {
    fn keep(&self, p: Position) -> bool {
        Fuse::burn(self.fuse, Part::Keep);
        self.function.0.keeps(self.at(p))
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        Fuse::burn(self.fuse, Part::Class);
        match self.function.1 {
            Hint::Nothing => BlockClass::Mixed,
            Hint::Truth | Hint::Keys => block.pairs().map(|p| self.function.0.keeps(self.at(p))).collect(),
            Hint::Lies(seed) => {
                match (seed + block.rows.start + 3 * block.keys.start / 16 + 5 * block.rows.len() + block.head) % 3 {
                    0 => BlockClass::All,
                    1 => BlockClass::None,
                    _ => BlockClass::Mixed,
                }
            }
        }
    }

    fn next_kept(&self, block: BlockPosition) -> Option<usize> {
        Fuse::burn(self.fuse, Part::Class);
        let end = block.keys.end;
        match self.function.1 {
            Hint::Nothing | Hint::Truth => None,
            Hint::Keys => Some(block.pairs().find(|&p| self.function.0.keeps(self.at(p))).map_or(end, |p| p.key)),
            Hint::Lies(seed) => {
                let key = [0, block.keys.start + 2, end, usize::MAX][(seed + block.rows.start + block.keys.start) % 4];
                (!(seed + block.keys.start / 16).is_multiple_of(3)).then_some(key)
            }
        }
    }
}

impl WeightMod for Bound<'_, Prob> {
    fn weight(&self, weight: f32, p: Position) -> f32 {
        Fuse::burn(self.fuse, Part::Prob);
        weight * self.function.factor(self.at(p))
    }
}
