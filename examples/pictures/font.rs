//! The one font of PNGs, DejaVu Sans: how wide it is, and its outlines.

use std::sync::LazyLock;
use tiny_skia::{Path, PathBuilder};
use ttf_parser::{Face, GlyphId, OutlineBuilder};

static FACE: LazyLock<Face<'static>> =
    LazyLock::new(|| Face::parse(dejavu::sans::regular(), 0).expect("a font that was published"));

/// Letters and how far each moves on, in units of the font. What the font lacks is the box it has for that.
fn glyphs(text: &str) -> impl Iterator<Item = (GlyphId, f32)> {
    let glyph = |c| FACE.glyph_index(c).unwrap_or(GlyphId(0));
    text.chars().map(glyph).map(|glyph| (glyph, f32::from(FACE.glyph_hor_advance(glyph).unwrap_or(0))))
}

/// How wide a text of size 1 is.
pub(super) fn advance(text: &str) -> f64 {
    glyphs(text).map(|(_, advance)| f64::from(advance)).sum::<f64>() / f64::from(FACE.units_per_em())
}

/// The outline of a text of size 1 that begins at 0, y upwards; none if nothing of it is to be seen.
pub(super) fn outline(text: &str) -> Option<Path> {
    let mut pen = Pen { path: PathBuilder::new(), x: 0.0, scale: 1.0 / f32::from(FACE.units_per_em()) };
    for (glyph, advance) in glyphs(text) {
        // A space has none.
        let _ = FACE.outline_glyph(glyph, &mut pen);
        pen.x += advance;
    }
    pen.path.finish()
}

/// Draws one letter after another.
struct Pen {
    path: PathBuilder,
    x: f32,
    scale: f32,
}

impl Pen {
    fn at(&self, x: f32, y: f32) -> (f32, f32) {
        ((self.x + x) * self.scale, y * self.scale)
    }
}

impl OutlineBuilder for Pen {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.at(x1, y1), self.at(x, y));
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ((x1, y1), (x2, y2), (x, y)) = (self.at(x1, y1), self.at(x2, y2), self.at(x, y));
        self.path.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}
