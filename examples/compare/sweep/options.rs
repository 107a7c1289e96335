//! Lengths and widths to sweep over, as the command line gives them.

use crate::args::wrong;
use crate::failure::Result;
use std::path::PathBuf;

/// The longest sequence and the widest head that can be asked for: their tensors still fit most machines.
pub(crate) const LONGEST: usize = 65536;
pub(crate) const WIDEST: usize = 1024;
/// Flags that make no sense here.
pub(crate) const OF_ONE_CALL: [&str; 13] = [
    "--backward",
    "--shape",
    "--scale",
    "--align",
    "--window",
    "--softcap",
    "--selected",
    "--output",
    "--scores",
    "--causal",
    "--weights",
    "--explain",
    "--json",
];

/// Lengths and widths to sweep over, and the folder of the pictures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sweep {
    pub(crate) folder: PathBuf,
    pub(crate) lengths: Vec<usize>,
    pub(crate) dims: Vec<usize>,
}

impl Sweep {
    /// Creates the sweep that was asked for; what was not named is as usual.
    pub(crate) fn new(folder: Option<PathBuf>, lengths: Option<Vec<usize>>, dims: Option<Vec<usize>>) -> Self {
        Self {
            folder: folder.unwrap_or_else(|| PathBuf::from("target/pictures")),
            lengths: lengths.unwrap_or_else(|| (4..=14).map(|n| 1 << n).collect()),
            dims: dims.unwrap_or_else(|| vec![32, 64, 128, 256]),
        }
    }
}

/// Reads `N,N,...`, and gives each once, in order.
pub(crate) fn sizes(flag: &str, text: &str, most: usize) -> Result<Vec<usize>> {
    let size = |text: &str| text.trim().parse().ok().filter(|size| (1..=most).contains(size));
    let sizes: Option<Vec<usize>> = text.split(',').map(size).collect();
    let expected = format!("whole numbers from 1 to {most}, with commas between them");
    let mut sizes = sizes.ok_or_else(|| wrong(flag, text, &expected))?;
    sizes.sort_unstable();
    sizes.dedup();
    Ok(sizes)
}
