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
        let (plot, legend) = (self.plot(), self.legend());
        let mut picture = Picture::new(plot.width() + legend.width(), plot.height().max(legend.height()));
        picture.place(0.0, 0.0, &plot);
        picture.place(plot.width(), self.above(), &legend);
        picture
    }

    /// What the lines mean: for several plots of the same series, one is enough.
    pub fn legend(&self) -> Picture {
        let names = self.series.iter().map(|s| s.name);
        let width = names.map(|name| text_width(name, LABEL)).fold(0.0, f64::max) + 50.0;
        let mut picture = Picture::new(width, 20.0 * self.series.len() as f64);
        for (n, series) in self.series.iter().enumerate() {
            let (x, y, colour) = (14.0, 10.0 + n as f64 * 20.0, COLOURS[n % COLOURS.len()]);
            picture.line(&[(x, y), (x + 24.0, y)], 2.0, Stroke::Solid, colour);
            marker(&mut picture, n, (x + 12.0, y), colour);
            picture.text(x + 30.0, y + LABEL * 0.36, series.name, Text { size: LABEL, ..Text::default() });
        }
        picture
    }

    /// Draws it without its legend.
    pub fn plot(&self) -> Picture {
        let (width, height) = self.size;
        let points = || self.series.iter().flat_map(|s| s.points.iter());
        let xs = self.x.scale.range(points().map(|p| p.0), 10);
        let ys = self.y.scale.range(points().map(|p| p.1).chain(self.levels.iter().map(|l| l.y)), 7);
        let numbers = ys.ticks.iter().map(|&t| text_width(&printed(t), LABEL)).fold(0.0, f64::max);
        let (left, above) = (numbers + 30.0, self.above());
        let mut picture =
            Picture::new(left + width, above + height + if self.x.title.is_empty() { 26.0 } else { 44.0 });
        let frame = Frame { left, above, width, height, xs, ys };
        if !self.title.is_empty() {
            let middle = Text { size: LABEL + 1.0, anchor: Anchor::Middle, ..Text::default() };
            picture.text(left + width / 2.0, LABEL, self.title, middle);
        }
        self.axes(&mut picture, &frame);
        for level in self.levels.iter().filter(|level| self.y.scale.shows(level.y)) {
            let y = frame.y(level.y);
            picture.line(&[(left, y), (left + width, y)], 1.2, Stroke::Dashed, Colour::FAINT);
            let (x, y) = self.place_of(level, &frame);
            picture.text(x, y, level.name, Text { size: LABEL, colour: Colour::FAINT, ..Text::default() });
        }
        for (n, series) in self.series.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let shown = |&(x, y): &(f64, f64)| self.x.scale.shows(x) && self.y.scale.shows(y);
            for run in series.points.split(|point| !shown(point)).filter(|run| !run.is_empty()) {
                let run: Vec<_> = run.iter().map(|&(x, y)| (frame.x(x), frame.y(y))).collect();
                picture.line(&run, 2.0, Stroke::Solid, colour);
                run.iter().for_each(|&at| marker(&mut picture, n, at, colour));
            }
        }
        picture
    }

    /// Height of the title.
    fn above(&self) -> f64 {
        if self.title.is_empty() { 6.0 } else { LABEL + 13.0 }
    }

    /// Where the name of a level stands in no line's way: above it or below, as far to the right as can be.
    fn place_of(&self, level: &Level<'_>, frame: &Frame) -> (f64, f64) {
        let (wide, at) = (text_width(level.name, LABEL), frame.y(level.y));
        let (first, last) = (frame.left + 4.0, frame.left + frame.width - wide - 4.0);
        let steps = (0..=12).map(|n| last + (first - last) * f64::from(n) / 12.0);
        let places: Vec<_> = steps.flat_map(|x| [(x, at - 5.0), (x, at + LABEL + 1.0)]).collect();
        let free = |&&(x, y): &&(f64, f64)| {
            let (top, bottom) = (y - LABEL, y + 3.0);
            let inside = top >= frame.above && bottom <= frame.above + frame.height;
            let level_there = |l: &Level<'_>| l.y != level.y && (top..=bottom).contains(&frame.y(l.y));
            inside
                && !self.levels.iter().any(level_there)
                && !self.passes(frame, [x - 4.0, x + wide + 4.0], [top, bottom])
        };
        places.iter().find(free).copied().unwrap_or(places[0])
    }

    /// Whether a line goes through a box, looked at every few pixels.
    fn passes(&self, frame: &Frame, [left, right]: [f64; 2], [top, bottom]: [f64; 2]) -> bool {
        let through = |pair: &[(f64, f64)]| {
            let [a, b] = [pair[0], pair[1]].map(|(x, y)| (frame.x(x), frame.y(y)));
            let along = |n: i32| (f64::from(n) / 32.0, 1.0 - f64::from(n) / 32.0);
            let on = |(t, u): (f64, f64)| (u * a.0 + t * b.0, u * a.1 + t * b.1);
            (0..=32).map(along).map(on).any(|(x, y)| (left..=right).contains(&x) && (top..=bottom).contains(&y))
        };
        self.series.iter().any(|series| series.points.windows(2).any(through))
    }

    fn axes(&self, picture: &mut Picture, frame: &Frame) {
        let &Frame { left, above, width, height, .. } = frame;
        let (right, below) = (left + width, above + height);
        let middle = Text { size: LABEL, anchor: Anchor::Middle, ..Text::default() };
        let every = frame.numbered();
        for (n, &tick) in frame.xs.ticks.iter().enumerate() {
            let x = frame.x(tick);
            picture.line(&[(x, above), (x, below)], 1.0, Stroke::Solid, GRID);
            if n % every == 0 {
                picture.text(x, below + LABEL + 5.0, &printed(tick), middle);
            }
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

    /// So many ticks on from one number on the x axis is the next: near enough, but not into one another.
    fn numbered(&self) -> usize {
        let half = |&tick: &f64| text_width(&printed(tick), LABEL) / 2.0;
        let apart = |a: &f64, b: &f64| self.x(*b) - self.x(*a) > half(a) + half(b) + LABEL / 2.0;
        let ticks = &self.xs.ticks;
        let fits = |&step: &usize| ticks.iter().zip(&ticks[step..]).step_by(step).all(|(a, b)| apart(a, b));
        (1..ticks.len()).find(fits).unwrap_or(ticks.len())
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
