//! Texts of many lengths, out of a few sentences.

use crate::failure::Result;
use tokenizers::Tokenizer;

const TEXTS: usize = 64;
/// Tokens of the shortest and of the longest, `[CLS]` and `[SEP]` included.
const LENGTHS: [usize; 2] = [8, 256];

const SENTENCES: [&str; 16] = [
    "The harbour froze twice that winter, and both times the ferries ran late for a week.",
    "A queue at the bakery says more about a town than its website does.",
    "Rust moves the argument about memory from the debugger to the compiler.",
    "She kept the receipts in a shoebox, sorted by colour rather than by date.",
    "Rainfall in the valley has been measured at the same post since 1874.",
    "Nobody could explain why the second violin always came in early.",
    "The committee postponed its vote until the translation had been checked.",
    "Bees find their way back by the sun, even behind cloud.",
    "An embedding puts sentences of similar meaning near each other.",
    "He painted the boat blue, which did not make it any faster.",
    "Trains on this line are held for ten minutes whenever the bridge is open.",
    "The recipe asks for sorrel; spinach with lemon will do.",
    "Most of the library's maps were drawn before the river changed its course.",
    "Attention weighs every word of a text by how much it matters to the others.",
    "The old lighthouse keeper still winds the clock on Sundays.",
    "A good index is worth more to a reader than a clever title.",
];

/// Lengths at even distances, in an order that mixes long and short.
fn lengths() -> impl Iterator<Item = usize> {
    let [shortest, longest] = LENGTHS;
    // 37 and 64 have no common factor: every place comes up once.
    (0..TEXTS).map(move |n| shortest + n * 37 % TEXTS * (longest - shortest) / (TEXTS - 1))
}

/// Tokens of each text: sentences in turn, word by word, up to the text's length.
pub(super) fn tokens(tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    // What the file says about padding and cutting is not wanted here.
    let mut tokenizer = tokenizer.clone();
    tokenizer.with_padding(None).with_truncation(None)?;
    let text = |(n, length): (usize, usize)| {
        let mut words = SENTENCES.iter().cycle().skip(n).flat_map(|sentence| sentence.split(' '));
        let mut text = String::new();
        let mut tokens = Vec::new();
        loop {
            text.push_str(words.next().unwrap_or_default());
            let longer = tokenizer.encode(text.as_str(), true)?.get_ids().to_vec();
            if longer.len() > length {
                return Ok(tokens);
            }
            tokens = longer;
            text.push(' ');
        }
    };
    lengths().enumerate().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_comes_up() {
        let mut lengths: Vec<_> = lengths().collect();
        assert_ne!(lengths[0], lengths[1]);
        lengths.sort_unstable();
        assert_eq!((lengths[0], lengths[TEXTS - 1]), (LENGTHS[0], LENGTHS[1]));
        assert!(lengths.windows(2).all(|pair| pair[1] - pair[0] <= 4));
    }
}
