//! The curve of the loss.

use super::Result;
use super::pictures::{Axis, Level, LineChart, Scale, Series, page, save};
use std::path::Path;

/// Points that are drawn: each is the mean of as many steps.
const POINTS: usize = 80;

/// Draws the loss of every step, and levels to compare it with, to `NAME.svg` and `NAME.png`.
pub(crate) fn curve(losses: &[f32], levels: &[Level<'_>], folder: &Path, name: &str, note: &str) -> Result<()> {
    let steps = losses.len().div_ceil(POINTS).max(1);
    let mean = |chunk: &[f32]| chunk.iter().map(|&x| f64::from(x)).sum::<f64>() / chunk.len() as f64;
    let point = |(n, chunk): (usize, &[f32])| ((n * steps + chunk.len() / 2 + 1) as f64, mean(chunk));
    let points: Vec<_> = losses.chunks(steps).enumerate().map(point).collect();
    let series = [Series { name: "training", points: &points }];
    let x = Axis { title: "step", scale: Scale::Linear };
    let y = Axis { title: "loss, nats a token", scale: Scale::Log10 };
    let chart = LineChart { title: "", x, y, series: &series, levels, size: (520.0, 300.0) };
    save(&page("Loss of each step", note, 1, &[chart.plot()], None), folder, name)
}
