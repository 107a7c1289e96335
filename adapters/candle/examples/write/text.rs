//! Lines of English that a grammar makes, letter by letter.

use crate::grammar::{Grammar, is_held_out};
use candle_core::{Device, Result, Tensor};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Letters of the text, by number. The first begins every line.
const LETTERS: &str = "\n abcdefghijklmnopqrstuvwxyz.";
/// Letters of a row.
pub(crate) const LENGTH: usize = 512;

/// Which lines a text is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Training,
    HeldOut,
}

pub(crate) struct Text {
    grammar: Grammar,
}

impl Text {
    pub(crate) fn new() -> Self {
        Self { grammar: Grammar::new() }
    }

    /// Rows of lines, `[rows, LENGTH + 1]`, the same for the same seed.
    pub(crate) fn rows(&self, part: Part, seed: u64, rows: usize) -> Vec<Vec<u32>> {
        let mut rng = StdRng::seed_from_u64(seed);
        let row = |_| {
            let mut text = String::from("\n");
            while text.len() <= LENGTH {
                let line = self.grammar.sentence(&mut rng).english.join(" ");
                if is_held_out(&line) == (part == Part::HeldOut) {
                    text += &line;
                    text += ".\n";
                }
            }
            text.chars().take(LENGTH + 1).map(number).collect()
        };
        (0..rows).map(row).collect()
    }
}

/// Number of letters.
pub(crate) fn letters() -> usize {
    LETTERS.len()
}

fn number(letter: char) -> u32 {
    LETTERS.find(letter).unwrap_or_else(|| panic!("{letter:?}: not a letter")) as u32
}

/// Text of numbers.
pub(crate) fn read(numbers: &[u32]) -> String {
    numbers.iter().map(|&number| char::from(LETTERS.as_bytes()[number as usize])).collect()
}

/// Rows as a tensor.
pub(crate) fn tensor(rows: &[Vec<u32>]) -> Result<Tensor> {
    Tensor::new(rows.concat(), &Device::Cpu)?.reshape((rows.len(), ()))
}
