//! A picture as PNG.

use super::canvas::{Anchor, Colour, Picture, Shape, Stroke, text_width};
use super::font;
use std::error::Error;
use tiny_skia::{Color, FillRule, Paint, Path, PathBuilder, Pixmap, Rect, StrokeDash, Transform};

/// Pixels of a PNG to one of its picture: sharp where a screen has more than one, and legible where a page scales it
/// down.
const ZOOM: f64 = 1.5;

/// The picture as PNG, on white, half as large again.
pub fn png(picture: &Picture) -> Result<Vec<u8>, Box<dyn Error>> {
    let pixels = |length: f64| (length.ceil() * ZOOM).ceil() as u32;
    let mut canvas = Pixmap::new(pixels(picture.width), pixels(picture.height)).ok_or("a picture of no size")?;
    canvas.fill(Color::WHITE);
    for shape in &picture.shapes {
        draw(&mut canvas, shape);
    }
    Ok(canvas.encode_png()?)
}

/// What has no extent, and so no path, leaves no mark.
fn draw(canvas: &mut Pixmap, shape: &Shape) {
    let zoom = Transform::from_scale(ZOOM as f32, ZOOM as f32);
    match shape {
        Shape::Rect { at, fill } => {
            let [x, y, width, height] = at.map(|x| x as f32);
            if let Some(rect) = Rect::from_xywh(x, y, width, height) {
                canvas.fill_rect(rect, &Paint { anti_alias: false, ..paint(*fill) }, zoom, None);
            }
        }
        Shape::Line { points, width, stroke, colour } => {
            let dash = match stroke {
                Stroke::Solid => None,
                Stroke::Dashed => StrokeDash::new(Stroke::DASHES.to_vec(), 0.0),
            };
            let stroke = tiny_skia::Stroke { width: *width as f32, dash, ..tiny_skia::Stroke::default() };
            if let Some(path) = through(points, Ends::Open) {
                canvas.stroke_path(&path, &paint(*colour), &stroke, zoom, None);
            }
        }
        Shape::Polygon { points, fill } => fill_path(canvas, through(points, Ends::Joined), *fill, zoom),
        Shape::Circle { centre, radius, fill } => {
            let path = PathBuilder::from_circle(centre.0 as f32, centre.1 as f32, *radius as f32);
            fill_path(canvas, path, *fill, zoom);
        }
        Shape::Text { at, text, style } => {
            let size = style.size as f32;
            let back = text_width(text, 1.0) as f32
                * match style.anchor {
                    Anchor::Start => 0.0,
                    Anchor::Middle => 0.5,
                    Anchor::End => 1.0,
                };
            let place = zoom
                .pre_translate(at.0 as f32, at.1 as f32)
                .pre_concat(Transform::from_rotate(style.turn as f32))
                .pre_scale(size, -size)
                .pre_translate(-back, 0.0);
            fill_path(canvas, font::outline(text), style.colour, place);
        }
    }
}

fn fill_path(canvas: &mut Pixmap, path: Option<Path>, colour: Colour, transform: Transform) {
    if let Some(path) = path {
        canvas.fill_path(&path, &paint(colour), FillRule::Winding, transform, None);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    Open,
    Joined,
}

fn through(points: &[(f64, f64)], ends: Ends) -> Option<Path> {
    let mut path = PathBuilder::new();
    for (n, &(x, y)) in points.iter().enumerate() {
        if n == 0 {
            path.move_to(x as f32, y as f32);
        } else {
            path.line_to(x as f32, y as f32);
        }
    }
    if ends == Ends::Joined {
        path.close();
    }
    path.finish()
}

fn paint(Colour(rgb): Colour) -> Paint<'static> {
    let [_, red, green, blue] = rgb.to_be_bytes();
    let mut paint = Paint::default();
    paint.set_color_rgba8(red, green, blue, 255);
    paint
}
