//! Search for the tensors of a call whose heads and rows look exchanged: those with which it fits the other way round.

use crate::cause::Cause;
use crate::inputs::Inputs;

/// Heads and rows of the tensors of a call.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    q: [usize; 2],
    k: [usize; 2],
    v: [usize; 2],
    /// Those of the output, if it has one that says something about q: equal, or exchanged.
    out: Option<[usize; 2]>,
    /// Sets of tensors that may be exchanged.
    sets: &'static [Set],
}

/// Tensors that may be exchanged together, and their name in a message. Whoever stores q otherwise stores the output so,
/// too, and needs no word on it.
type Set = (&'static str, &'static [&'static str]);

const OF_TENSORS: [Set; 8] = [
    ("k", &["k"]),
    ("v", &["v"]),
    ("out", &["out"]),
    ("q", &["q"]),
    ("q", &["q", "out"]),
    ("k and v", &["k", "v"]),
    ("q, k and v", &["q", "k", "v"]),
    ("q, k and v", &["q", "k", "v", "out"]),
];

/// Keys and values of a cache or pages were checked when they were appended.
const OF_STORED_KEYS: [Set; 3] = [("out", &["out"]), ("q", &["q"]), ("q", &["q", "out"])];

impl Sizes {
    /// Takes the sizes of a call and the shape of its output.
    pub(super) fn new(inputs: &Inputs<'_>, out: Option<[usize; 4]>) -> Self {
        let [q, k, v] = inputs.shapes().map(|[_, heads, rows, _]| [heads, rows]);
        let sets = if inputs.has_tensors() { &OF_TENSORS[..] } else { &OF_STORED_KEYS };
        let out = out.map(|[_, heads, rows, _]| [heads, rows]).filter(|&out| out == q || out == [q[1], q[0]]);
        Self { q, k, v, out, sets }
    }

    /// Likely cause of query heads that are no multiple of the key/value heads.
    pub(super) fn of_heads(self) -> Option<Cause> {
        // No call that fits has more key/value heads than query heads.
        let more_keys = self.k[0] > self.q[0];
        // Nothing looks exchanged where there are as many rows as keys and the output is like q, unless there are more
        // key/value heads; nor if these are a multiple, where the two numbers are taken for each other.
        let numbers = !more_keys || self.q[0] > 1 && self.k[0].is_multiple_of(self.q[0]);
        if numbers && self.is_square() && !self.out_is_exchanged() {
            return None;
        }
        let more_heads = self.q[0] > self.q[1] && self.k[0] > self.k[1];
        self.named(|name, fits| {
            more_keys || self.out_is_exchanged() || fits.is_square() || name == "q, k and v" && more_heads
        })
    }

    /// Likely cause of a rule that needs as many rows as keys.
    pub(super) fn of_unaligned(self) -> Option<Cause> {
        // Rows may well be fewer than keys, but are hardly ever more.
        if self.q[1] > self.k[1] { self.named(|_, fits| fits.is_square()) } else { None }
    }

    /// Likely cause of values that are not as many as the keys.
    pub(super) fn of_values(self) -> Option<Cause> {
        if self.v == self.k || self.v != [self.k[1], self.k[0]] {
            return None;
        }
        // The output says nothing of them.
        let cause = Self { out: None, ..self }.named(|name, _| name == "k" || name == "v");
        Some(cause.unwrap_or(Cause::Exchanged { argument: "k or v" }))
    }

    /// Likely cause of an output whose heads and rows are exchanged in comparison with q.
    pub(super) fn of_out(self) -> Option<Cause> {
        self.named(|_, _| true)
    }

    /// Returns true if the output has the heads of q as rows and its rows as heads.
    pub(super) fn out_is_exchanged(&self) -> bool {
        self.out.is_some_and(|out| out != self.q)
    }

    /// Returns true if there are as many rows as keys, as in self-attention.
    fn is_square(&self) -> bool {
        self.q[1] == self.k[1]
    }

    /// Returns true if the tensors fit together.
    fn fit(&self) -> bool {
        let ([heads, _], [kv_heads, _]) = (self.q, self.k);
        heads > 0
            && kv_heads > 0
            && heads.is_multiple_of(kv_heads)
            && self.v == self.k
            && self.out.is_none_or(|out| out == self.q)
    }

    /// Returns the sizes with heads and rows of some tensors exchanged.
    fn exchange(self, tensors: &[&str]) -> Self {
        let exchange = |tensor, [heads, rows]: [usize; 2]| match tensors.contains(&tensor) {
            true => [rows, heads],
            false => [heads, rows],
        };
        let Self { q, k, v, out, sets } = self;
        let out = out.map(|out| exchange("out", out));
        Self { q: exchange("q", q), k: exchange("k", k), v: exchange("v", v), out, sets }
    }

    /// Returns the cause that names the tensors with which the call fits the other way round: among those that are
    /// plausible, and with which there are as many rows as keys if there are such.
    fn named(self, plausible: impl Fn(&str, Self) -> bool) -> Option<Cause> {
        let found = |name: &str, square: bool| {
            self.sets.iter().any(|&(other, tensors)| {
                let fits = self.exchange(tensors);
                name == other && fits.fit() && plausible(name, fits) && (!square || fits.is_square())
            })
        };
        let square = self.sets.iter().any(|(name, _)| found(name, true));
        let has = |name| found(name, square);
        let argument = match [has("q"), has("k and v"), has("q, k and v")] {
            _ if has("k") && has("v") => "k or v",
            _ if has("k") => "k",
            _ if has("v") => "v",
            [true, ..] if has("out") => "q or out",
            _ if has("out") => "out",
            // As many heads as keys have, and more rows than keys: one may be as unusual as the other.
            [false, false, true] if found("out", false) => "out, or of q, k and v,",
            [false, false, false] => return None,
            [true, false, false] => "q",
            [false, true, false] => "k and v",
            [false, false, true] => "q, k and v",
            // More heads than rows are those of q exchanged, too.
            [false, true, true] if self.q[0] > self.q[1] => "q, k and v",
            [false, true, true] => "k and v, perhaps of q too,",
            _ if self.out_is_exchanged() => "q",
            _ => "some of q, k and v",
        };
        Some(Cause::Exchanged { argument })
    }
}
