//! 11–17: views that do not fit their slices, and outputs that overlap.

use super::{ACCEPTED, Mistake, answer, mistake, numbers, outcome};
use sdpa::{Attention, Inputs, Outputs, View, ViewMut};

const SHAPE: [usize; 4] = [1, 2, 3, 4];

pub(super) fn mistakes() -> Vec<Mistake> {
    let (data, mut out) = (numbers(24), vec![42.0; 24]);
    let a = "a view of shape [1, 2, 3, 4] with strides";
    let mut_view = "a mutable view of shape [1, 2, 3, 4] with strides";
    let strided = |strides| outcome(View::from_strides(&data, 0, SHAPE, strides));
    let mut all = vec![
        mistake(
            11,
            "slice one element short",
            outcome(View::bhld(&data[..23], SHAPE)),
            format!("{a} [24, 12, 4, 1] takes 24 elements, but the slice has 23"),
        ),
        mistake(
            13,
            "strides beyond the slice",
            strided([0, 12, 5, 1]),
            format!("{a} [0, 12, 5, 1] takes 26 elements, but the slice has 24"),
        ),
        mistake(
            13,
            "an offset and a slice without room for it",
            outcome(View::from_strides(&data, 1, SHAPE, [24, 12, 4, 1])),
            format!("{a} [24, 12, 4, 1] reaches elements 1..=24, but the slice has 24"),
        ),
        mistake(
            14,
            "negative strides with offset 0",
            strided([0, 12, -4, 1]),
            format!(
                "{a} [0, 12, -4, 1] reaches elements -8..=15, but the slice has 24; negative strides need an offset that \
                 leaves room before it"
            ),
        ),
        mistake(
            15,
            "output stride 0",
            outcome(ViewMut::from_strides(&mut out, 0, SHAPE, [0, 0, 4, 1])),
            format!(
                "{mut_view} [0, 0, 4, 1] holds an element twice; a stride of 0 repeats elements, which only inputs may"
            ),
        ),
        mistake(
            16,
            "output rows that overlap",
            outcome(ViewMut::from_strides(&mut out, 0, SHAPE, [24, 12, 3, 1])),
            format!("{mut_view} [24, 12, 3, 1] holds an element twice"),
        ),
        mistake(17, "outputs interleaved but disjoint", interleaved(), ACCEPTED),
    ];
    assert!(out.iter().all(|&x| x == 42.0));
    all.extend(longer());
    all
}

/// Heads one element apart: no element is held twice, and each is where its strides say.
fn interleaved() -> String {
    let (data, mut out) = (numbers(24), vec![42.0; 24]);
    let x = View::bhld(&data, SHAPE).unwrap();
    let strides = [24, 1, 8, 2];
    let view = ViewMut::from_strides(&mut out, 0, SHAPE, strides).unwrap();
    let result = sdpa::attention(&Attention::new(), Inputs::new(x, x, x), Outputs::new(view));
    let dense = answer(Attention::new(), Inputs::new(x, x, x), SHAPE);
    for (i, expected) in dense.into_iter().enumerate() {
        let (h, l, d) = (i / 12, i / 4 % 3, i % 4);
        assert_eq!(out[h + 8 * l + 2 * d].to_bits(), expected.to_bits());
    }
    outcome(result)
}

/// 12: nothing is said of a slice that is longer than its shape needs. What lies behind is not read, NaN as it is, nor
/// written.
fn longer() -> Vec<Mistake> {
    let data = numbers(48);
    let long = [&data[..], &[f32::NAN; 5]].concat();
    let x = |data| View::bhld(data, SHAPE).unwrap();
    let expected = answer(Attention::new(), Inputs::new(x(&data[..24]), x(&data[..24]), x(&data[..24])), SHAPE);
    let longest = [&data[..24], &[f32::NAN; 29]].concat();
    let mut all = Vec::new();
    let stored = [1, 3, 2, 4];
    let mut outs = [(); 3].map(|()| vec![42.0; 31]);
    let [dense, rows_first, strided] = &mut outs;
    let views = [
        ("bhld", ViewMut::bhld(dense, SHAPE)),
        ("blhd", ViewMut::blhd(rows_first, stored)),
        ("from_strides", ViewMut::from_strides(strided, 0, SHAPE, [24, 12, 4, 1])),
    ];
    for (what, view) in views {
        let x = x(&longest);
        let result = sdpa::attention(&Attention::new(), Inputs::new(x, x, x), Outputs::new(view.unwrap()));
        all.push(mistake(12, what, outcome(result), ACCEPTED));
    }
    for (out, by_rows) in outs.iter().zip([false, true, false]) {
        for (i, expected) in expected.iter().enumerate() {
            let (h, l, d) = (i / 12, i / 4 % 3, i % 4);
            let at = if by_rows { (l * 2 + h) * 4 + d } else { i };
            assert_eq!(out[at].to_bits(), expected.to_bits());
        }
        assert_eq!(out[24..], [42.0; 7], "behind the last element");
    }
    // Inputs of other layouts: two heads on one in each packed row of 16, and rows before heads.
    let packed = |data| View::packed_qkv(data, [1, 3, 2, 4], 1).unwrap();
    let results = [&data[..], &long].map(|data| {
        let [q, k, v] = packed(data);
        answer(Attention::new(), Inputs::new(q, k, v), SHAPE)
    });
    assert_eq!(results[0], results[1]);
    let rows_first = [&data[..24], &longest].map(|data| {
        let x = View::blhd(data, stored).unwrap();
        answer(Attention::new(), Inputs::new(x, x, x), SHAPE)
    });
    assert_eq!(rows_first[0], rows_first[1]);
    assert!(results[1].iter().chain(&rows_first[1]).all(|x| x.is_finite()));
    all
}
