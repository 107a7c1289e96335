//! What ranks tell each other of a call, and whether they agree.

use crate::error::Error;
use core::ops::Range;

/// Longest value that is told whole; of a longer one the beginning, and a number that tells it from others.
const LONG: usize = 300;

/// Description of a call by a rank, before it begins.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Description {
    /// Why its own part is wrong.
    pub(crate) refused: Option<String>,
    /// Names of what all must agree on, and what it has. A rank leaves out what it does not know.
    pub(crate) facts: Vec<(String, String)>,
    /// Ends of the rows and keys of each ragged sequence, as far as they are known.
    pub(crate) sequences: Vec<[usize; 2]>,
    /// Rows and keys that it has.
    pub(crate) rows: Vec<Range<usize>>,
    pub(crate) keys: Vec<Range<usize>>,
}

impl Description {
    pub(crate) fn fact(&mut self, what: impl Into<String>, value: impl Into<String>) {
        self.facts.push((what.into(), shortened(value.into())));
    }

    /// Name of the given positions of rows or keys, if there are any.
    pub(crate) fn positions(&self) -> Option<&'static str> {
        let given = |name: &&str| self.facts.iter().any(|(what, value)| what == name && value != "none");
        ["row positions", "key positions"].into_iter().find(given)
    }

    /// Returns true if a bias or mask has columns for the last keys only.
    pub(crate) fn has_suffix(&self) -> bool {
        self.facts
            .iter()
            .any(|(what, words)| ["bias", "mask"].contains(&&**what) && words.ends_with("of the last keys"))
    }

    /// Writes a line for each thing.
    pub(crate) fn text(&self) -> String {
        let one_line = |text: &str| text.replace(['\n', '\t'], " ");
        let mut text = String::new();
        if let Some(why) = &self.refused {
            text += &format!("refused\t{}\n", one_line(why));
        }
        for (what, value) in &self.facts {
            text += &format!("fact\t{}\t{}\n", one_line(what), one_line(value));
        }
        for [row, key] in &self.sequences {
            text += &format!("sequence\t{row}\t{key}\n");
        }
        for (name, ranges) in [("rows", &self.rows), ("keys", &self.keys)] {
            for range in ranges {
                text += &format!("{name}\t{}\t{}\n", range.start, range.end);
            }
        }
        text
    }

    /// Reads what [`Self::text`] wrote; leaves out lines that it never writes.
    pub(crate) fn read(text: &str) -> Self {
        let mut description = Self::default();
        for line in text.lines() {
            let words: Vec<_> = line.split('\t').collect();
            let range = |a: &str, b: &str| Some(a.parse().ok()?..b.parse().ok()?);
            match words[..] {
                ["refused", why] => description.refused = Some(why.to_owned()),
                ["fact", what, value] => description.facts.push((what.to_owned(), value.to_owned())),
                ["sequence", row, key] => {
                    description.sequences.extend(range(row, key).map(|ends| [ends.start, ends.end]));
                }
                ["rows", a, b] => description.rows.extend(range(a, b)),
                ["keys", a, b] => description.keys.extend(range(a, b)),
                _ => {}
            }
        }
        description
    }
}

/// Cuts a long value, and adds a number made of the whole, so that different values stay different.
fn shortened(value: String) -> String {
    if value.len() <= LONG {
        return value;
    }
    // FNV-1a.
    let hash = value
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let end = (0..=LONG).rev().find(|&at| value.is_char_boundary(at)).unwrap_or(0);
    format!("{}… ({} bytes, hash {hash:016x})", &value[..end], value.len())
}

/// Finds what is wrong with what all ranks say: the same on every rank.
///
/// # Errors
/// [`Error::Refused`] or [`Error::Disagree`].
pub(crate) fn agree(description: &[Description]) -> Result<(), Error> {
    if let Some((rank, why)) =
        description.iter().enumerate().find_map(|(rank, description)| Some((rank, description.refused.clone()?)))
    {
        return Err(Error::Refused { rank, why });
    }
    for (rank, later) in description.iter().enumerate() {
        for (what, got) in &later.facts {
            let said = |description: &Description| {
                description.facts.iter().find(|(name, _)| name == what).map(|(_, value)| value.clone())
            };
            let first =
                description.iter().enumerate().find_map(|(other, description)| Some((other, said(description)?)));
            if let Some((other, expected)) = first.filter(|(_, expected)| expected != got) {
                return Err(Error::Disagree { what: what.clone(), rank, got: got.clone(), other, expected });
            }
        }
    }
    Ok(())
}

/// Returns what the first rank that knows says of something.
pub(crate) fn said<'d>(ranks: &'d [Description], name: &str) -> &'d str {
    let mut facts = ranks.iter().flat_map(|rank| &rank.facts);
    facts.find(|(what, _)| what == name).map_or("", |(_, value)| value)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "stretches are ranges, and a rank may have one")]
mod tests {
    use super::*;

    fn description(value: &str) -> Description {
        let mut description = Description {
            sequences: vec![[0, 0], [9, 2]],
            rows: vec![0..3, 7..9],
            keys: vec![4..4],
            ..Description::default()
        };
        description.fact("scale", value);
        description
    }

    #[test]
    fn what_is_told_is_read() {
        let mut all = description("0.5");
        all.refused = Some("two\nlines".to_owned());
        assert_eq!(Description::read(&all.text()), Description { refused: Some("two lines".to_owned()), ..all });
        assert_eq!(Description::read("rows\tx\t3\nwhat\n"), Description::default());
    }

    #[test]
    fn the_first_that_differs_is_named_with_the_first_that_speaks() {
        let silent = Description::default();
        let all = [silent.clone(), description("0.5"), description("0.5"), description("0.25")];
        let expected = Error::Disagree {
            what: "scale".to_owned(),
            rank: 3,
            got: "0.25".to_owned(),
            other: 1,
            expected: "0.5".to_owned(),
        };
        assert_eq!(agree(&all), Err(expected));
        assert_eq!(agree(&[silent, description("1")]), Ok(()));
    }

    #[test]
    fn long_values_stay_different() {
        let (a, b) = ("x".repeat(5000), "x".repeat(4999) + "é");
        assert_ne!(description(&a), description(&b));
        assert!(description(&a).text().len() < 1000);
    }
}
