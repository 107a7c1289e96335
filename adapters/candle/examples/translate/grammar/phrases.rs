//! Phrases of the grammar: nouns with what stands around them, verbs with adverbs; and how French words meet.

use super::lexicon::{Adjective, Determiner, Gender, Kind, Noun, Number, Person, Place, Verb};
use super::numbers::{self, And};
use super::{Grammar, Phrase};
use rand::Rng;
use rand::seq::IndexedRandom;

/// Word beside the finite verb: after it in French, before it in English, and "do not".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adverb {
    None,
    Not,
    Never,
    Often,
    Always,
}

impl Adverb {
    pub(crate) fn random(rng: &mut impl Rng) -> Self {
        match rng.random_range(0..20) {
            0..4 => Self::Not,
            4 => Self::Never,
            5 => Self::Often,
            6 => Self::Always,
            _ => Self::None,
        }
    }

    pub(crate) fn english(self) -> Option<&'static str> {
        [None, Some("not"), Some("never"), Some("often"), Some("always")][self as usize]
    }

    pub(crate) fn french(self) -> Option<&'static str> {
        [None, Some("pas"), Some("jamais"), Some("souvent"), Some("toujours")][self as usize]
    }

    /// First half of a French negation.
    pub(crate) fn ne(self) -> Option<&'static str> {
        self.negates().then_some("ne")
    }

    fn negates(self) -> bool {
        matches!(self, Self::Not | Self::Never)
    }

    /// The verb in its form for this person, with the adverb; and "to" of verbs that an infinitive follows.
    pub(crate) fn finite(self, verb: &Verb, person: Person) -> Phrase {
        let mut english = Vec::new();
        match self {
            _ if verb.is_auxiliary() => english.extend([verb.english[0]].into_iter().chain(self.english())),
            Self::Not => english.extend([if person == Person::It { "does" } else { "do" }, "not", verb.english[0]]),
            _ => english.extend(self.english().into_iter().chain([verb.english(person)])),
        }
        let french = self.ne().into_iter().chain([verb.french(person)]).chain(self.french()).collect();
        Phrase { english, french }
    }
}

/// A noun with its words, and what agrees with it.
#[derive(Debug)]
pub(crate) struct Nominal {
    pub(crate) phrase: Phrase,
    pub(crate) gender: Gender,
    pub(crate) number: Number,
}

impl Grammar {
    /// "a small red car", "twenty-one apples"; "a" becomes "de" in a French negation.
    pub(crate) fn nominal(&self, rng: &mut impl Rng, kind: Kind, adverb: Adverb) -> Nominal {
        let nouns: Vec<_> = self.lexicon.nouns.iter().filter(|noun| noun.kind == kind).collect();
        let noun = *nouns.choose(rng).expect("a noun");
        let adjective = |place: Place, share: f64, rng: &mut _| {
            let fitting = |adjective: &&Adjective| adjective.place == place && adjective.goes_with(kind);
            let fitting: Vec<_> = self.lexicon.adjectives.iter().filter(fitting).collect();
            Rng::random_bool(rng, share).then(|| *fitting.choose(rng).expect("an adjective"))
        };
        let before = adjective(Place::Before, 0.2, rng);
        let after = adjective(Place::After, 0.3, rng);
        let counted = kind != Kind::Place && rng.random_bool(0.15);
        let determiner = self.lexicon.determiners.choose(rng).expect("a determiner");
        let plural = counted || kind != Kind::Place && !determiner.english[1].is_empty() && rng.random_bool(0.35);
        let number = if plural { Number::Plural } else { Number::Singular };
        // English has both adjectives before the noun.
        let mut phrase = Phrase {
            english: before.iter().chain(&after).map(|adjective| adjective.english).collect(),
            french: french(noun, number, before, after),
        };
        phrase.english.push(noun.english[number as usize]);
        let first = if counted {
            let n = rng.random_range(2..100);
            Phrase { english: numbers::english(n, And::Unsaid), french: numbers::french(n, noun.gender) }
        } else {
            determined(determiner, noun.gender, number, adverb, &phrase)
        };
        let mut all = first;
        all.push(&phrase);
        Nominal { phrase: all, gender: noun.gender, number }
    }
}

/// The noun between its adjectives.
fn french(noun: &Noun, number: Number, before: Option<&Adjective>, after: Option<&Adjective>) -> Vec<&'static str> {
    let word = noun.french[number as usize];
    let before = before.map(|adjective| adjective.french(noun.gender, number, starts_with_vowel(word)));
    let after = after.map(|adjective| adjective.french(noun.gender, number, false));
    before.into_iter().chain([word]).chain(after).collect()
}

/// The word before these.
fn determined(determiner: &Determiner, gender: Gender, number: Number, adverb: Adverb, rest: &Phrase) -> Phrase {
    let indefinite = determiner.english[0] == "a";
    let english = match determiner.english[number as usize] {
        "a" if rest.english[0].starts_with(['a', 'e', 'i', 'o', 'u']) && rest.english[0] != "university" => "an",
        other => other,
    };
    let french = if indefinite && adverb.negates() {
        "de"
    } else {
        determiner.french(gender, number, starts_with_vowel(rest.french[0]))
    };
    Phrase { english: vec![english], french: vec![french] }
}

/// True of words that "le" is shortened before; every h of the lexicon is mute.
fn starts_with_vowel(word: &str) -> bool {
    word.starts_with(['a', 'e', 'i', 'o', 'u', 'é', 'è', 'ê', 'â', 'î', 'ô', 'œ', 'h'])
}

/// Shortens words before vowels, l'école, and draws others together: au, du.
pub(crate) fn contract(words: &mut Vec<&'static str>) {
    for at in 1..words.len() {
        if starts_with_vowel(words[at]) {
            words[at - 1] = match words[at - 1] {
                "je" => "j'",
                "le" | "la" => "l'",
                "de" => "d'",
                "ne" => "n'",
                other => other,
            };
        }
    }
    let mut at = 1;
    while at < words.len() {
        let together = match [words[at - 1], words[at]] {
            ["à", "le"] => Some("au"),
            ["de", "le"] => Some("du"),
            _ => None,
        };
        match together {
            Some(word) => _ = words.splice(at - 1..=at, [word]),
            None => at += 1,
        }
    }
}
