//! The caller's functions as the fused pass calls them: through a trait object, for a row of a key block at a time. So
//! each closure compiles five short loops for each instruction set, not the whole pass.

use crate::attention::call::mods::{BlockClass, BlockPosition, MaskMod, Mods, Position, ScoreMod, WeightMod};
use crate::simd::{LANES, Simd};
use crate::tensor::panels::{panel_bits, runs};
use crate::tensor::rows::KEY_BLOCK;
use core::ops::Range;

/// Functions that the caller supplied.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Given {
    pub(crate) score: bool,
    pub(crate) mask: bool,
    pub(crate) weight: bool,
}

/// A bit for each key of a block: 1 if it is visible to the row.
pub(crate) type KeyBits = [u64; KEY_BLOCK / 64];

/// Returns true if key `j` of the block is visible.
#[inline(always)]
pub(crate) fn is_visible(bits: &KeyBits, j: usize) -> bool {
    bits[j / 64] >> (j % 64) & 1 == 1
}

/// Classes that a mask function gives the panels of a block for one row: a bit for each panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PanelClasses {
    /// Panels with hidden keys only.
    pub(crate) hidden: u16,
    /// Panels in which some keys may be hidden. A panel with neither bit is all visible.
    pub(crate) mixed: u16,
    /// True if the function hides a whole panel of the row, so that it may hide a quarter of a mixed one too.
    pub(crate) hides: bool,
}

/// Number of keys of a mixed panel that a mask function is asked about at a time.
const QUARTER: usize = LANES / 4;

impl PanelClasses {
    pub(crate) const ALL: Self = Self { hidden: 0, mixed: 0, hides: false };
    pub(crate) const NONE: Self = Self { hidden: u16::MAX, mixed: 0, hides: false };
    pub(crate) const MIXED: Self = Self { hidden: 0, mixed: u16::MAX, hides: false };
}

/// Neighbouring keys of a row.
#[derive(Clone, Copy)]
pub(crate) struct RowRun<'a> {
    /// Position of the first key.
    pub(crate) first: Position,
    /// Position of the row that distances are counted from.
    pub(crate) from: isize,
    /// Place of the first key in its block.
    pub(crate) place: usize,
    /// Positions of the keys, and of any that follow, if they have their own; empty if not.
    pub(crate) key_positions: &'a [i32],
    /// Numbers of the keys, if they are those of a list.
    pub(crate) listed: Option<ListedKeys<'a>>,
}

/// Keys of a list that follow one another in it.
#[derive(Clone, Copy)]
pub(crate) struct ListedKeys<'a> {
    /// Their numbers in the sequence, and those of any that follow.
    pub(crate) numbers: &'a [u32],
    /// A bit for each key of the block, 1 if the mask function is asked about it; `None` if it is asked about all.
    pub(crate) asked: Option<&'a KeyBits>,
}

impl RowRun<'_> {
    /// Returns the position of the `j`th key after the first.
    #[inline(always)]
    pub(crate) fn at(&self, j: usize) -> Position {
        let distance = match self.key_positions.get(j) {
            Some(&key) => self.from.saturating_sub(key as isize),
            None => self.first.distance.saturating_sub_unsigned(j),
        };
        let key = self.listed.map_or(self.first.key + j, |listed| listed.numbers[j] as usize);
        Position { key, distance, ..self.first }
    }

    /// Returns true if the mask function is asked about the `j`th key after the first.
    #[inline(always)]
    fn asks(&self, j: usize) -> bool {
        self.listed.and_then(|listed| listed.asked).is_none_or(|asked| is_visible(asked, self.place + j))
    }

    /// Returns the keys from the `j`th on.
    #[inline(always)]
    fn after(self, j: usize) -> Self {
        let key_positions = self.key_positions.get(j..).unwrap_or(&[]);
        let listed = self.listed.map(|listed| ListedKeys { numbers: &listed.numbers[j..], ..listed });
        Self { first: self.at(j), place: self.place + j, key_positions, listed, ..self }
    }
}

/// [`Mods`] without their types. Runs begin with the key of the first of `scores` or `weights`.
pub(crate) trait RowMods<S>: Sync {
    /// Returns which functions there are.
    fn given(&self) -> Given;
    /// Applies the score function to consecutive keys of a row.
    fn apply_score(&self, s: S, run: RowRun<'_>, scores: &mut [f32]);
    /// Multiplies the gradients of consecutive keys of a row by the score function's derivative at the scores before
    /// it. A gradient of 0 stays 0; others become NaN if there is no derivative.
    fn apply_derivative(&self, s: S, run: RowRun<'_>, scores: &[f32], gradients: &mut [f32]);
    /// Adds the gradients in the score function's parameters to the sum of each, as they follow from the gradients of
    /// what the function made of consecutive keys of a row. A gradient of 0 adds nothing.
    fn add_parameters(&self, s: S, run: RowRun<'_>, scores: &[f32], gradients: &[f32], sums: &mut [f64]);
    /// Applies the mask function, which gave these classes, to consecutive keys of a row, at least one, the first of
    /// which starts a panel.
    fn apply_mask(&self, s: S, run: RowRun<'_>, classes: PanelClasses, scores: &mut [f32]);
    /// Applies the weight function to the visible keys among keys `keys` of the block, for one row.
    fn apply_weight(&self, run: RowRun<'_>, weights: &mut [f32], keys: Range<usize>, visible: &KeyBits);
    /// Returns the class that the mask function gives a block.
    fn class(&self, block: BlockPosition) -> BlockClass;
    /// Returns the classes that the mask function gives the panels of `len` keys of one row. Panels without one of the keys may
    /// have any.
    fn classes(&self, run: RowRun<'_>, len: usize) -> PanelClasses;
}

of_every_token! {
    /// [`RowMods`] for the steps of any instruction set.
    AllRowMods: RowMods
}

impl<A: ScoreMod, B: MaskMod, C: WeightMod> AllRowMods for Mods<A, B, C> {}

/// [`Mods`] without their types, as a launch takes them: so the passes are compiled in this crate, whatever functions a
/// caller has.
#[derive(Clone, Copy)]
pub struct AnyMods<'m>(pub(crate) &'m dyn AllRowMods);

impl<'m> AnyMods<'m> {
    /// Takes functions of any types.
    pub fn of<A: ScoreMod, B: MaskMod, C: WeightMod>(mods: &'m Mods<A, B, C>) -> Self {
        Self(mods)
    }
}

impl core::fmt::Debug for AnyMods<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("AnyMods")
    }
}

impl<A, B: MaskMod, C> Mods<A, B, C> {
    /// Calls `see(key)` for each key of a block of one row that the mask function keeps, if it [finds](MaskMod::next_kept)
    /// them, and returns whether it does. `see` returns the first key that is wanted after that.
    #[inline(always)]
    fn find(&self, block: &BlockPosition, mut see: impl FnMut(usize) -> usize) -> bool {
        let next = |from: usize| self.mask.next_kept(BlockPosition { keys: from..block.keys.end, ..block.clone() });
        let (mut from, mut found) = (block.keys.start, next(block.keys.start));
        let finds = found.is_some();
        while let Some(key) = found.map(|key| key.max(from)).filter(|&key| key < block.keys.end) {
            from = see(key);
            found = if from < block.keys.end { next(from) } else { None };
        }
        finds
    }

    /// Finds out which of some consecutive keys of a row the mask function keeps; `classes` are those of their panels.
    #[inline(always)]
    fn answer(&self, run: RowRun<'_>, classes: PanelClasses, keep: &mut [bool]) {
        if run.listed.is_some() {
            return self.ask(run, keep);
        }
        let block = run.first.of_keys(keep.len());
        let finds = self.find(&block, |key| {
            keep[key - block.keys.start] = true;
            key + 1
        });
        if finds {
            return;
        }
        if !classes.hides {
            return self.ask(run, keep);
        }
        for (n, keep) in keep.chunks_mut(QUARTER).enumerate() {
            let run = run.after(n * QUARTER);
            match self.mask.class(run.first.of_keys(keep.len())) {
                BlockClass::None => {}
                BlockClass::All => keep.fill(true),
                BlockClass::Mixed => self.ask(run, keep),
            }
        }
    }

    /// Asks the mask function about consecutive keys of a row.
    #[inline(always)]
    fn ask(&self, run: RowRun<'_>, keep: &mut [bool]) {
        for (j, keep) in keep.iter_mut().enumerate() {
            *keep = !run.asks(j) || self.mask.keep(run.at(j));
        }
    }

    /// Returns the class that the mask function gives `len` keys of a list of one row, by that of all keys between the first and the
    /// last, if these are of one key block.
    fn class_of_listed(&self, run: RowRun<'_>, len: usize) -> BlockClass {
        let (asked, [first, last]) = ((0..len).filter(|&j| run.asks(j)).count(), [0, len - 1].map(|j| run.at(j).key));
        match asked > 0 {
            false => BlockClass::All,
            true if first / KEY_BLOCK < last / KEY_BLOCK => BlockClass::Mixed,
            true => match self.mask.class(run.first.of_keys(last + 1 - first)) {
                BlockClass::None if asked < len => BlockClass::Mixed,
                class => class,
            },
        }
    }

    /// Returns the classes of the panels of `len` keys of a list of one row.
    fn classes_of_listed(&self, run: RowRun<'_>, len: usize) -> PanelClasses {
        let (mut classes, mut from) = (PanelClasses::NONE, 0);
        while from < len {
            let to = len.min((run.place + from) / LANES * LANES + LANES - run.place);
            let panel = 1 << ((run.place + from) / LANES);
            match self.class_of_listed(run.after(from), to - from) {
                BlockClass::None => {}
                BlockClass::All => classes.hidden &= !panel,
                BlockClass::Mixed => (classes.hidden, classes.mixed) = (classes.hidden & !panel, classes.mixed | panel),
            }
            from = to;
        }
        classes
    }
}

impl Position {
    /// Returns the block of this row and `keys` keys from this one on.
    #[inline(always)]
    fn of_keys(self, keys: usize) -> BlockPosition {
        let Self { batch, head, row, key, position, .. } = self;
        BlockPosition { batch, head, rows: row..row + 1, keys: key..key + keys, position }
    }
}

impl<S: Simd, A: ScoreMod, B: MaskMod, C: WeightMod> RowMods<S> for Mods<A, B, C> {
    fn given(&self) -> Given {
        Given { score: self.score.is_given(), mask: self.mask.is_given(), weight: self.weight.is_given() }
    }

    fn apply_score(&self, s: S, run: RowRun<'_>, scores: &mut [f32]) {
        s.vectorize(
            #[inline(always)]
            || {
                for (j, score) in scores.iter_mut().enumerate() {
                    let new = self.score.score(*score, run.at(j));
                    // A key that a bias has hidden stays hidden.
                    *score = if *score == f32::NEG_INFINITY { *score } else { new };
                }
            },
        );
    }

    fn apply_derivative(&self, s: S, run: RowRun<'_>, scores: &[f32], gradients: &mut [f32]) {
        s.vectorize(
            #[inline(always)]
            || {
                for (j, (&score, gradient)) in scores.iter().zip(gradients).enumerate() {
                    let derivative = self.score.derivative(score, run.at(j)).unwrap_or(f32::NAN);
                    // The derivative of a hidden score may be anything.
                    *gradient = if *gradient == 0.0 { 0.0 } else { *gradient * derivative };
                }
            },
        );
    }

    fn add_parameters(&self, s: S, run: RowRun<'_>, scores: &[f32], gradients: &[f32], sums: &mut [f64]) {
        s.vectorize(
            #[inline(always)]
            || {
                for (j, (&score, &gradient)) in scores.iter().zip(gradients).enumerate() {
                    // The derivatives of a hidden score may be anything.
                    if gradient == 0.0 {
                        continue;
                    }
                    let add = &mut |parameter: usize, derivative: f32| {
                        let n = sums.len();
                        assert!(
                            parameter < n,
                            "score function: parameter {parameter}, but it has {n} (ScoreMod::parameters)"
                        );
                        // The product of two `f32` is exact.
                        sums[parameter] += f64::from(gradient) * f64::from(derivative);
                    };
                    self.score.parameter_derivatives(score, run.at(j), add);
                }
            },
        );
    }

    /// Key by key in panels that are mixed: first all answers, then all scores, since the two loops together are often not
    /// vectorised.
    fn apply_mask(&self, s: S, run: RowRun<'_>, classes: PanelClasses, scores: &mut [f32]) {
        s.vectorize(
            #[inline(always)]
            || {
                let (len, start) = (scores.len(), run.place);
                let inside = panel_bits(start / LANES..(start + len).div_ceil(LANES));
                let keys = |panels: Range<usize>| panels.start * LANES - start..len.min(panels.end * LANES - start);
                for panels in runs(classes.hidden & inside) {
                    scores[keys(panels)].fill(f32::NEG_INFINITY);
                }
                for keys in runs(classes.mixed & inside).map(keys) {
                    let (run, mut keep) = (run.after(keys.start), [false; KEY_BLOCK]);
                    let (keep, scores) = (&mut keep[..keys.len()], &mut scores[keys]);
                    self.answer(run, classes, keep);
                    for (score, &mut keep) in scores.iter_mut().zip(keep) {
                        *score = if keep { *score } else { f32::NEG_INFINITY };
                    }
                }
            },
        );
    }

    fn apply_weight(&self, run: RowRun<'_>, weights: &mut [f32], keys: Range<usize>, visible: &KeyBits) {
        for (i, (weight, j)) in weights.iter_mut().zip(keys).enumerate() {
            if is_visible(visible, j) {
                *weight = self.weight.weight(*weight, run.at(i));
            }
        }
    }

    fn class(&self, block: BlockPosition) -> BlockClass {
        self.mask.class(block)
    }

    fn classes(&self, run: RowRun<'_>, len: usize) -> PanelClasses {
        if run.listed.is_some() {
            return self.classes_of_listed(run, len);
        }
        let block = run.first.of_keys(len);
        match self.mask.class(block.clone()) {
            BlockClass::All => return PanelClasses::ALL,
            BlockClass::None => return PanelClasses::NONE,
            BlockClass::Mixed => {}
        }
        let keys = block.keys.clone();
        // Asked already, if it is one panel.
        if keys.start / LANES == (keys.end - 1) / LANES {
            return PanelClasses::MIXED;
        }
        let (mut classes, mut from) = (PanelClasses { hides: true, ..PanelClasses::NONE }, keys.start);
        let see = |key: usize| {
            let panel = 1 << (key % KEY_BLOCK / LANES);
            (classes.hidden, classes.mixed) = (classes.hidden & !panel, classes.mixed | panel);
            (key / LANES + 1) * LANES
        };
        if self.find(&block, see) {
            return classes;
        }
        classes.hides = false;
        while from < keys.end {
            let to = keys.end.min((from / LANES + 1) * LANES);
            let (class, panel) =
                (self.mask.class(BlockPosition { keys: from..to, ..block.clone() }), from % KEY_BLOCK / LANES);
            // Not by branches, which the core can't foretell.
            classes.hidden &= !(u16::from(class != BlockClass::None) << panel);
            classes.mixed |= u16::from(class == BlockClass::Mixed) << panel;
            classes.hides |= class == BlockClass::None;
            from = to;
        }
        classes
    }
}
