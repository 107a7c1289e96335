//! An output column's bits depend on its own values and on no other column: not on how many there are, nor on what lies
//! beside them in a vector.

use crate::options::elements::{DTYPES, Rounded};
use crate::support::{Tensor, Tensors, assert_same_bits, execs};
use sdpa::{Alignment, Attention, Exec, Inputs, KeyScales, KvCache, KvShape, Outputs, Plan, ViewMut, Workspace};

/// Few rows, which are read in whole vectors; many, with a tile that is not full and one without a partner; several row
/// blocks.
const ROWS: [usize; 3] = [5, 45, 110];
/// One block of keys, and two.
const KEYS: [usize; 2] = [77, 300];

/// The first `columns` columns; those that are missing are zeros.
fn columns(x: &Tensor, columns: usize) -> Tensor {
    let [b, h, l, e] = x.shape;
    Tensor::from_fn([b, h, l, columns], |at| if at[3] < e { x.get(at) } else { 0.0 })
}

/// The output, in memory where columns are contiguous or two elements apart, on memory that was in use.
fn output(
    attention: &Attention,
    inputs: Inputs<'_>,
    [b, h, l, e, apart]: [usize; 5],
    (exec, memory): (Exec, &mut Workspace),
) -> Tensor {
    let mut data = vec![f32::NAN; b * h * l * e * apart];
    let strides = [h * l * e * apart, l * e * apart, e * apart, apart].map(|stride| stride as isize);
    let out = ViewMut::from_strides(&mut data, 0, [b, h, l, e], strides).expect("it fits its memory");
    let problem = attention.problem(inputs, Outputs::new(out)).expect("a good call");
    let plan = Plan::new(&problem, exec);
    problem.run(&plan, memory);
    Tensor::from_fn([b, h, l, e], |[b, r, i, c]| data[((b * h + r) * l + i) * e * apart + c * apart])
}

/// Memory in which nothing is left but NaN.
fn poisoned(attention: &Attention, exec: Exec) -> Workspace {
    let nan = Tensor::filled([1, 1, 110, 48], f32::NAN);
    let mut memory = Workspace::new();
    let inputs = Inputs::new(nan.view(), nan.view(), nan.view());
    let _ = output(attention, inputs, [1, 1, 110, 48, 1], (exec, &mut memory));
    memory
}

/// Every number of columns, few and many rows, one and two key blocks, full and causal, on every instruction set.
fn every(mut check: impl FnMut(&str, &Attention, &Tensors, Exec, &mut Workspace)) {
    for (seed, (rows, keys)) in ROWS.into_iter().flat_map(|rows| KEYS.map(|keys| (rows, keys))).enumerate() {
        let all = Tensors::normal([1, 2, 1, rows, keys, 16, 272], seed as u64);
        for attention in [Attention::new(), Attention::new().causal().align(Alignment::BottomRight)] {
            for (isa, exec) in execs() {
                let mut memory = poisoned(&attention, exec);
                // All up to two vectors and a half; several value panels; more than is packed at once.
                for e in (1..=40).chain([72, 100, 136, 264]) {
                    let tensors = Tensors { v: columns(&all.v, e), ..all.clone() };
                    let what = format!("{rows} rows, {keys} keys, {e} columns, {attention:?}, {isa}");
                    check(&what, &attention, &tensors, exec, &mut memory);
                }
            }
        }
    }
}

#[test]
fn the_number_of_columns_does_not_show() {
    every(|what, attention, t, exec, memory| {
        let ([b, h, l, _], e) = (t.q.shape, t.v.shape[3]);
        for dtype in DTYPES {
            let [own, padded] = [e, e.next_multiple_of(16)].map(|e| Rounded::new(&columns(&t.v, e), dtype));
            let inputs = |v| Inputs::new(t.q.view(), t.k.view(), v);
            let wide = e.next_multiple_of(16);
            let expected = output(attention, inputs(padded.view()), [b, h, l, wide, 1], (exec, memory));
            for apart in [1, 2] {
                let got = output(attention, inputs(own.view()), [b, h, l, e, apart], (exec, memory));
                assert_same_bits(&format!("{what}, {dtype}, {apart} apart"), &got, &columns(&expected, e));
            }
        }
    });
}

#[test]
fn nor_in_an_int8_cache() {
    every(|what, attention, t, exec, memory| {
        let ([b, h, l, d], e) = (t.q.shape, t.v.shape[3]);
        let wide = e.next_multiple_of(16);
        let [got, expected] = [e, wide].map(|e| {
            let mut cache = KvCache::new(b, KvShape { kv_heads: 1, head_dim: d, value_dim: e })
                .unwrap()
                .int8(KeyScales::PerToken)
                .unwrap();
            cache.append(t.k.view(), columns(&t.v, e).view()).unwrap();
            output(attention, Inputs::cached(t.q.view(), &cache), [b, h, l, e, 1], (exec, memory))
        });
        assert_same_bits(what, &got, &columns(&expected, e));
    });
}
