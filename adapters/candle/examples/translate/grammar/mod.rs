//! A grammar that makes English sentences and their French translations.
#![allow(dead_code, reason = "both examples compile this module and use their part of it")]

mod lexicon;
pub(crate) mod numbers;
mod phrases;

pub(crate) use lexicon::Gender;
pub(crate) use numbers::And;

use lexicon::{Kind, Lexicon, Number, Person, Verb};
use phrases::{Adverb, Nominal};
use rand::Rng;
use rand::seq::IndexedRandom;

/// Words in English, and the same in French. In French, hyphens are words, and a word that ends in an apostrophe is
/// joined to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Phrase {
    pub(crate) english: Vec<&'static str>,
    pub(crate) french: Vec<&'static str>,
}

impl Phrase {
    /// Takes words of both languages, separated by spaces.
    fn new(english: &'static str, french: &'static str) -> Self {
        Self { english: english.split_whitespace().collect(), french: french.split_whitespace().collect() }
    }

    /// Adds another after it.
    fn push(&mut self, other: &Self) {
        self.english.extend(&other.english);
        self.french.extend(&other.french);
    }
}

/// Subject of a sentence, and what agrees with it.
#[derive(Debug)]
struct Subject {
    phrase: Phrase,
    person: Person,
    gender: Gender,
    number: Number,
}

#[derive(Debug)]
pub(crate) struct Grammar {
    lexicon: Lexicon,
}

/// English, French, and the form of the verb.
const PRONOUNS: [(&str, &str, Person); 6] = [
    ("i", "je", Person::I),
    ("you", "vous", Person::You),
    ("we", "nous", Person::We),
    ("he", "il", Person::It),
    ("she", "elle", Person::It),
    ("they", "ils", Person::They),
];

const WHEN: [(&str, &str); 8] = [
    ("today", "aujourd'hui"),
    ("now", "maintenant"),
    ("here", "ici"),
    ("every day", "tous les jours"),
    ("in the morning", "le matin"),
    ("tonight", "ce soir"),
    ("on monday", "lundi"),
    ("on sunday", "dimanche"),
];

/// One text of so many is held out: training never sees it.
const HELD_OUT: u64 = 10;

/// Sentence that is shown, and held out for it.
const SHOWN: &str = "i like to go to the park and play";

/// True of a tenth of all texts; decided by the text alone (FNV-1a, Fowler, Noll and Vo).
pub(crate) fn is_held_out(text: &str) -> bool {
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    (hash ^ (hash >> 32)) % HELD_OUT == 0 || text == SHOWN
}

const DEGREES: [(&str, &str); 3] = [("", ""), ("very", "très"), ("too", "trop")];

impl Grammar {
    pub(crate) fn new() -> Self {
        Self { lexicon: Lexicon::new() }
    }

    /// Translates a number below 10,000.
    pub(crate) fn number(n: usize, and: And) -> Phrase {
        Phrase { english: numbers::english(n, and), french: numbers::french(n, Gender::Masculine) }
    }

    /// Makes a sentence.
    pub(crate) fn sentence(&self, rng: &mut impl Rng) -> Phrase {
        let mut sentence = if rng.random_bool(0.25) { self.description(rng) } else { self.action(rng) };
        phrases::contract(&mut sentence.french);
        sentence
    }

    /// "The girls are very happy."
    fn description(&self, rng: &mut impl Rng) -> Phrase {
        let kind = *[Kind::Being, Kind::Being, Kind::Thing, Kind::Place].choose(rng).expect("a kind");
        let subject = if kind == Kind::Being { self.subject(rng, 3..6) } else { self.nominal_subject(rng, kind) };
        let many = usize::from(subject.number == Number::Plural);
        let [be, être] = [["is", "are"][many], ["est", "sont"][many]];
        let fitting: Vec<_> = self.lexicon.adjectives.iter().filter(|adjective| adjective.goes_with(kind)).collect();
        let adjective = fitting.choose(rng).expect("an adjective");
        let &(very, très) = DEGREES.choose(rng).expect("a degree");
        let adverb = Adverb::random(rng);
        let Subject { mut phrase, .. } = subject;
        phrase.english.push(be);
        phrase.english.extend(adverb.english());
        phrase.english.extend(very.split_whitespace().chain([adjective.english]));
        phrase.french.extend(adverb.ne().into_iter().chain([être]).chain(adverb.french()));
        phrase.french.extend(très.split_whitespace());
        phrase.french.push(adjective.french(subject.gender, subject.number, false));
        phrase
    }

    /// "I like to go to the park and play."
    fn action(&self, rng: &mut impl Rng) -> Phrase {
        let Subject { mut phrase, person, .. } = self.subject(rng, 0..PRONOUNS.len());
        let adverb = Adverb::random(rng);
        if rng.random_bool(0.4) {
            let modal = self.lexicon.modal.choose(rng).expect("a verb");
            phrase.push(&adverb.finite(modal, person));
            phrase.push(&Phrase::new(modal.after[0], modal.after[1]));
            phrase.push(&self.infinitive(rng, adverb));
            if adverb == Adverb::None && rng.random_bool(0.5) {
                phrase.push(&Phrase::new("and", "et"));
                phrase.push(&self.infinitive(rng, adverb));
            }
        } else {
            let (verb, complement) = self.verb(rng, adverb);
            phrase.push(&adverb.finite(verb, person));
            phrase.push(&complement);
            if adverb == Adverb::None && rng.random_bool(0.3) {
                let (verb, complement) = self.verb(rng, adverb);
                phrase.push(&Phrase::new("and", "et"));
                phrase.push(&adverb.finite(verb, person));
                phrase.push(&complement);
            }
        }
        match rng.random_range(0..10) {
            0..2 => {
                let &(english, french) = WHEN.choose(rng).expect("a time");
                phrase.push(&Phrase::new(english, french));
            }
            2 => {
                phrase.push(&Phrase::new("with", "avec"));
                phrase.push(&self.nominal(rng, Kind::Being, Adverb::None).phrase);
            }
            _ => {}
        }
        phrase
    }

    /// A pronoun of this part of the list, a noun, or two nouns.
    fn subject(&self, rng: &mut impl Rng, pronouns: std::ops::Range<usize>) -> Subject {
        match rng.random_range(0..10) {
            0..5 => {
                let &(english, french, person) = PRONOUNS[pronouns].choose(rng).expect("a pronoun");
                let gender = if english == "she" { Gender::Feminine } else { Gender::Masculine };
                let number = if person == Person::It { Number::Singular } else { Number::Plural };
                Subject { phrase: Phrase::new(english, french), person, gender, number }
            }
            5 => {
                let (mut first, second) =
                    (self.nominal_subject(rng, Kind::Being), self.nominal_subject(rng, Kind::Being));
                first.phrase.push(&Phrase::new("and", "et"));
                first.phrase.push(&second.phrase);
                // One man among women makes all of them masculine.
                let gender = if first.gender == second.gender { first.gender } else { Gender::Masculine };
                Subject { phrase: first.phrase, person: Person::They, gender, number: Number::Plural }
            }
            _ => self.nominal_subject(rng, Kind::Being),
        }
    }

    fn nominal_subject(&self, rng: &mut impl Rng, kind: Kind) -> Subject {
        let Nominal { phrase, gender, number } = self.nominal(rng, kind, Adverb::None);
        let person = if number == Number::Singular { Person::It } else { Person::They };
        Subject { phrase, person, gender, number }
    }

    /// "go to the park", "aller au parc", as after another verb.
    fn infinitive(&self, rng: &mut impl Rng, adverb: Adverb) -> Phrase {
        let (verb, complement) = self.verb(rng, adverb);
        let mut phrase = Phrase { english: vec![verb.english[0]], french: vec![verb.infinitive] };
        phrase.push(&complement);
        phrase
    }

    /// A verb, and what follows it.
    fn verb(&self, rng: &mut impl Rng, adverb: Adverb) -> (&Verb, Phrase) {
        let (verbs, object) = match rng.random_range(0..10) {
            0..3 => (&self.lexicon.intransitive, None),
            3..6 => (&self.lexicon.motion, Some(Kind::Place)),
            6 => (&self.lexicon.transitive, Some(Kind::Being)),
            _ => (&self.lexicon.transitive, Some(Kind::Thing)),
        };
        let verb = verbs.choose(rng).expect("a verb");
        let mut complement = Phrase::new(verb.after[0], verb.after[1]);
        if let Some(kind) = object {
            complement.push(&self.nominal(rng, kind, if kind == Kind::Place { Adverb::None } else { adverb }).phrase);
        }
        (verb, complement)
    }
}
