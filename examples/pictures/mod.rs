//! Pictures for examples: heat maps, bars, lines, and pages of them, as SVG and the same as PNG.
//!
//! Lengths are pixels at normal size. A picture is drawn into its own corner and may be placed in another; [`page`] puts
//! a title over several. The text of an SVG is set in the viewer's own sans-serif, that of a PNG in DejaVu Sans, which
//! is carried along: a fresh machine has no fonts.
#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "every program compiles this module and uses its part of it"
)]

mod bars;
mod canvas;
mod chart;
mod font;
mod heat;
mod raster;
mod svg;
mod ticks;

pub use bars::Bars;
pub use canvas::{Anchor, Colour, Picture, Stroke, Text, text_width};
pub use chart::{Axis, Level, LineChart, Series};
pub use heat::{HeatMap, Labels, Shown, colour_bar};
pub use raster::png;
pub use svg::svg;
pub use ticks::Scale;

use std::error::Error;
use std::path::Path;

/// Between a page's edge and what is on it.
const MARGIN: f64 = 16.0;
/// Between the panels of a page.
const GAP: f64 = 14.0;
const TITLE: f64 = 17.0;
const NOTE: f64 = 12.5;

/// Panels under a title and a line or more of explanation, so many to a row, and to their right whatever explains them
/// all, such as a [`colour_bar`].
pub fn page(title: &str, note: &str, per_row: usize, panels: &[Picture], beside: Option<Picture>) -> Picture {
    let rows: Vec<&[Picture]> = panels.chunks(per_row.max(1)).collect();
    let column = |c: usize| rows.iter().filter_map(|row| row.get(c)).map(Picture::width).fold(0.0, f64::max);
    let columns: Vec<f64> = (0..per_row.min(panels.len())).map(column).collect();
    let heights: Vec<f64> = rows.iter().map(|row| row.iter().map(Picture::height).fold(0.0, f64::max)).collect();
    let spread = |sizes: &[f64]| sizes.iter().sum::<f64>() + GAP * sizes.len().saturating_sub(1) as f64;

    let notes: Vec<&str> = note.lines().collect();
    let top = MARGIN + TITLE + 8.0 + notes.len() as f64 * (NOTE + 5.0) + GAP / 2.0;
    let aside = beside.as_ref().map_or(0.0, |b| b.width() + GAP);
    let wide = notes.iter().map(|n| text_width(n, NOTE)).fold(text_width(title, TITLE), f64::max);
    let inner = (spread(&columns) + aside).max(wide);
    let below = spread(&heights).max(beside.as_ref().map_or(0.0, Picture::height));

    let mut page = Picture::new(inner + 2.0 * MARGIN, top + below + MARGIN);
    page.text(MARGIN, MARGIN + TITLE, title, Text { size: TITLE, ..Text::default() });
    for (n, line) in notes.iter().enumerate() {
        let y = MARGIN + TITLE + 8.0 + (n + 1) as f64 * (NOTE + 5.0) - 5.0;
        page.text(MARGIN, y, line, Text { size: NOTE, colour: Colour::FAINT, ..Text::default() });
    }
    let mut y = top;
    for (row, height) in rows.iter().zip(heights) {
        let mut x = MARGIN;
        for (panel, width) in row.iter().zip(&columns) {
            page.place(x, y, panel);
            x += width + GAP;
        }
        y += height + GAP;
    }
    if let Some(beside) = &beside {
        page.place(MARGIN + spread(&columns) + GAP, top, beside);
    }
    page
}

/// Writes `NAME.svg` and `NAME.png` and says so.
pub fn save(picture: &Picture, folder: &Path, name: &str) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(folder)?;
    let path = folder.join(name);
    std::fs::write(path.with_extension("svg"), svg(picture))?;
    std::fs::write(path.with_extension("png"), png(picture)?)?;
    println!("wrote {0}.svg and {0}.png", path.display());
    Ok(())
}
