//! Search for the tensors of a call whose heads and rows look exchanged: the call would fit the other way round.

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

/// Tensor of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tensor {
    Q,
    K,
    V,
    Out,
}

/// Words of a message for the tensors at fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    Q,
    K,
    V,
    Out,
    KeysAndValues,
    Inputs,
}

/// Tensors that may be exchanged together, and what a message names for them. A caller who exchanges heads and rows of
/// q does so in the output, too, so messages need not name the output.
type Set = (Fault, &'static [Tensor]);

const OF_TENSORS: [Set; 8] = [
    (Fault::K, &[Tensor::K]),
    (Fault::V, &[Tensor::V]),
    (Fault::Out, &[Tensor::Out]),
    (Fault::Q, &[Tensor::Q]),
    (Fault::Q, &[Tensor::Q, Tensor::Out]),
    (Fault::KeysAndValues, &[Tensor::K, Tensor::V]),
    (Fault::Inputs, &[Tensor::Q, Tensor::K, Tensor::V]),
    (Fault::Inputs, &[Tensor::Q, Tensor::K, Tensor::V, Tensor::Out]),
];

/// Keys and values of a cache or pages were checked when they were appended.
const OF_STORED_KEYS: [Set; 3] =
    [(Fault::Out, &[Tensor::Out]), (Fault::Q, &[Tensor::Q]), (Fault::Q, &[Tensor::Q, Tensor::Out])];

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
        // Where there are as many rows as keys and the output is like q, nothing looks exchanged: either the numbers of heads
        // just do not go together, or q has that of k and k that of q.
        let wrong_heads = !more_keys || self.q[0] > 1 && self.k[0].is_multiple_of(self.q[0]);
        if wrong_heads && self.is_square() && !self.out_is_exchanged() {
            return None;
        }
        let more_heads = self.q[0] > self.q[1] && self.k[0] > self.k[1];
        self.named(|fault, fits| {
            more_keys || self.out_is_exchanged() || fits.is_square() || fault == Fault::Inputs && more_heads
        })
    }

    /// Likely cause of a rule that needs as many rows as keys.
    pub(super) fn of_unaligned(self) -> Option<Cause> {
        // Rows may well be fewer than keys, but are hardly ever more.
        if self.q[1] > self.k[1] { self.named(|_, fits| fits.is_square()) } else { None }
    }

    /// Likely cause of different numbers of keys and values.
    pub(super) fn of_values(self) -> Option<Cause> {
        if self.v == self.k || self.v != [self.k[1], self.k[0]] {
            return None;
        }
        // The output says nothing of them.
        let cause = Self { out: None, ..self }.named(|fault, _| fault == Fault::K || fault == Fault::V);
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
    fn exchange(self, tensors: &[Tensor]) -> Self {
        let exchange = |tensor, [heads, rows]: [usize; 2]| match tensors.contains(&tensor) {
            true => [rows, heads],
            false => [heads, rows],
        };
        let Self { q, k, v, out, sets } = self;
        let (q, k) = (exchange(Tensor::Q, q), exchange(Tensor::K, k));
        Self { q, k, v: exchange(Tensor::V, v), out: out.map(|out| exchange(Tensor::Out, out)), sets }
    }

    /// Returns the cause that names the tensors with which the call fits the other way round. They must be plausible;
    /// those that give as many rows as keys are preferred.
    fn named(self, plausible: impl Fn(Fault, Self) -> bool) -> Option<Cause> {
        let found = |fault, square: bool| {
            self.sets.iter().any(|&(other, tensors)| {
                let fits = self.exchange(tensors);
                fault == other && fits.fit() && plausible(fault, fits) && (!square || fits.is_square())
            })
        };
        let square = self.sets.iter().any(|&(fault, _)| found(fault, true));
        let has = |fault| found(fault, square);
        let argument = match [Fault::Q, Fault::KeysAndValues, Fault::Inputs].map(has) {
            _ if has(Fault::K) && has(Fault::V) => "k or v",
            _ if has(Fault::K) => "k",
            _ if has(Fault::V) => "v",
            [true, ..] if has(Fault::Out) => "q or out",
            _ if has(Fault::Out) => "out",
            // With the output alone the call fits, too, but has more rows than keys.
            [false, false, true] if found(Fault::Out, false) => "out, or of q, k and v,",
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
