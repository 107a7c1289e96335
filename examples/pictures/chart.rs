//! Lines over two axes.

use super::canvas::{Anchor, Colour, Picture, Stroke, Text, text_width};
use super::ticks::{Range, Scale, printed};

const LABEL: f64 = 12.0;
/// Dark enough on white, and told apart without red and green (Okabe and Ito).
const COLOURS: [Colour; 7] = [
    Colour(0x0072b2),
    Colour(0xd55e00),
    Colour(0x009e73),
    Colour(0xcc79a7),
    Colour(0xe69f00),
    Colour(0x56b4e9),
    Colour(0x000000),
];
const GRID: Colour = Colour(0xe2e2e2);

/// Several series of points joined by lines, and levels across.
#[derive(Debug, Clone, Copy)]
pub struct LineChart<'a> {
    /// May be empty.
    pub title: &'a str,
    pub x: Axis<'a>,
    pub y: Axis<'a>,
    pub series: &'a [Series<'a>],
    pub levels: &'a [Level<'a>],
    /// Of the frame in which the lines are.
    pub size: (f64, f64),
}

/// An axis: what it counts, and how.
#[derive(Debug, Clone, Copy)]
pub struct Axis<'a> {
    pub title: &'a str,
    pub scale: Scale,
}

/// Points, left to right. Those that an axis cannot show (not finite, or not positive where it is logarithmic) are left
/// out, and the line is broken there.
#[derive(Debug, Clone, Copy)]
pub struct Series<'a> {
    pub name: &'a str,
    pub points: &'a [(f64, f64)],
}

/// A dashed line across, such as a peak.
#[derive(Debug, Clone, Copy)]
pub struct Level<'a> {
    pub name: &'a str,
    pub y: f64,
}

impl LineChart<'_> {
    /// Draws it, with a legend to the right.
    pub fn picture(&self) -> Picture {
        let (width, height) = self.size;
        let points = || self.series.iter().flat_map(|s| s.points.iter());
        let xs = self.x.scale.range(points().map(|p| p.0), 10);
        let ys = self.y.scale.range(points().map(|p| p.1).chain(self.levels.iter().map(|l| l.y)), 7);
        let numbers = ys.ticks.iter().map(|&t| text_width(&printed(t), LABEL)).fold(0.0, f64::max);
        let names = self.series.iter().map(|s| s.name);
        let legend = names.map(|name| text_width(name, LABEL)).fold(0.0, f64::max) + 50.0;
        let (left, above) = (numbers + 30.0, if self.title.is_empty() { 6.0 } else { LABEL + 13.0 });
        let mut picture = Picture::new(left + width + legend, above + height + 44.0);
        let frame = Frame { left, above, width, height, xs, ys };
        if !self.title.is_empty() {
            let middle = Text { size: LABEL + 1.0, anchor: Anchor::Middle, ..Text::default() };
            picture.text(left + width / 2.0, LABEL, self.title, middle);
        }
        self.axes(&mut picture, &frame);
        for level in self.levels.iter().filter(|level| self.y.scale.shows(level.y)) {
            let y = frame.y(level.y);
            picture.line(&[(left, y), (left + width, y)], 1.2, Stroke::Dashed, Colour::FAINT);
            let name = Text { size: LABEL, anchor: Anchor::End, colour: Colour::FAINT, ..Text::default() };
            picture.text(left + width - 4.0, y - 5.0, level.name, name);
        }
        for (n, series) in self.series.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let shown = |&(x, y): &(f64, f64)| self.x.scale.shows(x) && self.y.scale.shows(y);
            for run in series.points.split(|point| !shown(point)).filter(|run| !run.is_empty()) {
                let run: Vec<_> = run.iter().map(|&(x, y)| (frame.x(x), frame.y(y))).collect();
                picture.line(&run, 2.0, Stroke::Solid, colour);
                run.iter().for_each(|&at| marker(&mut picture, n, at, colour));
            }
            let (x, y) = (left + width + 14.0, above + 10.0 + n as f64 * 20.0);
            picture.line(&[(x, y), (x + 24.0, y)], 2.0, Stroke::Solid, colour);
            marker(&mut picture, n, (x + 12.0, y), colour);
            picture.text(x + 30.0, y + LABEL * 0.36, series.name, Text { size: LABEL, ..Text::default() });
        }
        picture
    }

    fn axes(&self, picture: &mut Picture, frame: &Frame) {
        let &Frame { left, above, width, height, .. } = frame;
        let (right, below) = (left + width, above + height);
        let middle = Text { size: LABEL, anchor: Anchor::Middle, ..Text::default() };
        for &tick in &frame.xs.ticks {
            let x = frame.x(tick);
            picture.line(&[(x, above), (x, below)], 1.0, Stroke::Solid, GRID);
            picture.text(x, below + LABEL + 5.0, &printed(tick), middle);
        }
        for &tick in &frame.ys.ticks {
            let y = frame.y(tick);
            picture.line(&[(left, y), (right, y)], 1.0, Stroke::Solid, GRID);
            picture.text(left - 6.0, y + LABEL * 0.36, &printed(tick), Text { anchor: Anchor::End, ..middle });
        }
        picture.line(&[(left, above), (left, below), (right, below)], 1.0, Stroke::Solid, Colour::INK);
        picture.text(left + width / 2.0, below + 38.0, self.x.title, Text { colour: Colour::FAINT, ..middle });
        let turned = Text { colour: Colour::FAINT, turn: -90.0, ..middle };
        picture.text(LABEL, above + height / 2.0, self.y.title, turned);
    }
}

/// Where the lines are drawn.
struct Frame {
    left: f64,
    above: f64,
    width: f64,
    height: f64,
    xs: Range,
    ys: Range,
}

impl Frame {
    fn x(&self, x: f64) -> f64 {
        self.left + self.width * self.xs.share(x)
    }

    fn y(&self, y: f64) -> f64 {
        self.above + self.height * (1.0 - self.ys.share(y))
    }
}

/// A point, of another form for each series: colours alone do not print.
fn marker(picture: &mut Picture, n: usize, (x, y): (f64, f64), colour: Colour) {
    let around = |corners: &[(f64, f64)]| corners.iter().map(|(dx, dy)| (x + dx, y + dy)).collect::<Vec<_>>();
    match n % 4 {
        0 => picture.circle((x, y), 3.6, colour),
        1 => picture.polygon(&around(&[(-3.3, -3.3), (3.3, -3.3), (3.3, 3.3), (-3.3, 3.3)]), colour),
        2 => picture.polygon(&around(&[(0.0, -4.6), (4.3, 3.2), (-4.3, 3.2)]), colour),
        _ => picture.polygon(&around(&[(0.0, -4.9), (4.9, 0.0), (0.0, 4.9), (-4.9, 0.0)]), colour),
    }
}
