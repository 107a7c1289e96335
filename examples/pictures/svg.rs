//! A picture as SVG.

use super::canvas::{Anchor, Colour, Picture, Shape, Stroke};
use std::fmt::{Display, Formatter, Result, Write as _};

/// The whole document, on white. Text is set in the viewer's sans-serif.
pub fn svg(picture: &Picture) -> String {
    let (width, height) = (picture.width.ceil(), picture.height.ceil());
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    for shape in &picture.shapes {
        writeln!(svg, "{shape}").expect("a string takes anything");
    }
    svg + "</svg>\n"
}

impl Display for Shape {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Rect { at, fill } => {
                let [x, y, width, height] = at.map(Short);
                write!(
                    f,
                    r#"<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" shape-rendering="crispEdges"/>"#
                )
            }
            Self::Line { points, width, stroke, colour } => {
                let (points, width) = (Points(points), Short(*width));
                write!(f, r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}""#)?;
                if *stroke == Stroke::Dashed {
                    let [dash, gap] = Stroke::DASHES;
                    write!(f, r#" stroke-dasharray="{dash} {gap}""#)?;
                }
                write!(f, "/>")
            }
            Self::Polygon { points, fill } => write!(f, r#"<polygon points="{}" fill="{fill}"/>"#, Points(points)),
            Self::Circle { centre, radius, fill } => {
                let (x, y, radius) = (Short(centre.0), Short(centre.1), Short(*radius));
                write!(f, r#"<circle cx="{x}" cy="{y}" r="{radius}" fill="{fill}"/>"#)
            }
            Self::Text { at, text, style } => {
                let (x, y, size, colour) = (Short(at.0), Short(at.1), Short(style.size), style.colour);
                write!(f, r#"<text x="{x}" y="{y}" font-size="{size}" fill="{colour}""#)?;
                match style.anchor {
                    Anchor::Start => {}
                    Anchor::Middle => write!(f, r#" text-anchor="middle""#)?,
                    Anchor::End => write!(f, r#" text-anchor="end""#)?,
                }
                if style.turn != 0.0 {
                    write!(f, r#" transform="rotate({} {x} {y})""#, Short(style.turn))?;
                }
                write!(f, ">{}</text>", escaped(text))
            }
        }
    }
}

impl Display for Colour {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "#{:06x}", self.0)
    }
}

/// What may not stand in XML as it is: markup, and control characters, which XML has no way to write.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

struct Points<'a>(&'a [(f64, f64)]);

impl Display for Points<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        for (n, &(x, y)) in self.0.iter().enumerate() {
            write!(f, "{}{},{}", if n == 0 { "" } else { " " }, Short(x), Short(y))?;
        }
        Ok(())
    }
}

/// A number to a hundredth, with no more digits than that takes.
struct Short(f64);

impl Display for Short {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        // Adding 0 makes a negative zero positive.
        write!(f, "{}", (self.0 * 100.0).round() / 100.0 + 0.0)
    }
}
