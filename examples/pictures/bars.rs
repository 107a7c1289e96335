//! Bars.

use super::canvas::{Anchor, Colour, Picture, Stroke, Text, text_width};
use super::heat::{Labels, Shown};

const LABEL: f64 = 12.0;
/// From one bar to the next.
const PITCH: f64 = 19.0;
const LARGEST: Colour = Colour(0x0072b2);
const OTHER: Colour = Colour(0x8fbfdc);
/// Room for the number behind a bar.
const NUMBER: f64 = 34.0;

/// Values from 0 up as bars to the right, one a line, each with its number if that is not 0.00. A NaN stands for nothing
/// there.
#[derive(Debug, Clone, Copy)]
pub struct Bars<'a> {
    /// May be empty.
    pub title: &'a str,
    pub labels: Labels<'a>,
    pub values: &'a [f32],
    /// The value of a bar of full length.
    pub top: f32,
    /// Its length.
    pub length: f64,
}

impl Bars<'_> {
    /// Draws them.
    pub fn picture(&self) -> Picture {
        let &Self { title, labels, values, top, length } = self;
        assert_eq!(values.len(), labels.names.len(), "a label for each bar");
        let above = if title.is_empty() { 0.0 } else { LABEL + 9.0 };
        let longest = labels.names.iter().map(|name| text_width(name, LABEL)).fold(0.0, f64::max);
        let left = if labels.shown == Shown::Yes { longest + 6.0 } else { 0.0 };
        let mut picture = Picture::new(left + length + NUMBER, above + PITCH * values.len() as f64);
        picture.text(left, LABEL, title, Text { size: LABEL + 1.0, ..Text::default() });
        let largest = values.iter().copied().fold(0.0, f32::max);
        for (i, (&value, name)) in values.iter().zip(labels.names).enumerate() {
            let (y, base) = (above + PITCH * i as f64, above + PITCH * (i as f64 + 0.5) + LABEL * 0.36);
            if labels.shown == Shown::Yes {
                let label = Text { size: LABEL, anchor: Anchor::End, ..Text::default() };
                picture.text(left - 6.0, base, name, label);
            }
            if value.is_nan() {
                continue;
            }
            let full = f64::from(value / top).clamp(0.0, 1.0) * length;
            picture.rect([left, y + 3.0, full, PITCH - 6.0], if value == largest { LARGEST } else { OTHER });
            if value < 0.005 {
                continue; // A column of 0.00 would say nothing.
            }
            let number = Text { size: LABEL - 1.0, colour: Colour::FAINT, ..Text::default() };
            picture.text(left + full + 4.0, base, &format!("{value:.2}"), number);
        }
        picture.line(&[(left, above), (left, above + PITCH * values.len() as f64)], 1.0, Stroke::Solid, Colour::INK);
        picture
    }
}
