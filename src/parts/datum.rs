//! Data that parts of a call compare: what an option is, as numbers that can be sent.

use core::fmt;
use sdpa_kernels::Dtype;

/// What an option or a size is, as numbers that can be sent and compared: nothing, a number, a name or a list.
///
/// It prints as errors show it. Of a list it has the length, the first 16 items and a hash of all items.
///
/// ```
/// use sdpa::parts::Datum;
/// let slopes = Datum::from(Some(&[0.5f32, 0.25][..]));
/// let sent: Vec<u64> = slopes.clone().into();
/// let received = Datum::from(sent);
/// assert_eq!(received, slopes);
/// assert_eq!(received.to_string(), "[0.5, 0.25]");
/// assert_eq!(Datum::default().to_string(), "none");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Datum(Vec<u64>);

/// First number of a datum that is not empty: what the others are.
const TEXT: u64 = 0;
const UNSIGNED: u64 = 1;
const SIGNED: u64 = 2;
const FLOAT: u64 = 3;
const DOUBLE: u64 = 4;
const LIST: u64 = 5;

/// Items of a list that are sent, so that long lists stay short messages.
const ITEMS: usize = 16;

/// Returns the numbers to send.
impl From<Datum> for Vec<u64> {
    fn from(datum: Datum) -> Self {
        datum.0
    }
}

/// Takes the numbers that were sent. Any others make a datum that equals no option's.
impl From<Vec<u64>> for Datum {
    fn from(numbers: Vec<u64>) -> Self {
        Self(numbers)
    }
}

impl Datum {
    /// Returns the size that this is.
    ///
    /// ```
    /// use sdpa::parts::Datum;
    /// assert_eq!((Datum::from(7usize).size(), Datum::from("seven").size()), (Some(7), None));
    /// ```
    pub fn size(&self) -> Option<usize> {
        if let [UNSIGNED, n] = self.0[..] { usize::try_from(n).ok() } else { None }
    }

    /// Returns the element type that this is.
    ///
    /// ```
    /// use sdpa::{Dtype, parts::Datum};
    /// assert_eq!(Datum::from(Dtype::Bf16).dtype(), Some(Dtype::Bf16));
    /// ```
    pub fn dtype(&self) -> Option<Dtype> {
        [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().find(|&dtype| *self == dtype.into())
    }
}

/// Prints what errors show; "none" for nothing.
impl fmt::Display for Datum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0[..] {
            [] => f.write_str("none"),
            [TEXT, len, ref eights @ ..] => {
                let bytes: Vec<u8> = eights.iter().flat_map(|eight| eight.to_le_bytes()).take(len as usize).collect();
                f.write_str(&String::from_utf8_lossy(&bytes))
            }
            [UNSIGNED, n] => n.fmt(f),
            [SIGNED, n] => (n as i64).fmt(f),
            [FLOAT, bits] => f32::from_bits(bits as u32).fmt(f),
            [DOUBLE, bits] => f64::from_bits(bits).fmt(f),
            [LIST, len, hash, ref items @ ..] => {
                let (mut items, mut printed) = (items, Vec::new());
                while let [size, rest @ ..] = items {
                    let (item, others) = rest.split_at(rest.len().min(*size as usize));
                    printed.push(Self(item.to_vec()).to_string());
                    items = others;
                }
                if (printed.len() as u64) < len {
                    printed.push(format!("… {len} in all, hash {hash:016x}"));
                }
                write!(f, "[{}]", printed.join(", "))
            }
            _ => f.write_str("what cannot be read"),
        }
    }
}

/// Makes data of types that are one number.
macro_rules! from_one {
    ($($of:ty: $kind:ident, $number:expr;)*) => {$(
        impl From<$of> for Datum {
            fn from(one: $of) -> Self {
                let number: fn($of) -> u64 = $number;
                Self(vec![$kind, number(one)])
            }
        }
    )*};
}

from_one! {
    usize: UNSIGNED, |n| n as u64;
    u64: UNSIGNED, |n| n;
    isize: SIGNED, |n| n as u64;
    i32: SIGNED, |n| i64::from(n) as u64;
    // Bits: NaN equals itself, and 0 is not −0.
    f32: FLOAT, |x| x.to_bits().into();
    f64: DOUBLE, f64::to_bits;
}

/// Takes a name, eight bytes to a number.
impl From<&str> for Datum {
    fn from(name: &str) -> Self {
        let eight = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
        Self([TEXT, name.len() as u64].into_iter().chain(name.as_bytes().chunks(8).map(eight)).collect())
    }
}

impl From<Dtype> for Datum {
    fn from(dtype: Dtype) -> Self {
        dtype.to_string().as_str().into()
    }
}

/// Takes what is given or not, where no more is compared.
impl From<bool> for Datum {
    fn from(is_given: bool) -> Self {
        is_given.then_some("given").into()
    }
}

impl<T: Into<Datum>> From<Option<T>> for Datum {
    fn from(option: Option<T>) -> Self {
        option.map_or_else(Self::default, T::into)
    }
}

impl<T: Copy + Into<Datum>> From<&[T]> for Datum {
    fn from(list: &[T]) -> Self {
        let items: Vec<Vec<u64>> = list.iter().map(|&item| item.into().0).collect();
        // FNV-1a.
        let hash = items
            .iter()
            .flatten()
            .flat_map(|number| number.to_le_bytes())
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let mut numbers = vec![LIST, list.len() as u64, hash];
        for item in items.into_iter().take(ITEMS) {
            numbers.push(item.len() as u64);
            numbers.extend(item);
        }
        Self(numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_print_as_what_they_were_made_of() {
        let positions: [&[i32]; 2] = [&[-3, 4], &[]];
        let data = [
            (Datum::from(false), "none"),
            (true.into(), "given"),
            (u64::MAX.into(), "18446744073709551615"),
            ((-5isize).into(), "-5"),
            (0.1f32.into(), "0.1"),
            ((-0.0f64).into(), "-0"),
            (Dtype::F16.into(), "f16"),
            ("1/√head_dim".into(), "1/√head_dim"),
            ((&positions[..]).into(), "[[-3, 4], []]"),
            (Datum::from(vec![99]), "what cannot be read"),
            (Datum::from(vec![LIST, 1, 0, u64::MAX, UNSIGNED, 3, 4]), "[what cannot be read]"),
        ];
        for (datum, printed) in &data {
            assert_eq!(datum.to_string(), *printed);
        }
        for (n, (datum, _)) in data.iter().enumerate() {
            assert!(data[..n].iter().all(|(other, _)| other != datum), "{datum}");
        }
        let long = Datum::from(&[7usize; 1000][..]).to_string();
        assert!(long.starts_with("[7, 7") && long.contains("7, … 1000 in all, hash "), "{long}");
    }
}
