//! Bigram model: a letter's probability given the one before, by counting.

use crate::text::letters;

pub(crate) struct Bigram {
    /// Number of times that a letter came after another, `[before, after]`, counted from 1.
    counts: Vec<f64>,
}

impl Bigram {
    pub(crate) fn new(rows: &[Vec<u32>]) -> Self {
        let mut counts = vec![1.0; letters() * letters()];
        for pair in rows.iter().flat_map(|row| row.windows(2)) {
            counts[pair[0] as usize * letters() + pair[1] as usize] += 1.0;
        }
        Self { counts }
    }

    /// Mean cross-entropy of every letter but the first of each row, in nats.
    pub(crate) fn loss(&self, rows: &[Vec<u32>]) -> f64 {
        let surprise = |pair: &[u32]| {
            let after = &self.counts[pair[0] as usize * letters()..][..letters()];
            -(after[pair[1] as usize] / after.iter().sum::<f64>()).ln()
        };
        let pairs: Vec<f64> = rows.iter().flat_map(|row| row.windows(2).map(surprise)).collect();
        pairs.iter().sum::<f64>() / pairs.len() as f64
    }
}
