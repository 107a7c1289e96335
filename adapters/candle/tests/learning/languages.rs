//! The grammar: French as it is spelled, and what is held out.

use crate::bigram::Bigram;
use crate::corpus::{Batch, Corpus};
use crate::grammar::{And, Gender, Grammar, is_held_out, numbers};
use crate::text::{self, Part, Text};
use crate::words;
use std::collections::HashSet;

#[test]
fn numbers_are_spelled_right() {
    let number = |n, and| {
        let phrase = Grammar::number(n, and);
        (phrase.english.join(" "), words::french(phrase.french))
    };
    for (n, english, french) in [
        (0, "zero", "zéro"),
        (1, "one", "un"),
        (16, "sixteen", "seize"),
        (17, "seventeen", "dix-sept"),
        (21, "twenty one", "vingt et un"),
        (22, "twenty two", "vingt-deux"),
        (61, "sixty one", "soixante et un"),
        (70, "seventy", "soixante-dix"),
        (71, "seventy one", "soixante et onze"),
        (77, "seventy seven", "soixante-dix-sept"),
        (80, "eighty", "quatre-vingts"),
        (81, "eighty one", "quatre-vingt-un"),
        (90, "ninety", "quatre-vingt-dix"),
        (91, "ninety one", "quatre-vingt-onze"),
        (99, "ninety nine", "quatre-vingt-dix-neuf"),
        (100, "one hundred", "cent"),
        (101, "one hundred one", "cent un"),
        (200, "two hundred", "deux cents"),
        (201, "two hundred one", "deux cent un"),
        (280, "two hundred eighty", "deux cent quatre-vingts"),
        (1000, "one thousand", "mille"),
        (1001, "one thousand one", "mille un"),
        (1100, "one thousand one hundred", "mille cent"),
        (2000, "two thousand", "deux mille"),
        (3071, "three thousand seventy one", "trois mille soixante et onze"),
        (9900, "nine thousand nine hundred", "neuf mille neuf cents"),
        (9999, "nine thousand nine hundred ninety nine", "neuf mille neuf cent quatre-vingt-dix-neuf"),
    ] {
        assert_eq!(number(n, And::Unsaid), (english.to_owned(), french.to_owned()));
    }
    for (n, french) in [
        (21, "vingt et une"),
        (71, "soixante et onze"),
        (80, "quatre-vingts"),
        (81, "quatre-vingt-une"),
        (1001, "mille une"),
    ] {
        assert_eq!(words::french(numbers::french(n, Gender::Feminine)), french);
    }
    assert_eq!(number(2105, And::Said).0, "two thousand one hundred and five");
    assert_eq!(number(1005, And::Said).0, "one thousand and five");
    assert_eq!(number(45, And::Said).0, "forty five");
    let all: HashSet<String> = (0..10_000).map(|n| number(n, And::Unsaid).1).collect();
    assert_eq!(all.len(), 10_000, "no two numbers are alike");
}

/// Spellings that the rules of French exclude or demand, wherever they turn up in many sentences.
#[test]
fn words_agree_and_meet_as_in_french() {
    let corpus = Corpus::new(1);
    let mut found = [false; 12];
    for phrase in corpus.held_out_sentences(20_000) {
        let (english, french) = (phrase.english.join(" "), words::french(phrase.french));
        let spaced = format!(" {french} ");
        for never in [
            " le homme",
            " la école",
            " je a",
            " je é",
            " ne a",
            " de o",
            " à le ",
            " de le ",
            " ma amie",
            " ce a",
            " beau h",
            " vieux arbre ",
            "  ",
        ] {
            assert!(!spaced.contains(never), "{english}: {french}");
        }
        for (at, (from, to)) in [
            ("to the park", " au parc"),
            ("to the school", " à l'école"),
            ("from the cinema", " du cinéma"),
            ("from the hotel", " de l'hôtel"),
            ("beautiful man ", "bel homme"),
            ("old man ", "vieil homme"),
            ("old woman ", "vieille femme"),
            ("small red car ", "petite voiture rouge "),
            ("i have ", "j'ai "),
            ("we do not eat ", "nous ne mangeons pas "),
            ("sister is happy ", "sœur est heureuse "),
            ("she often looks for ", "elle cherche souvent "),
        ]
        .into_iter()
        .enumerate()
        {
            if format!("{english} ").contains(from) {
                assert!(spaced.contains(to), "{english}: {french}");
                found[at] = true;
            }
        }
    }
    assert!(found.iter().filter(|&&found| found).count() >= 8, "{found:?}");
}

#[test]
fn training_never_sees_what_is_held_out() {
    let mut corpus = Corpus::new(1);
    let held_out = corpus.held_out_sentences(500).into_iter().chain(Corpus::held_out_numbers());
    let held_out: HashSet<Vec<u32>> =
        held_out.flat_map(|phrase| corpus.pairs(&[phrase])).map(|pair| pair.source).collect();
    assert!(held_out.len() > 2000, "{}", held_out.len());
    let mut seen = 0;
    for step in 0..40 {
        let batch = corpus.batch(step, 64).unwrap();
        for (row, &len) in batch.source.to_vec2::<u32>().unwrap().iter().zip(&batch.lens) {
            assert!(!held_out.contains(&row[..len as usize]), "{row:?}");
            seen += 1;
        }
        let targets = |batch: &Batch| batch.targets.to_vec1::<u32>().unwrap();
        assert_eq!(targets(&corpus.batch(step, 64).unwrap()), targets(&batch), "the same each time");
    }
    assert_eq!(seen, 40 * 64);
}

#[test]
fn texts_are_read_as_they_are_typed() {
    let read = |text: &str| words::english(text).join(" ");
    assert_eq!(read("I don't have eighty-one  apples!"), "i do not have eighty one apples");
    assert_eq!(read("You can’t swim; he cannot."), "you can not swim he can not");
    assert_eq!(words::sentences("I sleep. You eat!\n\n").collect::<Vec<_>>(), ["I sleep", "You eat"]);
    assert_eq!(
        words::french(["j'", "aime", "quatre", "-", "vingt", "-", "un", "chats"]),
        "j'aime quatre-vingt-un chats"
    );
}

#[test]
fn letters_of_lines_and_a_bigram_model_of_them() {
    let text = Text::new();
    let (training, held_out) = (text.rows(Part::Training, 1, 20), text.rows(Part::HeldOut, 2, 20));
    for row in training.iter().chain(&held_out) {
        assert_eq!((row.len(), row[0]), (text::LENGTH + 1, 0));
    }
    assert!(text::read(&held_out[0]).lines().skip(1).take(1).all(|line| is_held_out(line.trim_end_matches('.'))));
    // Below that of equal letters, and above what a model with more context can reach.
    let loss = Bigram::new(&training).loss(&held_out);
    assert!((1.0..(text::letters() as f64).ln() - 0.5).contains(&loss), "{loss}");
    // "ab" twice and "ac": P(b | a) = 3 / (letters + 3), and so on.
    let rows = [vec![2, 3, 2, 3, 2, 4]];
    let n = text::letters() as f64;
    let expected = -(2.0 * (3.0 / (n + 3.0)).ln() + (2.0 / (n + 3.0)).ln() + 2.0 * (3.0 / (n + 2.0)).ln()) / 5.0;
    assert!((Bigram::new(&rows).loss(&rows) - expected).abs() < 1e-12);
}
