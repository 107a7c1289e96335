//! Rows that select keys: the last words of this repository's documents look at all words before them, or at the few with the
//! highest scores.
//!
//! ```text
//! cargo run --release --example select            # pictures to target/pictures
//! cargo run --release --example select -- FOLDER
//! ```
//!
//! Heads are induction heads, made by hand of hashed words. Head `h` looks for places where the last `h + 1` words stood
//! before: the key of a word is made of the words before it, its value of the word itself.

#[path = "arguments/mod.rs"]
mod arguments;
#[path = "pictures/mod.rs"]
mod pictures;

use arguments::{Given, Output, Program};
use pictures::{Axis, HeatMap, Labels, Level, LineChart, Scale, Series, colour_bar, page, save};
use sdpa::{Alignment, Attention, Exec, Inputs, Outputs, Point, SelectedKeys, TopK, View, ViewMut, Workspace, top_k};
use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

const HEADS: usize = 4;
/// One for each bit of a hash.
const DIM: usize = 64;
/// Last words, which look.
const ROWS: usize = 64;
/// Score of a place with the same words before it. Others have scores of about 0 ± [`SHARPNESS`] / 8.
const SHARPNESS: f32 = 16.0;
const NUMBERS: [usize; 8] = [8, 32, 128, 512, 1024, 2048, 4096, 8192];
/// Number of keys of each list in the picture of chosen keys, and number of its columns.
const PICTURED: usize = 512;
const COLUMNS: usize = 100;
const RUNS: usize = 5;

const NOTE: &str = "\
Weight: share of all keys' softmax that the chosen keys have, on average. Errors: of a row's output, as a
vector, relative to its length over all keys. Rows share the reading of all keys; a list is read for one row.
A model has cheaper scores to choose by (an indexer: `Attention::indexer`).";

const DOCUMENTS: [&str; 10] = [
    include_str!("../docs/experiments.md"),
    include_str!("../docs/benchmarks.md"),
    include_str!("../docs/options.md"),
    include_str!("../docs/distributed.md"),
    include_str!("../docs/testing.md"),
    include_str!("../docs/layers.md"),
    include_str!("../DESIGN.md"),
    include_str!("../CONTRIBUTING.md"),
    include_str!("../CHANGELOG.md"),
    include_str!("../README.md"),
];

fn main() -> ExitCode {
    let about =
        "Compares attention to all words of a long text with attention to the few that have the highest scores.";
    Program { name: "select", about, flags: &[], output: Output::Pictures }.run(run)
}

fn run(given: &Given) -> Result<(), Box<dyn Error>> {
    let text = Text::read();
    let (dense, of_all) = timed(|| text.attend(ROWS, None))?;
    let (_, of_last) = timed(|| text.attend(1, None))?;
    let scores = text.scores()?;
    let start = Instant::now();
    text.lists(&scores, ROWS, NUMBERS[NUMBERS.len() - 1])?;
    let choosing = start.elapsed().as_secs_f64() * 1e3;
    println!("{} words; the last {ROWS} look at all words before them; {HEADS} heads of {DIM}.", text.words);
    println!("All keys: {of_all:.2} ms, for the last word alone {of_last:.2} ms.");
    println!("Choosing the {} highest scores of each row and head: {choosing:.1} ms.", NUMBERS[NUMBERS.len() - 1]);
    println!("\nRows select the keys with the highest scores, each in each head:\n");
    println!("  keys    weight  median error  largest error       time  last word");
    let mut steps = Vec::new();
    for keys in NUMBERS.into_iter().filter(|&keys| keys + ROWS <= text.words) {
        let [selected, last] = [text.lists(&scores, ROWS, keys)?, text.lists(&scores, 1, keys)?];
        let (answer, of_all) = timed(|| text.attend(ROWS, Some(&selected)))?;
        let (_, of_last) = timed(|| text.attend(1, Some(&last)))?;
        let errors = answer.errors(&dense);
        let [median, largest] = [errors[errors.len() / 2], errors[errors.len() - 1]];
        let weight = 100.0 * answer.weight(&dense);
        println!("{keys:>6}  {weight:>6.2} %  {median:>12.2e}  {largest:>13.2e}  {of_all:>6.2} ms  {of_last:>6.3} ms");
        steps.push(Step { keys, times: [of_all, of_last], median, largest });
    }
    println!("\n{NOTE}\n");
    draw_keys(&text, &text.lists(&scores, ROWS, PICTURED)?, given)?;
    draw_errors(&steps, [of_all, of_last], given)
}

/// Queries, keys and values of a text, `[1, HEADS, words, DIM]`.
struct Text {
    words: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Results of a call.
struct Answer {
    out: Vec<f32>,
    lse: Vec<f32>,
}

/// Figures of lists of one length.
struct Step {
    keys: usize,
    /// Times of all rows and of the last, in milliseconds.
    times: [f64; 2],
    median: f64,
    largest: f64,
}

impl Text {
    fn read() -> Self {
        let words = DOCUMENTS.iter().flat_map(|text| text.split(|c: char| !c.is_alphanumeric()));
        let hashes: Vec<u64> = words.filter(|word| !word.is_empty()).map(hash).collect();
        let n = hashes.len();
        let mut text = Self { words: n, q: Vec::new(), k: Vec::new(), v: Vec::new() };
        for head in 0..HEADS {
            // Words before one are told apart by how far before it they are.
            let context = |end: usize, to: &mut Vec<f32>| {
                let before = (0..=head).map(|far| end.checked_sub(far + 1).map(|at| mixed(hashes[at], far as u64 + 1)));
                to.extend(sum(before.flatten(), ((head + 1) as f32).sqrt()));
            };
            (0..n).for_each(|word| context(word, &mut text.k));
            // What comes after the word: its query is the key of the next.
            (n - ROWS..n).for_each(|word| context(word + 1, &mut text.q));
            hashes.iter().for_each(|&word| text.v.extend(sum(std::iter::once(mixed(word, 0)), 1.0)));
        }
        text
    }

    /// Inputs of the last rows.
    fn inputs(&self, rows: usize) -> Result<Inputs<'_>, sdpa::Error> {
        let (of_head, dim) = ((ROWS * DIM) as isize, DIM as isize);
        let strides = [0, of_head, dim, 1];
        let q = View::from_strides(&self.q, (ROWS - rows) * DIM, [1, HEADS, rows, DIM], strides)?;
        let of_words = |x| View::bhld(x, [1, HEADS, self.words, DIM]);
        Ok(Inputs::new(q, of_words(&self.k)?, of_words(&self.v)?))
    }

    /// Computes attention of the last rows to all keys, or to those of lists.
    fn attend(&self, rows: usize, selected: Option<&SelectedKeys>) -> Result<Answer, sdpa::Error> {
        let dense = self.inputs(rows)?;
        let inputs = selected.map_or(dense, |selected| dense.selected(selected));
        let mut answer = Answer { out: vec![0.0; HEADS * rows * DIM], lse: vec![0.0; HEADS * rows] };
        let outputs = Outputs::new(ViewMut::bhld(&mut answer.out, [1, HEADS, rows, DIM])?)
            .lse(ViewMut::bhl(&mut answer.lse, [1, HEADS, rows])?);
        sdpa::attention(&attention(), inputs, outputs)?;
        Ok(answer)
    }

    /// Returns the scores of all keys, `[HEADS, ROWS, words]`.
    fn scores(&self) -> Result<Vec<f32>, sdpa::Error> {
        let (mut out, mut scores) = (vec![0.0; HEADS * ROWS * DIM], vec![0.0; HEADS * ROWS * self.words]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, HEADS, ROWS, DIM])?)
            .scores(Point::Masked, ViewMut::bhld(&mut scores, [1, HEADS, ROWS, self.words])?);
        sdpa::attention(&attention(), self.inputs(ROWS)?, outputs)?;
        Ok(scores)
    }

    /// Returns lists of the keys with the highest of these scores, for each of the last rows of each head.
    fn lists(&self, scores: &[f32], rows: usize, keys: usize) -> Result<SelectedKeys, sdpa::Error> {
        let of_row = [(ROWS * self.words) as isize, self.words as isize];
        let strides = [0, of_row[0], of_row[1], 1];
        let scores = View::from_strides(scores, (ROWS - rows) * self.words, [1, HEADS, rows, self.words], strides)?;
        let mut selected = SelectedKeys::new();
        top_k(scores, &TopK::new(keys), Exec::default(), &mut Workspace::new(), &mut selected)?;
        Ok(selected)
    }
}

fn attention() -> Attention {
    Attention::new().scale(SHARPNESS).causal().align(Alignment::BottomRight)
}

/// FNV-1a of a word in small letters.
fn hash(word: &str) -> u64 {
    let add = |hash: u64, byte: u8| (hash ^ u64::from(byte.to_ascii_lowercase())).wrapping_mul(0x0100_0000_01b3);
    word.bytes().fold(0xcbf2_9ce4_8422_2325, add)
}

/// Another hash of a hash, for each number (splitmix64).
fn mixed(hash: u64, number: u64) -> u64 {
    let x = hash.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Sums vectors of length 1 whose signs are the bits of hashes, and divides.
fn sum(hashes: impl Iterator<Item = u64>, divisor: f32) -> [f32; DIM] {
    let mut sums = [0.0; DIM];
    for hash in hashes {
        for (bit, sum) in sums.iter_mut().enumerate() {
            *sum += if hash >> bit & 1 == 1 { 0.125 } else { -0.125 } / divisor;
        }
    }
    sums
}

impl Answer {
    /// Errors of the rows against those of another answer, the smallest first.
    fn errors(&self, dense: &Self) -> Vec<f64> {
        let length = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let rows = self.out.chunks_exact(DIM).zip(dense.out.chunks_exact(DIM));
        let error = |(a, b): (&[f32], &[f32])| {
            length(&mut a.iter().zip(b).map(|(a, b)| a - b)) / length(&mut b.iter().copied())
        };
        let mut errors: Vec<f64> = rows.map(error).collect();
        errors.sort_unstable_by(f64::total_cmp);
        errors
    }

    /// Share of the softmax of another answer that this one's keys have, on average.
    fn weight(&self, dense: &Self) -> f64 {
        let shares = self.lse.iter().zip(&dense.lse).map(|(a, b)| f64::from(a - b).exp());
        shares.sum::<f64>() / self.lse.len() as f64
    }
}

/// Runs a call some times: its answer, and the time in the middle in milliseconds.
fn timed<T>(mut call: impl FnMut() -> Result<T, sdpa::Error>) -> Result<(T, f64), sdpa::Error> {
    let answer = call()?;
    let mut times = [0.0; RUNS];
    for time in &mut times {
        let start = Instant::now();
        call()?;
        *time = start.elapsed().as_secs_f64() * 1e3;
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok((answer, times[RUNS / 2]))
}

/// Draws how many keys each row of a head has chosen from each part of the text.
fn draw_keys(text: &Text, selected: &SelectedKeys, given: &Given) -> Result<(), Box<dyn Error>> {
    let names = |n: usize, every: usize, name: &dyn Fn(usize) -> String| -> Vec<String> {
        (0..n).map(|i| if i.is_multiple_of(every) { name(i) } else { String::new() }).collect()
    };
    let rows = names(ROWS, 8, &|row| (text.words - ROWS + row).to_string());
    let columns = names(COLUMNS, 10, &|column| (column * text.words / COLUMNS).to_string());
    let counts = (0..HEADS).map(|head| {
        let mut counts = vec![0f32; ROWS * COLUMNS];
        for row in 0..ROWS {
            let keys = selected.numbers(0, head, row).into_iter().flatten();
            keys.for_each(|key| counts[row * COLUMNS + key * COLUMNS / text.words] += 1.0);
        }
        counts.iter().map(|&n| if n == 0.0 { f32::NAN } else { n }).collect::<Vec<_>>()
    });
    let counts: Vec<Vec<f32>> = counts.collect();
    let top = 2.0 * (PICTURED as f32 / COLUMNS as f32).ceil();
    let panel = |(head, values): (usize, &Vec<f32>)| {
        let title = format!("head {head}: the last {} word(s) stood before it", head + 1);
        let (rows, columns) = (Labels::new("row", &rows), Labels::new("key", &columns));
        HeatMap { title: &title, rows, columns, values, top, cell: 4.0 }.picture()
    };
    let panels: Vec<_> = counts.iter().enumerate().map(panel).collect();
    let note = format!(
        "Each row has a list of {PICTURED} of {} words; a cell counts those from a hundredth of the text.\nBlank: none.",
        text.words
    );
    let page = page("Chosen keys", &note, 2, &panels, Some(colour_bar("keys", top, 220.0)));
    save(&page, given.folder(), "select-keys")
}

/// Draws error and time against the number of keys.
fn draw_errors(steps: &[Step], dense: [f64; 2], given: &Given) -> Result<(), Box<dyn Error>> {
    let points = |of: fn(&Step) -> f64| -> Vec<_> { steps.iter().map(|step| (step.keys as f64, of(step))).collect() };
    let (median, largest) = (points(|step| step.median), points(|step| step.largest));
    let (of_all, of_last) = (points(|step| step.times[0]), points(|step| step.times[1]));
    let all_rows = format!("{ROWS} rows");
    let all_keys = format!("{all_rows}, all keys");
    let x = Axis { title: "keys of a list", scale: Scale::Log2 };
    let errors = LineChart {
        title: "error of a row's output",
        x,
        y: Axis { title: "relative to all keys", scale: Scale::Log10 },
        series: &[Series { name: "median row", points: &median }, Series { name: "worst row", points: &largest }],
        levels: &[],
        size: (420.0, 260.0),
    };
    let times = LineChart {
        title: "time",
        x,
        y: Axis { title: "ms", scale: Scale::Log10 },
        series: &[Series { name: &all_rows, points: &of_all }, Series { name: "last row", points: &of_last }],
        levels: &[Level { name: &all_keys, y: dense[0] }, Level { name: "last row, all keys", y: dense[1] }],
        size: (420.0, 260.0),
    };
    let note =
        format!("{ROWS} rows, {HEADS} heads of {DIM}; keys chosen by exact scores, which the time does not count.");
    let page = page("Selected keys in place of all", &note, 1, &[errors.picture(), times.picture()], None);
    save(&page, given.folder(), "select-error")
}
