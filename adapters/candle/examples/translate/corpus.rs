//! The corpus: pairs that the grammar makes, those that are held out, and batches of the others.

use crate::grammar::{And, Grammar, Phrase, is_held_out};
use crate::words::END;
use candle_core::{Device, Result, Tensor};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use std::collections::{BTreeSet, HashMap};

/// Numbers that are all in training: their words are in all others.
const BASIC: usize = 100;
const NUMBERS: usize = 10_000;
/// Share of numbers among the pairs.
const SHARE: f64 = 0.25;
/// Pairs from which the vocabularies are gathered.
const SEEN: usize = 40_000;
/// Batches that are made together, each of texts of about one length.
const POOL: usize = 16;

/// Words of a language; the first is the mark of the end.
#[derive(Debug, Clone)]
pub(crate) struct Vocabulary {
    words: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    pub(crate) fn new(words: impl IntoIterator<Item = String>) -> Self {
        let words: Vec<String> = words.into_iter().collect();
        let ids = words.iter().enumerate().map(|(id, word)| (word.clone(), id as u32)).collect();
        Self { words, ids }
    }

    fn of<'a>(words: impl Iterator<Item = &'a str>) -> Self {
        let sorted: BTreeSet<&str> = words.collect();
        Self::new(["<end>"].into_iter().chain(sorted).map(str::to_owned))
    }

    pub(crate) fn words(&self) -> &[String] {
        &self.words
    }

    /// Numbers of the words, and of the end. Panics if a word is not there.
    pub(crate) fn ids<S: AsRef<str>>(&self, words: &[S]) -> Vec<u32> {
        let id = |word: &S| *self.ids.get(word.as_ref()).unwrap_or_else(|| panic!("{}: not a word", word.as_ref()));
        words.iter().map(id).chain([END]).collect()
    }

    pub(crate) fn word(&self, id: u32) -> &str {
        &self.words[id as usize]
    }
}

/// A text and its translation, as numbers of words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) source: Vec<u32>,
    pub(crate) target: Vec<u32>,
}

/// Pairs side by side, padded at their ends.
#[derive(Debug)]
pub(crate) struct Batch {
    /// `[pairs, longest]`
    pub(crate) source: Tensor,
    /// Words of each source.
    pub(crate) lens: Vec<u32>,
    /// Inputs of the decoder: the target, one word late.
    pub(crate) input: Tensor,
    /// Places of the flattened input that are no padding, and the words that belong there.
    pub(crate) places: Tensor,
    pub(crate) targets: Tensor,
    /// Words of sources and targets.
    pub(crate) tokens: usize,
}

pub(crate) struct Corpus {
    grammar: Grammar,
    pub(crate) english: Vocabulary,
    pub(crate) french: Vocabulary,
    seed: u64,
    /// Batches of the steps from a multiple of [`POOL`] on, and that step.
    pool: Vec<Vec<Pair>>,
    pool_step: usize,
}

impl Corpus {
    pub(crate) fn new(seed: u64) -> Self {
        let grammar = Grammar::new();
        let mut rng = StdRng::seed_from_u64(seed);
        let mut seen: Vec<Phrase> = (0..SEEN).map(|_| training_phrase(&grammar, &mut rng)).collect();
        seen.extend((0..=BASIC).map(|n| Grammar::number(n, And::Unsaid)));
        let english = Vocabulary::of(seen.iter().flat_map(|phrase| phrase.english.iter().copied()));
        let french = Vocabulary::of(seen.iter().flat_map(|phrase| phrase.french.iter().copied()));
        Self { grammar, english, french, seed, pool: Vec::new(), pool_step: usize::MAX }
    }

    fn pair(&self, phrase: &Phrase) -> Pair {
        Pair { source: self.english.ids(&phrase.english), target: self.french.ids(&phrase.french) }
    }

    /// Phrases as numbers of words.
    pub(crate) fn pairs(&self, phrases: &[Phrase]) -> Vec<Pair> {
        phrases.iter().map(|phrase| self.pair(phrase)).collect()
    }

    /// Batch of a step, the same each time.
    pub(crate) fn batch(&mut self, step: usize, pairs: usize) -> Result<Batch> {
        let first = step / POOL * POOL;
        if self.pool_step != first {
            let mut rng = StdRng::seed_from_u64(self.seed ^ ((first as u64 + 1) << 20));
            let mut all: Vec<Pair> =
                (0..POOL * pairs).map(|_| self.pair(&training_phrase(&self.grammar, &mut rng))).collect();
            all.sort_by_key(|pair| (pair.target.len(), pair.source.len()));
            self.pool = all.chunks(pairs).map(<[Pair]>::to_vec).collect();
            self.pool.shuffle(&mut rng);
            self.pool_step = first;
        }
        Batch::new(&self.pool[step - first])
    }

    /// Sentences that training never sees, all different.
    pub(crate) fn held_out_sentences(&self, count: usize) -> Vec<Phrase> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x5e_a1ed);
        let (mut sentences, mut known) = (Vec::new(), BTreeSet::new());
        while sentences.len() < count {
            let sentence = self.grammar.sentence(&mut rng);
            if is_held_out(&sentence.english.join(" ")) && known.insert(sentence.english.clone()) {
                sentences.push(sentence);
            }
        }
        sentences
    }

    /// Numbers that training never sees, with "and" and without.
    pub(crate) fn held_out_numbers() -> Vec<Phrase> {
        let numbers = (0..NUMBERS).filter(|&n| number_is_held_out(n));
        let mut phrases: Vec<Phrase> =
            numbers.flat_map(|n| [And::Unsaid, And::Said].map(|and| Grammar::number(n, and))).collect();
        phrases.dedup();
        phrases
    }
}

/// A sentence or number that is not held out.
fn training_phrase(grammar: &Grammar, rng: &mut StdRng) -> Phrase {
    loop {
        if rng.random_bool(SHARE) {
            // Small numbers are rare among all.
            let below = *[BASIC + 1, 1000, NUMBERS, NUMBERS, NUMBERS, NUMBERS].choose(rng).expect("a limit");
            let n = rng.random_range(0..below);
            let and = if rng.random_bool(0.5) { And::Said } else { And::Unsaid };
            if !number_is_held_out(n) {
                return Grammar::number(n, and);
            }
        } else {
            let sentence = grammar.sentence(rng);
            if !is_held_out(&sentence.english.join(" ")) {
                return sentence;
            }
        }
    }
}

fn number_is_held_out(n: usize) -> bool {
    n > BASIC && is_held_out(&n.to_string())
}

impl Batch {
    pub(crate) fn new(pairs: &[Pair]) -> Result<Self> {
        let longest = |len: fn(&Pair) -> usize| pairs.iter().map(len).max().unwrap_or(0);
        let (source_len, target_len) = (longest(|pair| pair.source.len()), longest(|pair| pair.target.len()));
        let (mut source, mut input) = (Vec::new(), Vec::new());
        let (mut places, mut targets) = (Vec::<u32>::new(), Vec::<u32>::new());
        for (n, pair) in pairs.iter().enumerate() {
            source.extend(pair.source.iter().copied().chain(padding(source_len - pair.source.len())));
            let given = [END].into_iter().chain(pair.target.iter().copied()).take(pair.target.len());
            input.extend(given.chain(padding(target_len - pair.target.len())));
            places.extend((0..pair.target.len()).map(|at| (n * target_len + at) as u32));
            targets.extend(&pair.target);
        }
        let lens: Vec<u32> = pairs.iter().map(|pair| pair.source.len() as u32).collect();
        let device = &Device::Cpu;
        Ok(Self {
            source: Tensor::from_vec(source, (pairs.len(), source_len), device)?,
            tokens: targets.len() + lens.iter().sum::<u32>() as usize,
            lens,
            input: Tensor::from_vec(input, (pairs.len(), target_len), device)?,
            places: Tensor::new(places, device)?,
            targets: Tensor::new(targets, device)?,
        })
    }
}

fn padding(rows: usize) -> impl Iterator<Item = u32> {
    std::iter::repeat_n(END, rows)
}
