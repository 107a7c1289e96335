//! Latency against load.

use crate::measured::Measured;
use crate::pictures::{Axis, LineChart, Picture, Scale, Series, page};

/// Times of first letters, whole texts and embeddings, and what was done and refused, against load.
pub(crate) fn picture(measured: &[Measured]) -> Picture {
    let points = |of: &dyn Fn(&Measured) -> f64| measured.iter().map(|m| (m.load, of(m))).collect::<Vec<_>>();
    let times = [
        ("first letter, median", points(&|m| m.first(0.5))),
        ("first letter, p99", points(&|m| m.first(0.99))),
        ("whole text, median", points(&|m| m.whole(0.5))),
        ("whole text, p99", points(&|m| m.whole(0.99))),
        ("embeddings, median", points(&|m| m.embedded(0.5))),
        ("embeddings, p99", points(&|m| m.embedded(0.99))),
    ];
    let rates = [
        ("asked", points(&|m| m.offered)),
        ("done", points(&|m| m.done_per_second())),
        ("refused", points(&|m| m.refused() * m.offered)),
    ];
    let chart = |y, scale, lines: &[(&str, Vec<(f64, f64)>)]| {
        let series: Vec<Series<'_>> = lines.iter().map(|(name, points)| Series { name, points }).collect();
        let (x, y) = (Axis { title: "load, of the capacity", scale: Scale::Linear }, Axis { title: y, scale });
        LineChart { title: "", x, y, series: &series, levels: &[], size: (330.0, 240.0) }.picture()
    };
    let panels = [chart("milliseconds", Scale::Log2, &times), chart("requests a second", Scale::Linear, &rates)];
    page("Latency against load", "Arrivals at random times; refused requests are not among the times", 2, &panels, None)
}
