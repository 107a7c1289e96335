//! Choice of the next token.

/// Chooses tokens by their logits. Its choices depend on the seed, on the temperature and on the logits, not on what else runs.
#[derive(Debug, Clone)]
pub struct Sampler {
    /// 0 for the most probable token.
    temperature: f64,
    state: u64,
}

/// A token, and the logarithm of its probability at temperature 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Number of the token.
    pub token: u32,
    /// Logarithm of its probability.
    pub logprob: f32,
}

impl Sampler {
    /// Makes a sampler; the temperature is finite and not negative.
    pub fn new(temperature: f32, seed: u64) -> Self {
        Self { temperature: f64::from(temperature), state: seed }
    }

    /// Chooses the next token.
    pub fn choose(&mut self, logits: &[f32]) -> Choice {
        let token = if self.temperature > 0.0 { self.draw(logits) } else { largest(logits) };
        let max = f64::from(logits[largest(logits)]);
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
        let logprob = f64::from(logits[token]) - max - sum.ln();
        Choice { token: token as u32, logprob: logprob as f32 }
    }

    fn draw(&mut self, logits: &[f32]) -> usize {
        let max = f64::from(logits[largest(logits)]);
        let weight = |x: f32| ((f64::from(x) - max) / self.temperature).exp();
        let sum: f64 = logits.iter().map(|&x| weight(x)).sum();
        let mut left = unit(&mut self.state) * sum;
        let found = logits.iter().position(|&x| {
            left -= weight(x);
            left < 0.0
        });
        found.unwrap_or_else(|| largest(logits))
    }
}

/// Index of the largest number, the first if several are.
fn largest(x: &[f32]) -> usize {
    (1..x.len()).fold(0, |best, i| if x[i] > x[best] { i } else { best })
}

/// Number from 0 to 1, 1 excluded (SplitMix64; Steele, Lea, Flood 2014).
fn unit(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 11) as f64 * 2f64.powi(-53)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_temperature_the_most_probable_is_chosen() {
        let choice = Sampler::new(0.0, 7).choose(&[0.5, 2.0, 2.0, -1.0]);
        assert_eq!(choice.token, 1);
        let sum = 0.5f64.exp() + 2.0 * 2.0f64.exp() + (-1.0f64).exp();
        assert!((f64::from(choice.logprob) - (2.0 - sum.ln())).abs() < 1e-6);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let (logits, mut counts) = ([0.0, 1.0, -1e30], [0usize; 3]);
        let mut sampler = Sampler::new(0.5, 1);
        for _ in 0..20_000 {
            counts[sampler.choose(&logits).token as usize] += 1;
        }
        let expected = 2.0f64.exp() / (1.0 + 2.0f64.exp()); // logits divided by the temperature
        assert!((counts[1] as f64 / 20_000.0 - expected).abs() < 0.01, "{counts:?}");
        assert_eq!(counts[2], 0);
        let draws = |seed| (0..50).map(|_| 0).scan(Sampler::new(1.0, seed), |s, _: i32| Some(s.choose(&logits).token));
        assert!(draws(3).eq(draws(3)) && !draws(3).eq(draws(4)));
    }
}
