//! Random numbers: the same for ever, from a seed, or as bytes say them.

use super::golden;

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Rng {
    state: u64,
    /// Numbers that come first, the next one last.
    said: Vec<u8>,
    /// Whether [`Self::or_zero`] gives 0 at times.
    zeros: bool,
}

impl Rng {
    /// The numbers of one call: those of another have nothing to do with them.
    pub(crate) fn of_call(seed: u64, call: u64) -> Self {
        let mut rng = Self { state: seed, said: Vec::new(), zeros: false };
        let start = rng.bits();
        Self { state: start ^ call.wrapping_mul(0xd134_2543_de82_ef95), ..rng }
    }

    /// Numbers that bytes say, one each, as long as there are some: a fuzzer guided by coverage changes them one by one.
    #[allow(dead_code, reason = "for `fuzz/targets`")]
    pub(crate) fn said(bytes: &[u8]) -> Self {
        Self { state: 0, said: bytes.iter().rev().copied().collect(), zeros: true }
    }

    /// The same numbers for a case that is checked; its sizes may all be 0.
    pub(crate) fn with_zeros(self) -> Self {
        Self { zeros: true, ..self }
    }

    pub(crate) fn bits(&mut self) -> u64 {
        if let Some(byte) = self.said.pop() {
            return u64::from(byte);
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// One of `0..n`; 0 if there is none.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// True once in `n` times.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// A size, or 0 once in many times; never in calls with recorded bits, which stay what they are.
    pub(crate) fn or_zero(&mut self, size: usize) -> usize {
        if self.zeros && self.one_in(30) { 0 } else { size }
    }

    /// One of `1..=most`, or 0 once in many times, as [`Self::or_zero`] gives it.
    pub(crate) fn up_to(&mut self, most: usize) -> usize {
        let size = 1 + self.below(most);
        self.or_zero(size)
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Unit normal, nearly, by integer arithmetic.
    pub(crate) fn normal(&mut self) -> f32 {
        golden::normal(|| self.bits())
    }

    /// `0..n` in any order.
    pub(crate) fn shuffled(&mut self, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        (1..n).for_each(|i| all.swap(i, self.below(i + 1)));
        all
    }

    /// Cuts `0..n` at random places: runs of one, of whole panels and blocks, of anything.
    pub(crate) fn cuts(&mut self, n: usize) -> Vec<core::ops::Range<usize>> {
        let (mut at, mut parts) = (0, Vec::new());
        let most = self.pick(&[3, n, n]).max(1);
        while at < n {
            let step = match self.below(4) {
                0 => self.pick(&[1, 15, 16, 17, 255, 256, 257]),
                _ => 1 + self.below(most),
            };
            // A handful of parts: every one is a call.
            let end = if parts.len() == 12 { n } else { n.min(at + step) };
            parts.push(at..end);
            at = end;
        }
        parts
    }
}
