//! Choice of the keys of one row: the largest scores, and forced keys.
//!
//! A sample of the scores gives a number that a few more than the wanted keys reach. One pass of vector comparisons finds these
//! candidates; digit by digit (radix select) the order of the last chosen one is found among them. If the sample misled, or most
//! keys are wanted, the digits are those of all scores: the result is the same.

use crate::attention::call::selection::top_k::TopK;
use crate::simd::exp::exp;
use crate::simd::{LANES, Simd, lanes};
use core::ops::Range;

/// Number of sampled scores.
const SAMPLE: usize = 512;
/// Number of scores that are compared together.
const TOGETHER: usize = 64;
/// Number of candidates among these that are stored without a branch: more are rare.
const AT_ONCE: usize = 6;
/// Bits of a digit: its counts stay in the first-level cache.
const DIGIT: u32 = 11;

/// Memory of a worker that chooses keys.
#[derive(Debug, Default)]
pub struct Chooser {
    /// Candidates, and their orders.
    numbers: Vec<u32>,
    orders: Vec<u32>,
    /// Counts of the values of a digit.
    counts: Vec<u32>,
    /// Chosen keys with their orders, if a share is asked for.
    sorted: Vec<u64>,
    /// Scores of a list of several rows, or of a row that is not contiguous.
    pub(crate) scores: Vec<f32>,
}

impl Chooser {
    /// Reserves memory for lists of at most `k` keys and `copied` copied scores. Returns false if there is none.
    #[must_use]
    pub fn try_reserve(&mut self, k: usize, copied: usize) -> bool {
        fn grow<T: Clone + Default>(memory: &mut Vec<T>, len: usize) -> bool {
            let more = len.saturating_sub(memory.len());
            let there = memory.try_reserve_exact(more).is_ok();
            if there && more > 0 {
                memory.resize(len, T::default());
            }
            there
        }
        let candidates = k.saturating_mul(4).saturating_add(8 * TOGETHER);
        let floats = grow(&mut self.numbers, candidates) && grow(&mut self.orders, candidates);
        floats && grow(&mut self.sorted, k) && grow(&mut self.scores, copied) && grow(&mut self.counts, 1 << DIGIT)
    }

    /// Number of bytes held.
    pub fn bytes(&self) -> usize {
        let Self { numbers, orders, counts, sorted, scores } = self;
        let words = numbers.capacity() + orders.capacity() + counts.capacity() + scores.capacity();
        words * size_of::<u32>() + sorted.capacity() * size_of::<u64>()
    }
}

/// Distance from the order of bits of −∞ to that of +∞; bits of NaN are beyond.
const INFINITIES: u32 = 0xff00_0001;
/// Order of the bits of −∞.
const HIDDEN: u32 = 0x007f_ffff;

/// Returns the order of a score: 0 if it is hidden, 1 for NaN, then as the numbers. Zeros are equal. By integers, without a branch.
#[inline(always)]
fn order(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    let above = (bits ^ ((bits as i32 >> 31) as u32 | 1 << 31)).wrapping_sub(HIDDEN);
    if above > INFINITIES { 1 } else { above + u32::from(above != 0) }
}

/// Keeps the larger of two scores, by their [orders](order).
#[inline(always)]
pub(crate) fn keep_larger(kept: &mut f32, score: f32) {
    if order(score) > order(*kept) {
        *kept = score;
    }
}

/// Returns the number of an [order] above 1.
fn number(order: u32) -> f32 {
    let order = order - 1 + HIDDEN;
    f32::from_bits(if order >> 31 == 1 { order ^ 1 << 31 } else { !order })
}

/// Least order that is chosen, and the number of keys of that order.
struct Cut {
    least: u32,
    ties: usize,
}

impl Cut {
    /// Every key that is seen.
    const SEEN: Self = Self { least: 1, ties: usize::MAX };

    #[inline(always)]
    fn takes(&mut self, order: u32) -> bool {
        let tie = (order == self.least) & (self.ties > 0);
        self.ties -= usize::from(tie);
        tie | (order > self.least)
    }
}

/// Numbers of chosen keys, as far as there is room.
struct List<'a> {
    numbers: &'a mut [u32],
    len: usize,
}

impl List<'_> {
    /// Adds a number if it is chosen, without a branch that depends on it.
    #[inline(always)]
    fn push_if(&mut self, chosen: bool, number: usize) {
        if let Some(to) = self.numbers.get_mut(self.len) {
            *to = number as u32;
            self.len += usize::from(chosen);
        }
    }

    #[inline(always)]
    fn push_seen(&mut self, scores: &[f32], keys: Range<usize>) {
        keys.for_each(|key| self.push_if(scores[key] != f32::NEG_INFINITY, key));
    }
}

/// Writes the numbers of the chosen keys, ascending, and returns how many they are, at most `chosen.len()`, which is at most `k`.
/// The memory is [reserved](Chooser::try_reserve) for them.
pub(crate) fn choose<S: Simd>(s: S, scores: &[f32], top_k: &TopK, memory: &mut Chooser, chosen: &mut [u32]) -> usize {
    s.vectorize(
        #[inline(always)]
        move || choose_compiled(s, scores, top_k, memory, chosen),
    )
}

/// Chooses keys as [`choose`] does, compiled for an instruction set.
#[inline(always)]
fn choose_compiled<S: Simd>(s: S, scores: &[f32], top_k: &TopK, memory: &mut Chooser, chosen: &mut [u32]) -> usize {
    let seen = |keys: Range<usize>| scores[keys].iter().filter(|&&x| x != f32::NEG_INFINITY).count();
    let end = scores.iter().rposition(|&x| x != f32::NEG_INFINITY).map_or(0, |last| last + 1);
    let first = top_k.first.min(end);
    let last = end.saturating_sub(top_k.last).max(first);
    let wanted = chosen.len().saturating_sub(seen(0..first) + seen(last..end));
    let mut list = List { numbers: chosen, len: 0 };
    list.push_seen(scores, 0..first);
    push_largest(s, &scores[first..last], wanted, memory, |chosen, key| list.push_if(chosen, first + key));
    list.push_seen(scores, last..end);
    match top_k.share {
        Some(share) => keep_share(s, &scores[..end], first..last, share, (&mut memory.sorted, list)),
        None => list.len,
    }
}

/// Calls `push(chosen, key)` with keys in order: the `wanted` keys of the largest scores are chosen, or all that are seen if these
/// are fewer.
#[inline(always)]
fn push_largest<S: Simd>(s: S, scores: &[f32], wanted: usize, memory: &mut Chooser, mut push: impl FnMut(bool, usize)) {
    let Chooser { numbers, orders, counts, .. } = memory;
    if wanted == 0 {
        return;
    }
    if let Some(found) = sampled(scores, wanted).and_then(|least| candidates(s, scores, least, numbers))
        && found >= wanted
    {
        let (numbers, orders) = (&numbers[..found], &mut orders[..found]);
        for (order_of, &number) in orders.iter_mut().zip(numbers) {
            *order_of = order(scores[number as usize]);
        }
        let mut cut = cut(|| orders.iter().copied(), wanted, counts);
        for (&number, &order) in numbers.iter().zip(&*orders) {
            push(cut.takes(order), number as usize);
        }
        return;
    }
    let mut cut = cut(|| scores.iter().map(|&x| order(x)), wanted, counts);
    for (key, &score) in scores.iter().enumerate() {
        push(cut.takes(order(score)), key);
    }
}

/// Returns a number that, by a sample, a few more than the `wanted` largest scores reach, if these are few of many.
#[inline(always)]
fn sampled(scores: &[f32], wanted: usize) -> Option<f32> {
    let step = scores.len() / SAMPLE;
    if step < 8 || wanted > scores.len() / 4 {
        return None;
    }
    // Steps of varied length, so that a period in the scores does not mislead.
    let place = |i: usize| i * step + (i.wrapping_mul(0x9e37_79b1) >> 7) % step;
    let mut sample: [u32; SAMPLE] = core::array::from_fn(|i| order(scores[place(i)]));
    let expected = wanted as f64 * SAMPLE as f64 / scores.len() as f64;
    let rank = (expected + 3.0 * expected.sqrt()) as usize + 3;
    let (_, &mut least, _) = sample.select_nth_unstable(SAMPLE - 1 - rank);
    (least > 1).then(|| number(least))
}

/// Finds the keys whose scores reach a number, in order, and returns how many they are; `None` if there is no room for them.
#[inline(always)]
fn candidates<S: Simd>(s: S, scores: &[f32], least: f32, numbers: &mut [u32]) -> Option<usize> {
    let (chunks, rest) = scores.as_chunks::<TOGETHER>();
    let (mut len, mut key) = (0, 0);
    for chunk in chunks {
        let to: &mut [u32; TOGETHER] = numbers.get_mut(len..len + TOGETHER)?.try_into().ok()?;
        let (mut bits, (panels, _)) = (0, chunk.as_chunks::<LANES>());
        for n in 0..TOGETHER / LANES {
            bits |= u64::from(s.reaches(lanes::load(s, &panels[n]), s.splat(least))) << (n * LANES);
        }
        len += bits.count_ones() as usize;
        let mut next = |to: &mut u32| {
            *to = key + bits.trailing_zeros();
            bits &= bits.wrapping_sub(1);
            bits != 0
        };
        let mut more = false;
        for n in 0..AT_ONCE {
            more = next(&mut to[n]);
        }
        for n in AT_ONCE..TOGETHER {
            if !more {
                break;
            }
            more = next(&mut to[n]);
        }
        key += TOGETHER as u32;
    }
    for &score in rest {
        if score >= least {
            *numbers.get_mut(len)? = key;
            len += 1;
        }
        key += 1;
    }
    Some(len)
}

/// Returns where to cut so that the `wanted` largest orders are chosen, at least 1, or all that are seen if they are fewer.
#[inline(always)]
fn cut<I: Iterator<Item = u32>>(orders: impl Fn() -> I, wanted: usize, counts: &mut [u32]) -> Cut {
    let [least, most] = orders().fold([u32::MAX, 0], |[least, most], order| [least.min(order), most.max(order)]);
    let (mut low, mut bits, mut left) = (least, u32::BITS - most.saturating_sub(least).leading_zeros(), wanted);
    // The order of the last chosen key is one of the 2^bits from `low` on.
    loop {
        let shift = bits.saturating_sub(DIGIT);
        counts.fill(0);
        for above in orders().map(|order| order.wrapping_sub(low)) {
            if u64::from(above) >> bits == 0 {
                counts[(above >> shift) as usize] += 1;
            }
        }
        let mut larger = 0;
        let digit = (0..counts.len()).rev().find(|&digit| {
            larger += counts[digit] as usize;
            larger >= left
        });
        let Some(digit) = digit else { return Cut::SEEN };
        left -= larger - counts[digit] as usize;
        low += (digit as u32) << shift;
        bits = shift;
        if bits == 0 {
            return if low == 0 { Cut::SEEN } else { Cut { least: low, ties: left } };
        }
    }
}

/// Returns exp(score − most) of up to sixteen scores, 0 in the lanes beyond.
#[inline(always)]
fn weights<S: Simd>(s: S, scores: &[f32], most: f32) -> [f32; LANES] {
    let mut weights = [0.0; LANES];
    let scores = lanes::load_part(s, scores, f32::NEG_INFINITY);
    lanes::store(s, &mut weights, exp(s, s.sub(scores, s.splat(most))));
    weights
}

/// Keeps of a list the fewest keys with the largest scores whose weights sum to a share, forced keys first: those outside `free`.
#[inline(always)]
fn keep_share<S: Simd>(
    s: S,
    scores: &[f32],
    free: Range<usize>,
    share: f32,
    (sorted, list): (&mut [u64], List<'_>),
) -> usize {
    let most = scores.iter().fold(f32::NEG_INFINITY, |most, &x| most.max(x));
    let mut total = 0.0;
    for scores in scores.chunks(LANES) {
        total += weights(s, scores, most).into_iter().map(f64::from).sum::<f64>();
    }
    if !total.is_finite() {
        return list.len;
    }
    let List { numbers, len } = list;
    let rank = |number: u32| {
        let key = number as usize;
        let order = if free.contains(&key) { order(scores[key]) } else { u32::MAX };
        u64::from(order) << 32 | u64::from(!number)
    };
    let sorted = &mut sorted[..len];
    for (to, &number) in sorted.iter_mut().zip(&*numbers) {
        *to = rank(number);
    }
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum = 0.0;
    let reached = |rank: &u64| {
        sum += f64::from(weights(s, &[scores[!(*rank as u32) as usize]], most)[0]);
        sum >= f64::from(share) * total
    };
    let Some(last) = sorted.iter().position(reached).map(|place| sorted[place]) else { return len };
    let mut kept = 0;
    for n in 0..len {
        if rank(numbers[n]) >= last {
            numbers[kept] = numbers[n];
            kept += 1;
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_those_of_numbers() {
        let ascending = [f32::NEG_INFINITY, f32::NAN, f32::MIN, -1.0, -1e-45, 0.0, 1e-45, 1.0, f32::MAX, f32::INFINITY];
        assert!(ascending.windows(2).all(|pair| order(pair[0]) < order(pair[1])));
        assert_eq!(order(-0.0), order(0.0));
        assert!(ascending.iter().filter(|x| order(**x) > 1).all(|&x| number(order(x)) == x));
    }

    /// Of any numbers, with any number of bits in common, the cut is where sorting says.
    #[test]
    fn cuts_are_those_of_sorting() {
        let mut x = 1u64;
        let mut bits = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 32) as u32
        };
        let mut counts = vec![0; 1 << DIGIT];
        for n in 0..200 {
            let (len, shift, base) = (bits() as usize % 300 + 1, bits() % 32, (bits() | 1) >> (n % 32));
            let orders: Vec<u32> = (0..len).map(|_| (bits() >> shift).saturating_add(base).max(1)).collect();
            let wanted = bits() as usize % len + 1;
            let Cut { least, ties } = cut(|| orders.iter().copied(), wanted, &mut counts);
            let mut sorted = orders.clone();
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            assert_eq!(least, sorted[wanted - 1], "{n}");
            assert_eq!(ties, wanted - orders.iter().filter(|&&order| order > least).count(), "{n}");
        }
    }
}
