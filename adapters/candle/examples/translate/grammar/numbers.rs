//! Number words, 0 to 9999, in both languages.

use super::lexicon::Gender;

/// Presence of "and" before tens and units: "one hundred and five".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum And {
    Said,
    Unsaid,
}

const ENGLISH: [&str; 20] = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
];
const TENS: [&str; 8] = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];

const FRENCH: [&str; 17] = [
    "zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze", "douze", "treize",
    "quatorze", "quinze", "seize",
];
const DIZAINES: [&str; 5] = ["vingt", "trente", "quarante", "cinquante", "soixante"];

/// Words of a number below 10,000.
pub(crate) fn english(n: usize, and: And) -> Vec<&'static str> {
    let mut words = Vec::new();
    for (size, name) in [(1000, "thousand"), (100, "hundred")] {
        let digit = n / size % 10;
        if digit > 0 {
            words.extend([ENGLISH[digit], name]);
        }
    }
    let rest = n % 100;
    if rest > 0 && !words.is_empty() && and == And::Said {
        words.push("and");
    }
    match rest {
        0 if n > 0 => {}
        0..20 => words.push(ENGLISH[rest]),
        _ => {
            words.push(TENS[rest / 10 - 2]);
            words.extend((!rest.is_multiple_of(10)).then(|| ENGLISH[rest % 10]));
        }
    }
    words
}

/// Words of a number below 10,000 in French, before a noun of this gender; hyphens are words. By the rules before 1990:
/// hyphens below a hundred, except around "et".
pub(crate) fn french(n: usize, gender: Gender) -> Vec<&'static str> {
    let mut words = Vec::new();
    let (thousands, hundreds, rest) = (n / 1000, n / 100 % 10, n % 100);
    if thousands > 1 {
        words.push(FRENCH[thousands]);
    }
    words.extend((thousands > 0).then_some("mille"));
    if hundreds > 1 {
        words.push(FRENCH[hundreds]);
    }
    if hundreds > 0 {
        words.push(if hundreds > 1 && rest == 0 { "cents" } else { "cent" });
    }
    if rest > 0 || n == 0 {
        below_hundred(rest, &mut words);
    }
    if gender == Gender::Feminine && words.last() == Some(&"un") {
        words.pop();
        words.push("une");
    }
    words
}

fn below_hundred(n: usize, words: &mut Vec<&'static str>) {
    match n {
        0..17 => words.push(FRENCH[n]),
        17..20 => words.extend(["dix", "-", FRENCH[n - 10]]),
        80 => words.extend(["quatre", "-", "vingts"]),
        81..100 => {
            words.extend(["quatre", "-", "vingt", "-"]);
            below_hundred(n - 80, words);
        }
        _ => {
            // Seventy is sixty and ten.
            let ten = (n / 10).min(6);
            words.push(DIZAINES[ten - 2]);
            match n - 10 * ten {
                0 => {}
                unit @ (1 | 11) => words.extend(["et", FRENCH[unit]]),
                unit => {
                    words.push("-");
                    below_hundred(unit, words);
                }
            }
        }
    }
}
