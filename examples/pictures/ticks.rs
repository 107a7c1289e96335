//! Where the ticks of an axis are.

/// How an axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// From 0, or below if values are.
    Linear,
    /// By doubling: ticks at powers of two.
    Log2,
    /// By tenfolds: ticks at 1, 2 and 5 of each, or at powers of ten if those are many.
    Log10,
}

/// What an axis shows, and where its ticks are.
#[derive(Debug, Clone, PartialEq)]
pub struct Range {
    scale: Scale,
    from: f64,
    to: f64,
    pub ticks: Vec<f64>,
}

impl Scale {
    /// Whether an axis can show it: logarithms want more than 0.
    pub fn shows(self, x: f64) -> bool {
        x.is_finite() && (self == Self::Linear || x > 0.0)
    }

    /// What shows all values, and about so many ticks.
    pub fn range(self, values: impl Iterator<Item = f64>, about: usize) -> Range {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for x in values.filter(|&x| self.shows(x)) {
            (low, high) = (low.min(x), high.max(x));
        }
        if low > high {
            (low, high) = (1.0, 10.0); // nothing to show
        }
        let ticks = match self {
            Self::Linear => {
                (low, high) = (low.min(0.0), if high > low.min(0.0) { high } else { low.min(0.0) + 1.0 });
                linear(low, high, about)
            }
            Self::Log2 => powers(2.0, low, high, about),
            Self::Log10 => {
                let fine = fine(low, high);
                if fine.len() <= about + about / 2 { fine } else { powers(10.0, low, high, about) }
            }
        };
        let (from, to) = (low.min(ticks[0]), high.max(ticks[ticks.len() - 1]));
        Range { scale: self, from, to, ticks }
    }
}

impl Range {
    /// Where a value is, from 0 to 1.
    pub fn share(&self, x: f64) -> f64 {
        let of = |x: f64| if self.scale == Scale::Linear { x } else { x.ln() };
        (of(x) - of(self.from)) / (of(self.to) - of(self.from))
    }
}

/// About so many round numbers from `low` to `high`, none outside for `low` = 0.
pub fn linear(low: f64, high: f64, about: usize) -> Vec<f64> {
    let rough = (high - low) / about as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|s| s * power).into_iter().find(|&s| s >= rough * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = ((low / step).floor() as i64, (high / step * 1.000_001).floor() as i64);
    (first..=last).map(|n| n as f64 * step).collect()
}

/// Powers of a base: the last not above `low` to the first not below `high`, and no more than about so many between.
fn powers(base: f64, low: f64, high: f64, about: usize) -> Vec<f64> {
    let exponent = |x: f64| x.ln() / base.ln();
    let (first, last) = ((exponent(low) + 1e-9).floor() as i32, (exponent(high) - 1e-9).ceil() as i32);
    let last = last.max(first + 1);
    let step = (last - first).unsigned_abs().div_ceil(about.max(1) as u32).max(1);
    (first..=last).step_by(step as usize).map(|n| base.powi(n)).collect()
}

/// 1, 2 and 5 of every power of ten, likewise.
fn fine(low: f64, high: f64) -> Vec<f64> {
    let decades = powers(10.0, low, high, usize::MAX);
    let all: Vec<f64> = decades.iter().flat_map(|&d| [d, 2.0 * d, 5.0 * d]).collect();
    let first = all.iter().rposition(|&t| t <= low * 1.000_001).unwrap_or(0);
    let last = all.iter().position(|&t| t >= high * 0.999_999).unwrap_or(all.len() - 1);
    all[first..=last.max(first + 1)].to_vec()
}

/// A tick as it is printed: whole numbers whole, others as short as they are.
pub fn printed(x: f64) -> String {
    let rounded = (x * 1e6).round() / 1e6;
    if x != 0.0 && rounded == 0.0 { format!("{x:e}") } else { format!("{}", rounded + 0.0) }
}
