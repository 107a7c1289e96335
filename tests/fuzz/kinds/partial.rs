//! Biases and masks by key/value head, over the last keys, with a period over the batch: the bits of those of all sequences,
//! query heads and keys, which are the oracle's; gradients that are sums of those.

use crate::fuzzer::array::{Array, At};
use crate::fuzzer::case::{Case, Cover, Entries, Polarity};
use crate::fuzzer::draw::{DTYPES, Home, draw_of, sizes_of};
use crate::fuzzer::functions::Functions;
use crate::fuzzer::oracle::Oracle;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::place::{AnyPlaced, Placed, rounded};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::Stage;
use sdpa::{Exec, Gradients, Inputs, Mask, Outputs, Saved, View, ViewMut};

/// A bias and a mask that are not whole, in guarded memory.
struct Partial {
    bias: Array,
    placed: AnyPlaced,
    mask: Placed<u8>,
    cover: Cover,
    period: usize,
}

pub(super) fn check(rng: &mut Rng) {
    let home = Home::draw(rng);
    let mut sizes = sizes_of(rng, 0..=20_000);
    sizes[0] *= rng.pick(&[1, 2]);
    let mut case = Case { functions: Functions::default(), ..draw_of(rng, home, sizes) };
    let partial = Partial::draw(rng, &mut case);
    let what = format!("{home:?}, {:?}, every {}: {}", partial.cover, partial.period, case.describe());
    let (wanted, exec, stage) = (Wanted::draw(rng), Exec::serial(), Stage::new(rng, &case, home));
    let expected = stage.run(&what, &mut Outs::blank(rng, &case, wanted), exec);
    if !home.is_integers() {
        expected.check(&what, &Oracle::of(&case).answer());
    }
    let mut outs = Outs::blank(rng, &case, wanted);
    case.attention().problem(partial.of(stage.inputs()), outs.outputs()).expect("a good call").run_once(exec);
    outs.take(&what).same(&what, &expected);
    if home == Home::Tensors {
        partial.gradients(rng, &what, &case, stage.inputs());
    }
}

impl Partial {
    /// Draws both, and gives the case the same as whole ones.
    fn draw(rng: &mut Rng, case: &mut Case) -> Self {
        let (batch, heads, kv_heads, (rows, keys)) = (case.batch(), case.heads(), case.kv_heads(), case.longest());
        let periods: Vec<usize> = (1..=batch.max(1)).filter(|&n| batch.is_multiple_of(n)).collect();
        let (period, dtype) = (rng.pick(&periods), rng.pick(&DTYPES));
        let cover = rng.pick(&[Cover::All, Cover::Last]);
        let shape = |rng: &mut Rng| {
            let some = rng.below(keys + 1);
            let columns = match cover {
                Cover::Last => rng.pick(&[keys, keys.min(1), some]),
                _ => rng.pick(&[keys, 1]),
            };
            [rng.pick(&[period, batch, 1]), rng.pick(&[kv_heads, heads, 1]), rng.pick(&[rows, 1]), columns]
        };
        let bias = Array::from_fn(shape(rng), |_| match rng.below(6) {
            0 => f32::NEG_INFINITY,
            _ => rounded(rng.normal(), dtype),
        });
        let mask = Array::from_fn(shape(rng), |_| if rng.one_in(5) { 0.0 } else { 1.0 + rng.below(255) as f32 });
        let whole = |of: &Array, none: f32| {
            let get = |at: At| column(case, of.shape, cover, at).map_or(none, |at| of.get(at));
            Entries { of: Array::from_fn([batch, heads, rows, keys], get), cover: Cover::All }
        };
        let entries = [whole(&bias, -0.0), whole(&mask, 1.0)];
        let (placed, mask) = (AnyPlaced::of(rng, &bias, dtype), Placed::of(rng, &mask));
        let [of_bias, of_mask] = entries;
        (case.bias, case.mask) = (Some((of_bias, dtype)), Some((of_mask, Polarity::NonzeroKeeps)));
        Self { bias, placed, mask, cover, period }
    }

    /// Inputs with these in place of the whole ones.
    fn of<'a>(&'a self, inputs: Inputs<'a>) -> Inputs<'a> {
        let (bias, mask) = (self.placed.view(), Mask::keep(self.mask.view()));
        match self.cover {
            Cover::Last => inputs.bias_suffix(bias).mask_suffix(mask),
            _ => inputs.bias(bias).mask(mask),
        }
        .batch_period(self.period)
    }

    /// The gradient of the bias is the sum of those of the whole one; the others have its bits.
    fn gradients(&self, rng: &mut Rng, what: &str, case: &Case, whole: Inputs<'_>) {
        let ([b, h, l, _], [.., dv]) = (case.q.shape, case.v.shape);
        let d_out = Array::from_fn([b, h, l, dv], |_| rng.normal());
        let get = |inputs: Inputs<'_>, bias: At| {
            let mut memory = [[b, h, l, dv], [b, h, l, 1], case.q.shape, case.k.shape, case.v.shape, bias]
                .map(|shape| (shape, vec![f32::NAN; shape.iter().product()]));
            let [out, lse, dq, dk, dv, dbias] = &mut memory;
            fn view((shape, x): &mut (At, Vec<f32>)) -> ViewMut<'_> {
                ViewMut::bhld(x, *shape).expect("dense")
            }
            let outputs = Outputs::new(view(out)).lse(view(lse));
            sdpa::attention(&case.attention(), inputs, outputs).expect("a good call");
            let [out, lse, d_out] = [(&out.1, out.0), (&lse.1, lse.0), (&d_out.data, d_out.shape)]
                .map(|(x, shape)| View::bhld(x, shape).expect("dense"));
            let gradients = Gradients::new().q(view(dq)).k(view(dk)).v(view(dv)).bias(view(dbias));
            let saved = Saved::new(out, lse, d_out);
            sdpa::attention_backward(&case.attention(), inputs, saved, gradients).expect("a good call");
            memory.map(|(_, x)| x)
        };
        let shape = [case.batch(), case.heads(), case.longest().0, case.longest().1];
        let [_, _, dq, dk, dv, all] = get(whole, shape);
        let [_, _, q, k, v, bias] = get(self.of(whole), self.bias.shape);
        for (name, got, expected) in [("q", q, dq), ("k", k, dk), ("v", v, dv)] {
            let same = got.iter().zip(&expected).all(|(x, y)| x.to_bits() == y.to_bits());
            assert!(same, "{what}: gradient in {name} is {got:?}, not {expected:?}");
        }
        let mut sums = vec![[0.0f64; 3]; bias.len()];
        let all = Array { shape, data: all };
        for at in crate::fuzzer::array::indices(shape) {
            if let Some([b, h, l, c]) = column(case, self.bias.shape, self.cover, at) {
                let ([_, heads, rows, columns], x) = (self.bias.shape, f64::from(all.get(at)));
                let [sum, size, count] = &mut sums[((b * heads + h) * rows + l) * columns + c];
                (*sum, *size, *count) = (*sum + x, *size + x.abs(), *count + 1.0);
            }
        }
        for (n, (&got, [sum, size, count])) in bias.iter().zip(sums).enumerate() {
            let bound = count * size * f64::from(f32::EPSILON) + 1e-40;
            let may_overflow = (count * size).is_nan() || count * size >= f32::MAX.into();
            assert!(
                may_overflow || (f64::from(got) - sum).abs() <= bound,
                "{what}: gradient in element {n} of the bias is {got}, not {sum}"
            );
        }
    }
}

/// The index of the entry for a sequence, query head, row and key, unless it is a key before the last ones.
fn column(case: &Case, [b, h, l, n]: At, cover: Cover, at: At) -> Option<At> {
    let column = match cover {
        Cover::Last => (at[3] + n).checked_sub(case.kv_len(at[0])).filter(|&column| column < n)?,
        _ => at[3].min(n - 1),
    };
    Some([at[0] % b, at[1] / (case.heads() / h), at[2].min(l - 1), column])
}
