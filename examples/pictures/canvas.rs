//! What pictures are drawn with: rectangles, lines, polygons, circles and text.

use super::font;

/// What is drawn so far, in a frame of fixed size.
#[derive(Debug, Clone)]
pub struct Picture {
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) shapes: Vec<Shape>,
}

/// One thing drawn. Points are `(x, y)` from the upper left corner.
#[derive(Debug, Clone)]
pub(super) enum Shape {
    /// Its edges are not blurred, so that neighbours meet.
    Rect {
        at: [f64; 4],
        fill: Colour,
    },
    Line {
        points: Vec<(f64, f64)>,
        width: f64,
        stroke: Stroke,
        colour: Colour,
    },
    Polygon {
        points: Vec<(f64, f64)>,
        fill: Colour,
    },
    Circle {
        centre: (f64, f64),
        radius: f64,
        fill: Colour,
    },
    Text {
        at: (f64, f64),
        text: String,
        style: Text,
    },
}

/// Red, green and blue, as in `Colour(0xff8000)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Colour(pub u32);

impl Colour {
    /// Of what is to be read.
    pub const INK: Self = Self(0x222222);
    /// Of what explains it.
    pub const FAINT: Self = Self(0x555555);
    pub const BLACK: Self = Self(0x000000);
    pub const WHITE: Self = Self(0xffffff);
}

/// How a line is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stroke {
    Solid,
    Dashed,
}

impl Stroke {
    /// Lengths of a dash and of the gap behind it.
    pub(super) const DASHES: [f32; 2] = [6.0, 4.0];
}

/// How text is set.
#[derive(Debug, Clone, Copy)]
pub struct Text {
    pub size: f64,
    pub anchor: Anchor,
    pub colour: Colour,
    /// Degrees, clockwise, about the point it is anchored at.
    pub turn: f64,
}

/// Which end of a text its point is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

impl Default for Text {
    fn default() -> Self {
        Self { size: 12.0, anchor: Anchor::Start, colour: Colour::INK, turn: 0.0 }
    }
}

impl Picture {
    /// Nothing yet.
    pub fn new(width: f64, height: f64) -> Self {
        Self { width, height, shapes: Vec::new() }
    }

    pub fn width(&self) -> f64 {
        self.width
    }

    pub fn height(&self) -> f64 {
        self.height
    }

    /// A filled rectangle: x, y, width, height.
    pub fn rect(&mut self, at: [f64; 4], fill: Colour) {
        self.shapes.push(Shape::Rect { at, fill });
    }

    /// A line through points.
    pub fn line(&mut self, points: &[(f64, f64)], width: f64, stroke: Stroke, colour: Colour) {
        self.shapes.push(Shape::Line { points: points.to_vec(), width, stroke, colour });
    }

    /// A filled polygon.
    pub fn polygon(&mut self, points: &[(f64, f64)], fill: Colour) {
        self.shapes.push(Shape::Polygon { points: points.to_vec(), fill });
    }

    /// A filled circle.
    pub fn circle(&mut self, centre: (f64, f64), radius: f64, fill: Colour) {
        self.shapes.push(Shape::Circle { centre, radius, fill });
    }

    /// Text on the base line `y`.
    pub fn text(&mut self, x: f64, y: f64, text: &str, style: Text) {
        if !text.is_empty() {
            self.shapes.push(Shape::Text { at: (x, y), text: text.to_owned(), style });
        }
    }

    /// Another picture, its corner at this point.
    pub fn place(&mut self, x: f64, y: f64, other: &Picture) {
        self.shapes.extend(other.shapes.iter().map(|shape| shape.moved(x, y)));
    }
}

impl Shape {
    fn moved(&self, dx: f64, dy: f64) -> Self {
        let by = |&(x, y): &(f64, f64)| (x + dx, y + dy);
        let mut moved = self.clone();
        match &mut moved {
            Self::Rect { at: [x, y, ..], .. } => (*x, *y) = by(&(*x, *y)),
            Self::Line { points, .. } | Self::Polygon { points, .. } => points.iter_mut().for_each(|p| *p = by(p)),
            Self::Circle { centre: at, .. } | Self::Text { at, .. } => *at = by(at),
        }
        moved
    }
}

/// How wide a text is in DejaVu Sans, which is wider than most of what an SVG may be shown in.
pub fn text_width(text: &str, size: f64) -> f64 {
    font::advance(text) * size
}
