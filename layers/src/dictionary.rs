//! Look-up by similarity, as attention.

use crate::compute::Compute;
use crate::error::{LONGEST_DIM, exactly, multiple_of, room, same};
use core::marker::PhantomData;
use sdpa::{Attention, Error, Inputs, Outputs, Point, View, ViewMut};

/// Number of queries for which [`Dictionary::best_many`] holds scores at a time: enough to make packing the keys a small
/// part of the work.
const BEST_ROWS: usize = 128;

/// Type with values that can be added with weights: a list of numbers, of the same length for every value of a dictionary.
///
/// ```
/// use sdpa_layers::{Compute, Dictionary, Weighable};
/// /// Colour that can be mixed.
/// struct Colour([f32; 3]);
/// impl Weighable for Colour {
///     fn write(&self, numbers: &mut Vec<f32>) {
///         numbers.extend(self.0);
///     }
///     fn read(numbers: &[f32]) -> Self {
///         Self([numbers[0], numbers[1], numbers[2]])
///     }
/// }
/// let mut colours = Dictionary::new(2, 0.1)?; // keys: warm, light
/// colours.insert(&[1.0, 0.2], Colour([1.0, 0.0, 0.0]))?;
/// colours.insert(&[0.2, 1.0], Colour([1.0, 1.0, 0.0]))?;
/// assert_eq!(colours.get(&[1.0, 1.0], &mut Compute::default())?.value.0, [1.0, 0.5, 0.0]); // orange
/// # Ok::<(), sdpa::Error>(())
/// ```
pub trait Weighable: Sized {
    /// Appends the numbers of this value to `numbers`.
    fn write(&self, numbers: &mut Vec<f32>);

    /// Returns the value with these numbers, which [`Self::write`] wrote.
    fn read(numbers: &[f32]) -> Self;
}

impl Weighable for f32 {
    fn write(&self, numbers: &mut Vec<f32>) {
        numbers.push(*self);
    }

    fn read(numbers: &[f32]) -> Self {
        numbers[0]
    }
}

impl<const N: usize> Weighable for [f32; N] {
    fn write(&self, numbers: &mut Vec<f32>) {
        numbers.extend_from_slice(self);
    }

    fn read(numbers: &[f32]) -> Self {
        core::array::from_fn(|i| numbers[i])
    }
}

impl Weighable for Vec<f32> {
    fn write(&self, numbers: &mut Vec<f32>) {
        numbers.extend_from_slice(self);
    }

    fn read(numbers: &[f32]) -> Self {
        numbers.to_vec()
    }
}

/// Dictionary with look-up by similarity: a query returns the mean of the values, weighted by the similarity of their
/// keys to the query.
///
/// The weights are softmax(cos(query, key) / temperature). This is attention on vectors scaled to length 1, with scale
/// 1 / temperature, computed by the fused call. The lower the temperature, the larger the weight of the best key: at
/// 0.001, a key with a cosine lower by 0.1 has e⁻¹⁰⁰ times the weight, and a query equal to a key returns that key's
/// value, as in any dictionary.
///
/// ```
/// use sdpa_layers::{Compute, Dictionary};
///
/// let mut prices = Dictionary::new(2, 0.1)?; // keys of two numbers: sweet, sour
/// prices.insert(&[1.0, 0.1], 3.0)?;
/// prices.insert(&[0.1, 1.0], 5.0)?;
/// let found = prices.get(&[2.0, 2.0], &mut Compute::default())?; // as much like one as like the other
/// assert_eq!((found.value, found.weights), (4.0, vec![0.5, 0.5]));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Dictionary<V> {
    width: usize,
    temperature: f32,
    len: usize,
    /// `[len, width]`, each of length 1.
    keys: Vec<f32>,
    /// `[len, value_dim]`.
    values: Vec<f32>,
    kind: PhantomData<fn() -> V>,
}

/// Result of [`Dictionary::get`].
///
/// ```
/// use sdpa_layers::{Compute, Dictionary, Found};
/// let mut dictionary = Dictionary::new(2, 0.001)?;
/// dictionary.insert(&[0.0, 1.0], 3.0)?;
/// dictionary.insert(&[1.0, 0.0], 5.0)?;
/// let Found { best, similarity, weights, value } = dictionary.get(&[2.0, 0.0], &mut Compute::default())?;
/// assert_eq!((best, similarity, weights, value), (1, 1.0, vec![0.0, 1.0], 5.0));
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Found<V> {
    /// Index, by the order of insertion, of the entry with the key most similar to the query; the first if several are.
    pub best: usize,
    /// Cosine between that key and the query, up to rounding.
    pub similarity: f32,
    /// Weight of every entry, by the order of insertion; the weights sum to 1.
    pub weights: Vec<f32>,
    /// Weighted mean of the values.
    pub value: V,
}

impl<V: Weighable> Dictionary<V> {
    /// Creates an empty dictionary for keys of `width` numbers.
    ///
    /// # Errors
    /// [`Error::Empty`] if `width` is 0, [`Error::Range`] if it is too large; [`Error::Number`] as
    /// [`Self::set_temperature`].
    pub fn new(width: usize, temperature: f32) -> Result<Self, Error> {
        if width == 0 {
            return Err(Error::Empty { argument: "dictionary", what: "width" });
        }
        LONGEST_DIM.check("dictionary", "width", width)?;
        let empty = Self { width, temperature, len: 0, keys: Vec::new(), values: Vec::new(), kind: PhantomData };
        checked(temperature).map(|_| empty)
    }

    /// Sets the temperature, in units of the cosine: a difference of one temperature changes the weight by a factor e.
    ///
    /// # Errors
    /// [`Error::Number`] unless the temperature is positive, and it and its reciprocal are finite.
    pub fn set_temperature(&mut self, temperature: f32) -> Result<(), Error> {
        self.temperature = checked(temperature)?;
        Ok(())
    }

    /// Adds an entry. Only the direction of its key, `[width]`, matters. If a key is added twice, both have a share
    /// of the weight.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a key of another width, or a value of another length than the earlier ones;
    /// [`Error::Row`] for a key without a direction (zero or non-finite); [`Error::Empty`] for a value without numbers.
    pub fn insert(&mut self, key: &[f32], value: V) -> Result<(), Error> {
        same("key", "width", key.len(), self.width, "the dictionary")?;
        let mut numbers = Vec::new();
        value.write(&mut numbers);
        if numbers.is_empty() {
            return Err(Error::Empty { argument: "value", what: "length" });
        }
        LONGEST_DIM.check("dictionary", "value length", numbers.len())?;
        if self.len > 0 {
            same("value", "length", numbers.len(), self.value_dim(), "the dictionary")?;
        }
        let key = unit("keys", self.len, key)?;
        self.keys.extend(key);
        self.values.extend(numbers);
        self.len += 1;
        Ok(())
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true before the first [`Self::insert`].
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the value of one entry, by the order of insertion.
    pub fn value(&self, entry: usize) -> Option<V> {
        let dim = self.value_dim();
        (entry < self.len).then(|| V::read(&self.values[entry * dim..(entry + 1) * dim]))
    }

    /// Looks up one query, `[width]`. Time entries·(width + value length).
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a query of another width, [`Error::Row`] for a query without a direction (zero or
    /// non-finite), [`Error::Empty`] if there are no entries.
    pub fn get(&self, query: &[f32], compute: &mut Compute) -> Result<Found<V>, Error> {
        same("query", "width", query.len(), self.width, "the dictionary")?;
        self.some()?;
        let query: Vec<f32> = unit("query", 0, query)?.collect();
        let (mut scores, mut weights) = (vec![0.0; self.len], vec![0.0; self.len]);
        let mut value = vec![0.0; self.value_dim()];
        let pairs = [1, 1, 1, self.len];
        let outputs = Outputs::new(ViewMut::bhld(&mut value, [1, 1, 1, self.value_dim()])?)
            .scores(Point::Raw, ViewMut::bhld(&mut scores, pairs)?)
            .weights(ViewMut::bhld(&mut weights, pairs)?);
        self.run(&query, self.value_dim(), outputs, compute)?;
        let best = first_largest(&scores);
        let similarity = scores[best] * self.temperature;
        Ok(Found { best, similarity, weights, value: V::read(&value) })
    }

    /// Looks up many queries, `[queries, width]`, and writes their weighted values to `out`, `[queries, value length]`.
    /// One fused call that takes memory only for the queries: weights are never stored. Each row has the bits of
    /// [`Self::get`].
    ///
    /// # Errors
    /// As [`Self::get`]; [`Error::Range`] if `out` has another length; [`Error::Memory`]. `out` is then untouched.
    pub fn get_many(&self, queries: &[f32], out: &mut [f32], compute: &mut Compute) -> Result<(), Error> {
        let rows = self.rows(queries)?;
        let dim = self.value_dim();
        exactly(rows.saturating_mul(dim), "queries × value length").check("out", "length", out.len())?;
        let mut units = compute.buffer("queries", [rows, self.width])?;
        let done = self.units(queries, &mut units).and_then(|()| {
            let out = ViewMut::bhld(out, [1, 1, rows, dim])?;
            self.run(&units, dim, Outputs::new(out), compute)
        });
        compute.recycle(units);
        done
    }

    /// Returns the index of the most similar entry for each of many queries, `[queries, width]`; the first if several
    /// are. Holds the scores of 128 queries at a time.
    ///
    /// # Errors
    /// As [`Self::get`], and [`Error::Memory`].
    pub fn best_many(&self, queries: &[f32], compute: &mut Compute) -> Result<Vec<usize>, Error> {
        let rows = self.rows(queries)?;
        let chunk = rows.min(BEST_ROWS);
        let [mut units, mut scores, mut out] =
            compute.buffers("queries and scores", [[rows, self.width], [chunk, self.len], [chunk, 1]])?;
        let mut best = room("best entries", rows)?;
        let done = self.units(queries, &mut units).and_then(|()| {
            for units in units.chunks(BEST_ROWS * self.width) {
                let rows = units.len() / self.width;
                let scores = &mut scores[..rows * self.len];
                // A call must have an output: the smallest is one number of each value.
                let outputs = Outputs::new(ViewMut::bhld(&mut out[..rows], [1, 1, rows, 1])?)
                    .scores(Point::Raw, ViewMut::bhld(scores, [1, 1, rows, self.len])?);
                self.run(units, 1, outputs, compute)?;
                best.extend(scores.chunks(self.len).map(first_largest));
            }
            Ok(())
        });
        for buffer in [units, scores, out] {
            compute.recycle(buffer);
        }
        done.map(|()| best)
    }

    fn value_dim(&self) -> usize {
        self.values.len() / self.len.max(1)
    }

    fn some(&self) -> Result<(), Error> {
        if self.is_empty() { Err(Error::Empty { argument: "dictionary", what: "number of entries" }) } else { Ok(()) }
    }

    /// Returns the number of queries, if they can be looked up.
    fn rows(&self, queries: &[f32]) -> Result<usize, Error> {
        self.some()?;
        multiple_of(self.width, "the width of the dictionary").check("queries", "length", queries.len())?;
        Ok(queries.len() / self.width)
    }

    /// Scales each query to length 1.
    fn units(&self, queries: &[f32], units: &mut [f32]) -> Result<(), Error> {
        let rows = queries.chunks(self.width).zip(units.chunks_mut(self.width));
        for (row, (query, to)) in rows.enumerate() {
            to.iter_mut().zip(unit("queries", row, query)?).for_each(|(to, x)| *to = x);
        }
        Ok(())
    }

    /// Runs the fused call on queries of length 1 and the first `numbers` numbers of every value.
    fn run(&self, units: &[f32], numbers: usize, outputs: Outputs<'_>, compute: &mut Compute) -> Result<(), Error> {
        let shape = |rows, dim| [1, 1, rows, dim];
        let inputs = Inputs::new(
            View::bhld(units, shape(units.len() / self.width, self.width))?,
            View::bhld(&self.keys, shape(self.len, self.width))?,
            View::from_strides(&self.values, 0, shape(self.len, numbers), [0, 0, self.value_dim() as isize, 1])?,
        );
        compute.attend(Attention::new().scale(1.0 / self.temperature).problem(inputs, outputs)?)
    }
}

fn checked(temperature: f32) -> Result<f32, Error> {
    if temperature > 0.0 && temperature.is_finite() && (1.0 / temperature).is_finite() {
        return Ok(temperature);
    }
    Err(Error::Number {
        argument: "temperature",
        got: temperature,
        expected: "positive and, like 1/temperature, finite",
    })
}

/// Scales a vector to length 1, in f64: there no square of an f32 overflows or underflows.
fn unit<'a>(
    argument: &'static str,
    row: usize,
    vector: &'a [f32],
) -> Result<impl Iterator<Item = f32> + use<'a>, Error> {
    let norm = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    if !(norm > 0.0 && norm.is_finite()) {
        let got = norm as f32;
        return Err(Error::Row { argument, what: "norm", row, got, expected: "positive and finite" });
    }
    Ok(vector.iter().map(move |&x| (f64::from(x) / norm) as f32))
}

/// Returns the index of the largest score, the first if several are equal.
fn first_largest(scores: &[f32]) -> usize {
    let larger = |best: usize, i: usize| if scores[i] > scores[best] { i } else { best };
    (0..scores.len()).fold(0, larger)
}
