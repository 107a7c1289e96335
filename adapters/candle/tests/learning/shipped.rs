//! The translator in the repository: candle and `sdpa-layers` compute the same of it, and it translates what it never saw.

use crate::corpus::{Batch, Corpus, Pair};
use crate::grammar::{Phrase, is_held_out};
use crate::model::Translator;
use crate::training::Attend;
use crate::{file, translator, words};

const MODEL: &[u8] = include_bytes!("../../../../layers/examples/models/translator.safetensors");
/// Seed of the corpus that it was trained on.
const SEED: u64 = 1;

/// Held-out sentences and numbers, so many of each.
fn held_out(corpus: &Corpus, count: usize) -> Vec<Phrase> {
    let numbers = Corpus::held_out_numbers();
    let every = numbers.len() / count;
    corpus.held_out_sentences(count).into_iter().chain(numbers.into_iter().step_by(every).take(count)).collect()
}

#[test]
fn both_compute_the_same_logits() {
    let (corpus, read) = (Corpus::new(SEED), file::read(MODEL).unwrap());
    let [english, french] = &read.words;
    assert_eq!((english.words(), french.words()), (corpus.english.words(), corpus.french.words()));
    let candle = Translator::new(Attend::Candle, read.sizes, &read.vars).unwrap();
    let mut layers = translator::Translator::read(MODEL).unwrap();
    for phrase in held_out(&corpus, 6) {
        let source = english.ids(&phrase.english);
        let translation = layers.translate(source.clone()).unwrap();
        let target = translation.steps.iter().map(|step| step.word).collect();
        let logits = candle.logits(&Batch::new(&[Pair { source, target }]).unwrap()).unwrap();
        let logits = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let whole = layers.whole(&translation).unwrap();
        assert_eq!(whole.len(), logits.len());
        let worst = whole.iter().zip(&logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-3, "{:?}: logits differ by {worst:e}", phrase.english);
    }
}

#[test]
fn it_translates_what_it_never_saw() {
    let (corpus, mut layers) = (Corpus::new(SEED), translator::Translator::read(MODEL).unwrap());
    let phrases = held_out(&corpus, 150);
    let mut wrong = Vec::new();
    for phrase in &phrases {
        let translation = layers.translate(corpus.english.ids(&phrase.english)).unwrap();
        let words: Vec<&str> = translation.words().map(|word| layers.french(word)).collect();
        if words != phrase.french {
            wrong.push(phrase.english.join(" "));
        }
    }
    assert!(wrong.len() * 100 <= 3 * phrases.len(), "{} of {} wrong: {wrong:#?}", wrong.len(), phrases.len());
}

#[test]
fn what_it_shows_was_held_out() {
    let numbers: Vec<String> = Corpus::held_out_numbers().iter().map(|phrase| phrase.english.join(" ")).collect();
    for text in words::EXAMPLES {
        let text = words::english(text).join(" ");
        assert!(is_held_out(&text) || numbers.contains(&text), "{text}");
    }
}
