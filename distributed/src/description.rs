//! Descriptions of a call that ranks send each other, and whether they agree.

use crate::error::Error;
use crate::numbers::{Numbers, Reader};
use core::fmt;
use core::ops::Range;
use sdpa::Dtype;

/// Longest text that is told whole; of a longer one the beginning, and a number that tells it from others.
const LONG: usize = 300;

/// Element types, each told by its place here.
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Value that a rank has of a thing that all must agree on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Nothing,
    /// Something; no more is told of it.
    Given,
    Number(usize),
    Type(Dtype),
    Sizes([usize; 3]),
    /// Text of what is compared, but not read.
    Printed(String),
}

impl Value {
    fn tell(&self, to: &mut Numbers) {
        match self {
            Self::Nothing => to.numbers([0]),
            Self::Given => to.numbers([1]),
            Self::Number(n) => to.numbers([2, *n]),
            Self::Type(dtype) => {
                let place = DTYPES.iter().position(|other| other == dtype);
                to.numbers([3, place.unwrap_or(DTYPES.len())]);
            }
            Self::Sizes([a, b, c]) => to.numbers([4, *a, *b, *c]),
            Self::Printed(text) => {
                to.numbers([5]);
                to.text(text);
            }
        }
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        Some(match from.number()? {
            0 => Self::Nothing,
            1 => Self::Given,
            2 => Self::Number(from.number()?),
            3 => Self::Type(*DTYPES.get(from.number()?)?),
            4 => Self::Sizes(from.numbers()?),
            5 => Self::Printed(from.text()?),
            _ => return None,
        })
    }
}

/// Words of an error.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("none"),
            Self::Given => f.write_str("given"),
            Self::Number(n) => n.fmt(f),
            Self::Type(dtype) => dtype.fmt(f),
            Self::Sizes([a, b, c]) => write!(f, "{a}, {b}, {c}"),
            Self::Printed(text) => f.write_str(text),
        }
    }
}

impl From<bool> for Value {
    fn from(is_given: bool) -> Self {
        if is_given { Self::Given } else { Self::Nothing }
    }
}

impl From<usize> for Value {
    fn from(n: usize) -> Self {
        Self::Number(n)
    }
}

impl From<Dtype> for Value {
    fn from(dtype: Dtype) -> Self {
        Self::Type(dtype)
    }
}

impl From<[usize; 3]> for Value {
    fn from(sizes: [usize; 3]) -> Self {
        Self::Sizes(sizes)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Printed(shortened(text))
    }
}

/// Description of a call by a rank, before it begins.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Description {
    /// Why its own part is wrong.
    pub(crate) refused: Option<String>,
    /// Names of what all must agree on, and what it has. A rank leaves out what it does not know.
    pub(crate) facts: Vec<(String, Value)>,
    /// Ends of the rows and keys of each ragged sequence, as far as they are known.
    pub(crate) sequences: Vec<[usize; 2]>,
    /// Rows and keys that it has.
    pub(crate) rows: Vec<Range<usize>>,
    pub(crate) keys: Vec<Range<usize>>,
}

impl Description {
    pub(crate) fn fact(&mut self, what: &str, value: impl Into<Value>) {
        self.facts.push((what.to_owned(), value.into()));
    }

    /// Says what an option is, as [`Inputs::options_in_words`](sdpa::Inputs::options_in_words) has it.
    pub(crate) fn option(&mut self, what: &str, words: &[String]) {
        self.fact(what, if words.is_empty() { Value::Nothing } else { words.join(", ").into() });
    }

    /// Name of the given positions of rows or keys, if there are any.
    pub(crate) fn positions(&self) -> Option<&'static str> {
        ["row positions", "key positions"].into_iter().find(|name| is_given(std::slice::from_ref(self), name))
    }

    /// Returns the list of numbers that is told.
    pub(crate) fn numbers(&self) -> Vec<u64> {
        let Self { refused, facts, sequences, rows, keys } = self;
        let mut numbers = Numbers::default();
        numbers.numbers([refused.is_some().into()]);
        refused.iter().for_each(|why| numbers.text(why));
        numbers.numbers([facts.len()]);
        for (what, value) in facts {
            numbers.text(what);
            value.tell(&mut numbers);
        }
        numbers.pairs(sequences.iter().copied());
        for ranges in [rows, keys] {
            numbers.pairs(ranges.iter().map(|range| [range.start, range.end]));
        }
        numbers.0
    }

    /// Reads what [`Self::numbers`] made; anything else is refused.
    pub(crate) fn read(numbers: &[u64]) -> Self {
        let refused = || Self { refused: Some("it says what cannot be read".to_owned()), ..Self::default() };
        Self::parts(&mut Reader(numbers)).unwrap_or_else(refused)
    }

    fn parts(from: &mut Reader<'_>) -> Option<Self> {
        let refused = if from.number()? == 0 { None } else { Some(from.text()?) };
        let facts = (0..from.number()?).map(|_| Some((from.text()?, Value::read(from)?))).collect::<Option<_>>()?;
        let sequences = from.pairs()?;
        let mut ranges = || Some(from.pairs()?.into_iter().map(|[start, end]| start..end).collect());
        Some(Self { refused, facts, sequences, rows: ranges()?, keys: ranges()? })
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
            let first =
                (0..description.len()).find_map(|other| Some((other, said(&description[other..=other], what)?)));
            if let Some((other, expected)) = first.filter(|(_, expected)| *expected != got) {
                let (got, expected) = (got.to_string(), expected.to_string());
                return Err(Error::Disagree { what: what.clone(), rank, got, other, expected });
            }
        }
    }
    Ok(())
}

/// Returns what the first rank that knows says of something.
pub(crate) fn said<'d>(ranks: &'d [Description], name: &str) -> Option<&'d Value> {
    let mut facts = ranks.iter().flat_map(|rank| &rank.facts);
    facts.find(|(what, _)| what == name).map(|(_, value)| value)
}

/// Returns true if the first rank that knows of something has it.
pub(crate) fn is_given(ranks: &[Description], name: &str) -> bool {
    said(ranks, name).is_some_and(|value| *value != Value::Nothing)
}

/// Returns the number that the first rank that knows says.
pub(crate) fn number(ranks: &[Description], name: &str) -> Option<usize> {
    match said(ranks, name)? {
        Value::Number(n) => Some(*n),
        _ => None,
    }
}

/// Returns the element type that the first rank that knows says.
pub(crate) fn dtype(ranks: &[Description], name: &str) -> Option<Dtype> {
    match said(ranks, name)? {
        Value::Type(dtype) => Some(*dtype),
        _ => None,
    }
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
        all.refused = Some("two\nlines and a tab\t".to_owned());
        let values = [false.into(), true.into(), 7.into(), Dtype::F16.into(), [2, 1, 300].into(), "two\tparts".into()];
        values.into_iter().for_each(|value: Value| all.fact("a name\nof two lines", value));
        let told = all.numbers();
        assert_eq!(Description::read(&told), all);
        // A rank of another version, or a list that ends too early.
        for other in [&told[..told.len() - 1], &[2, 3], &[0, 1, 0, 6], &[0, u64::MAX], &[1, u64::MAX]] {
            assert!(Description::read(other).refused.is_some(), "{other:?}");
        }
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
        assert!(size_of_val(&*description(&a).numbers()) < 1000);
    }
}
