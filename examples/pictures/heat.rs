//! Heat maps.

use super::canvas::{Anchor, Colour, Picture, Stroke, Text, text_width};

/// Cells at least this wide carry their value in print.
const PRINTED: f64 = 34.0;
const LABEL: f64 = 12.0;
/// Between a label and its cell.
const NEAR: f64 = 5.0;
/// The name of an axis, and the room it takes.
const AXIS: f64 = 20.0;
/// Where there is nothing.
const BLANK: Colour = Colour(0xeeeeee);
/// Width of the bar itself.
const BAR: f64 = 14.0;

/// A matrix of values from 0 up, dark to light (viridis: as many steps for the eye as for the number). A NaN stands for
/// nothing there, and is left blank.
#[derive(Debug, Clone, Copy)]
pub struct HeatMap<'a> {
    /// May be empty.
    pub title: &'a str,
    pub rows: Labels<'a>,
    pub columns: Labels<'a>,
    /// `[rows, columns]`.
    pub values: &'a [f32],
    /// What is lightest.
    pub top: f32,
    /// Side of a cell. At 34 or more, cells show their value.
    pub cell: f64,
}

/// What the rows or columns are.
#[derive(Debug, Clone, Copy)]
pub struct Labels<'a> {
    /// What they are as a whole; may be empty.
    pub axis: &'a str,
    /// One each.
    pub names: &'a [String],
    /// Left out in a panel if its neighbour has them.
    pub shown: Shown,
}

/// Whether labels are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    Yes,
    No,
}

impl<'a> Labels<'a> {
    pub fn new(axis: &'a str, names: &'a [String]) -> Self {
        Self { axis, names, shown: Shown::Yes }
    }

    /// Counted, but not drawn.
    #[must_use]
    pub fn hidden(self) -> Self {
        Self { shown: Shown::No, ..self }
    }

    fn longest(&self) -> f64 {
        self.names.iter().map(|name| text_width(name, LABEL)).fold(0.0, f64::max)
    }
}

impl HeatMap<'_> {
    /// Draws it.
    pub fn picture(&self) -> Picture {
        let &Self { title, rows, columns, values, top, cell } = self;
        let (height, width) = (rows.names.len(), columns.names.len());
        assert_eq!(values.len(), height * width, "a heat map of {height} rows and {width} columns");
        let axis = |labels: &Labels<'_>| if labels.axis.is_empty() { 0.0 } else { AXIS };
        // Column labels hang down to the left, the steeper the closer they are.
        let turn: f64 = if cell < 2.0 * LABEL { 60.0 } else { 45.0 };
        let (sin, cos) = turn.to_radians().sin_cos();
        let (left, below) = (
            if rows.shown == Shown::Yes { axis(&rows) + rows.longest() + NEAR } else { 0.0 },
            if columns.shown == Shown::Yes {
                NEAR + columns.longest() * sin + LABEL * cos + axis(&columns)
            } else {
                0.0
            },
        );
        let above = if title.is_empty() { 0.0 } else { LABEL + 9.0 };
        let (across, down) = (cell * width as f64, cell * height as f64);
        let mut picture = Picture::new(left + across, above + down + below);
        if !title.is_empty() {
            let middle = Text { size: LABEL + 1.0, anchor: Anchor::Middle, ..Text::default() };
            picture.text(left + across / 2.0, LABEL, title, middle);
        }
        for (n, &value) in values.iter().enumerate() {
            let (x, y) = (left + cell * (n % width) as f64, above + cell * (n / width) as f64);
            let share = f64::from(value / top).clamp(0.0, 1.0);
            let fill = if value.is_nan() { BLANK } else { viridis(share) };
            picture.rect([x, y, cell, cell], fill);
            if cell >= PRINTED && !value.is_nan() {
                let colour = if luminance(share) > 0.2 { Colour::BLACK } else { Colour::WHITE };
                let size = cell * 0.3;
                let middle = Text { size, anchor: Anchor::Middle, colour, ..Text::default() };
                picture.text(x + cell / 2.0, y + cell / 2.0 + size * 0.36, &format!("{value:.2}"), middle);
            }
        }
        let label = Text { size: LABEL, anchor: Anchor::End, ..Text::default() };
        if rows.shown == Shown::Yes {
            for (i, name) in rows.names.iter().enumerate() {
                picture.text(left - NEAR, above + cell * (i as f64 + 0.5) + LABEL * 0.36, name, label);
            }
            let axis = Text { anchor: Anchor::Middle, colour: Colour::FAINT, turn: -90.0, ..label };
            picture.text(LABEL, above + down / 2.0, rows.axis, axis);
        }
        if columns.shown == Shown::Yes {
            for (j, name) in columns.names.iter().enumerate() {
                let (x, y) = (left + cell * (j as f64 + 0.5), above + down + NEAR);
                // The middle of the last letter's height is under the middle of the cell.
                let at = (x + LABEL * 0.36 * sin, y + LABEL * 0.7 * cos);
                picture.text(at.0, at.1, name, Text { turn: -turn, ..label });
            }
            let axis = Text { anchor: Anchor::Middle, colour: Colour::FAINT, ..label };
            picture.text(left + across / 2.0, above + down + below - 4.0, columns.axis, axis);
        }
        picture
    }
}

/// What the colours of a heat map mean, from 0 to `top`, so high.
pub fn colour_bar(what: &str, top: f32, height: f64) -> Picture {
    let above = LABEL + 12.0;
    let long = height - above - LABEL / 2.0;
    let ticks = super::ticks::linear(0.0, f64::from(top), 5);
    let labels: Vec<(f64, String)> = ticks.iter().map(|&t| (t, format!("{t:.2}"))).collect();
    let widest = labels.iter().map(|(_, label)| text_width(label, LABEL)).fold(0.0, f64::max);
    let mut picture = Picture::new((BAR + 7.0 + widest).max(text_width(what, LABEL)), height);
    picture.text(0.0, LABEL, what, Text { size: LABEL, colour: Colour::FAINT, ..Text::default() });
    let steps = long.ceil() as usize;
    for n in 0..steps {
        let share = 1.0 - n as f64 / (steps - 1) as f64;
        picture.rect([0.0, above + n as f64, BAR, 1.0], viridis(share));
    }
    for (value, label) in labels {
        let y = above + (steps as f64 - 0.5) * (1.0 - value / f64::from(top));
        picture.line(&[(BAR, y), (BAR + 4.0, y)], 1.0, Stroke::Solid, Colour::INK);
        picture.text(BAR + 7.0, y + LABEL * 0.36, &label, Text { size: LABEL, ..Text::default() });
    }
    picture
}

/// How light that colour is, from 0 to 1 (WCAG 2); black reads better than white from about 0.2 up.
fn luminance(share: f64) -> f64 {
    let (red, green, blue) = colorous::VIRIDIS.eval_continuous(share).as_tuple();
    let linear = |c: u8| (f64::from(c) / 255.0).powf(2.2);
    0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)
}

fn viridis(share: f64) -> Colour {
    let (red, green, blue) = colorous::VIRIDIS.eval_continuous(share).as_tuple();
    Colour(u32::from_be_bytes([0, red, green, blue]))
}
