//! What does not fit is an error that names the argument and both values, before anything is written.

use crate::support::{Tensor, Tensors, UNWRITTEN};
use sdpa::{Attention, Gradients, Inputs, KvCache, KvShape, Saved, View, ViewMut};

fn view(x: &Tensor, shape: [usize; 4]) -> View<'_> {
    View::bhld(&x.data[..shape.iter().product()], shape).unwrap()
}

#[test]
fn shapes_and_options_are_named() {
    let Tensors { q, k, v } = Tensors::normal([2, 4, 2, 6, 9, 8, 5], 1);
    let (out, lse) = (Tensor::filled([2, 4, 7, 8], 0.5), Tensor::filled([2, 4, 7, 3], 0.0));
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let right = Saved::new(view(&out, [2, 4, 6, 5]), view(&lse, [2, 4, 6, 1]), view(&out, [2, 4, 6, 5]));
    let mut gradient = vec![f32::from_bits(UNWRITTEN); 2 * 4 * 9 * 8];
    let mut check = |inputs: Inputs<'_>, saved: Saved<'_>, shape: [usize; 4], which: &str, expected: &str| {
        let n = shape.iter().product();
        let to = ViewMut::bhld(&mut gradient[..n], shape).unwrap();
        let gradients = match which {
            "q" => Gradients::new().q(to),
            "k" => Gradients::new().k(to),
            "v" => Gradients::new().v(to),
            "bias" => Gradients::new().bias(to),
            "sinks" => Gradients::new().sinks(&mut gradient[..shape[3]]),
            _ => Gradients::new().alibi(&mut gradient[..shape[3]]),
        };
        let error = Attention::new().backward(inputs, saved, gradients).expect_err(expected);
        assert_eq!(error.to_string(), expected);
        assert!(gradient.iter().all(|x| x.to_bits() == UNWRITTEN), "{expected}");
    };
    let q_shape = [2, 4, 6, 8];
    check(inputs, right, [2, 4, 5, 8], "q", "dq: rows is 5, but q has 6");
    check(inputs, right, [2, 2, 9, 5], "k", "dk: last dimension is 5, but k has 8");
    check(inputs, right, [2, 4, 9, 5], "v", "dv: heads is 4, but v has 2");
    check(inputs, right, q_shape, "bias", "dbias: needs a bias, which the call does not have");
    check(inputs, right, [1, 1, 1, 4], "sinks", "dsinks: needs sinks, which the call does not have");
    check(inputs, right, [1, 1, 1, 4], "slopes", "dslopes: needs ALiBi slopes, which the call does not have");
    let sinks = [0.0; 4];
    check(inputs.sinks(&sinks), right, [1, 1, 1, 3], "sinks", "dsinks: length is 3, but q (heads) has 4");
    let saved = |out_shape, lse_shape, d_out_shape| {
        Saved::new(view(&out, out_shape), view(&lse, lse_shape), view(&out, d_out_shape))
    };
    let (o, l) = ([2, 4, 6, 5], [2, 4, 6, 1]);
    check(inputs, saved([2, 4, 7, 5], l, o), q_shape, "q", "out: rows is 7, but q has 6");
    let columns = "lse: last dimension is 3, but must be 1 (one value a row), or 2 (and its rounding error)";
    check(inputs, saved(o, [2, 4, 6, 3], o), q_shape, "q", columns);
    let head_dim = "d_out: value_dim is 8, but v has 5";
    check(inputs, saved(o, l, [2, 4, 6, 8]), q_shape, "q", head_dim);
    check(inputs, right.d_lse(view(&lse, [2, 4, 7, 1])), q_shape, "q", "d_lse: rows is 7, but q has 6");
    let cache = KvCache::new(2, KvShape { kv_heads: 2, head_dim: 8, value_dim: 5 }).unwrap();
    let cached = Inputs::cached(q.view(), &cache);
    let expected = "backward: needs keys and values as tensors, not a cache or pages";
    check(cached, right, q_shape, "q", expected);
}
