//! Texts to words and back, as the translator was trained on them.
#![allow(dead_code, reason = "its training compiles this module, too, and uses a part of it")]

/// Mark at the end of either text, and before the first French word.
pub(crate) const END: u32 = 0;
/// Longest text, in words and the mark of its end.
pub(crate) const POSITIONS: usize = 64;

/// Texts that training never saw.
pub(crate) const EXAMPLES: [&str; 6] = [
    "I like to go to the park and play.",
    "My sister and my friends are very happy.",
    "The beautiful woman does not want a red apple.",
    "We often choose eighty-one small white flowers.",
    "This old hospital is very quiet.",
    "Seven thousand four hundred and eighty-one",
];

/// Words of an English text: small letters, no punctuation, no hyphens, "not" by itself.
pub(crate) fn english(text: &str) -> Vec<String> {
    let text = text.to_lowercase().replace('’', "'").replace("cannot", "can not").replace("can't", "can not");
    let text = text.replace("n't", " not").replace("i'm", "i am");
    let words = text.split(|c: char| c.is_whitespace() || ".,;:!?\"-–()".contains(c));
    words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Text of French words: hyphens join their neighbours, and a word that ends in an apostrophe the next.
pub(crate) fn french<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let mut text = String::new();
    for word in words {
        if !(text.is_empty() || word == "-" || text.ends_with(['-', '\''])) {
            text.push(' ');
        }
        text.push_str(word);
    }
    text
}

/// Sentences of a text, each with its own mark at its end left out.
pub(crate) fn sentences(text: &str) -> impl Iterator<Item = &str> {
    text.split(['.', '!', '?', ';', '\n']).map(str::trim).filter(|sentence| !sentence.is_empty())
}
