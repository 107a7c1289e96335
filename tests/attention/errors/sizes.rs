//! Wrong sizes, scales and alignments: the error, its words, and outputs as they were.

use sdpa::{Alignment, Attention, Error, Inputs, LayoutError, Outputs, View, ViewMut, Window};

/// Shapes of q, k, v, out and lse.
type Shapes = [[usize; 4]; 5];

/// A good call: batch 2, 4 heads on 2, 3 rows, 5 keys, dims 6 and 7.
const GOOD: Shapes = [[2, 4, 3, 6], [2, 2, 5, 6], [2, 2, 5, 7], [2, 4, 3, 7], [2, 4, 3, 1]];

fn outputs<'a>(out: &'a mut [f32], lse: &'a mut [f32], shapes: &Shapes) -> Outputs<'a> {
    Outputs::new(ViewMut::bhld(out, shapes[3]).unwrap()).lse(ViewMut::bhld(lse, shapes[4]).unwrap())
}

/// The error of a call with these shapes, checked to have left the outputs alone.
fn refusal(attention: Attention, shapes: Shapes) -> Option<Error> {
    let n = |shape: [usize; 4]| shape.iter().product::<usize>();
    let [q, k, v] = [0, 1, 2].map(|i| vec![1.0f32; n(shapes[i])]);
    let [mut out, mut lse] = [3, 4].map(|i| vec![42.0f32; n(shapes[i])]);
    let inputs = Inputs::new(
        View::bhld(&q, shapes[0]).unwrap(),
        View::bhld(&k, shapes[1]).unwrap(),
        View::bhld(&v, shapes[2]).unwrap(),
    );
    let error = attention.problem(inputs, outputs(&mut out, &mut lse, &shapes)).err();
    assert_eq!(sdpa::attention(&attention, inputs, outputs(&mut out, &mut lse, &shapes)).err(), error);
    if error.is_some() {
        assert!(out.iter().chain(&lse).all(|&x| x == 42.0), "a refused call wrote: {error:?}");
    }
    error
}

/// The same with one size changed.
fn with(tensor: usize, dim: usize, size: usize) -> Option<Error> {
    let mut shapes = GOOD;
    shapes[tensor][dim] = size;
    refusal(Attention::new(), shapes)
}

#[track_caller]
fn says(error: Option<Error>, expected: &Error, words: &str) {
    assert_eq!(error.as_ref(), Some(expected));
    assert_eq!(expected.to_string(), words);
}

#[test]
fn memory_that_is_not_given_is_named_with_its_size() {
    let error = Error::Memory { what: "rope", bytes: 1 << 62 };
    assert_eq!(error.to_string(), "rope: could not allocate 4611686018427387904 bytes");
}

#[test]
fn a_good_call_is_no_error() {
    assert_eq!(refusal(Attention::new(), GOOD), None);
}

#[test]
fn sizes_that_do_not_match() {
    let cases = [
        (1, 0, "k", "batch", 9, 2, "q", "k: batch is 9, but q has 2"),
        (2, 0, "v", "batch", 9, 2, "q", "v: batch is 9, but q has 2"),
        (1, 3, "k", "head_dim", 9, 6, "q", "k: head_dim is 9, but q has 6"),
        (2, 1, "v", "heads", 9, 2, "k", "v: heads is 9, but k has 2"),
        (2, 2, "v", "rows", 9, 5, "k", "v: rows is 9, but k has 5"),
        (3, 0, "out", "batch", 9, 2, "q", "out: batch is 9, but q has 2"),
        (3, 1, "out", "heads", 9, 4, "q", "out: heads is 9, but q has 4"),
        (3, 2, "out", "rows", 9, 3, "q", "out: rows is 9, but q has 3"),
        (3, 3, "out", "value_dim", 9, 7, "v", "out: value_dim is 9, but v has 7"),
        (4, 0, "lse", "batch", 9, 2, "q", "lse: batch is 9, but q has 2"),
        (4, 1, "lse", "heads", 9, 4, "q", "lse: heads is 9, but q has 4"),
        (4, 2, "lse", "rows", 9, 3, "q", "lse: rows is 9, but q has 3"),
    ];
    for (tensor, dim, argument, what, got, expected, of, words) in cases {
        says(with(tensor, dim, got), &Error::Mismatch { argument, what, got, expected, of }, words);
    }
    let one = Error::Size {
        argument: "lse",
        what: "last dimension",
        got: 9,
        expected: "1 (one value a row), or 2 (and its rounding error)",
    };
    says(
        with(4, 3, 9),
        &one,
        "lse: last dimension is 9, but must be 1 (one value a row), or 2 (and its rounding error)",
    );
    // Too short is as wrong as too long, and 0 is not a wildcard.
    for got in [0, 1] {
        says(
            with(3, 2, got),
            &Error::Mismatch { argument: "out", what: "rows", got, expected: 3, of: "q" },
            &format!("out: rows is {got}, but q has 3"),
        );
    }
}

#[test]
fn heads_that_do_not_divide() {
    says(
        with(0, 1, 5),
        &Error::Heads { q_heads: 5, kv_heads: 2, of: "k" },
        "q: 5 heads are no multiple of the 2 heads of k",
    );
    let mut shapes = GOOD;
    (shapes[1][1], shapes[2][1]) = (0, 0);
    let error = refusal(Attention::new(), shapes);
    says(error, &Error::Heads { q_heads: 4, kv_heads: 0, of: "k" }, "q: 4 heads are no multiple of the 0 heads of k");
    // More key/value heads than query heads do not divide either.
    (shapes[1][1], shapes[2][1]) = (8, 8);
    let error = refusal(Attention::new(), shapes);
    says(error, &Error::Heads { q_heads: 4, kv_heads: 8, of: "k" }, "q: 4 heads are no multiple of the 8 heads of k");
}

#[test]
fn dims_of_zero() {
    let mut shapes = GOOD;
    (shapes[0][3], shapes[1][3]) = (0, 0);
    let empty = |argument, what| Error::Empty { argument, what };
    says(refusal(Attention::new(), shapes), &empty("q", "head_dim"), "q: head_dim is 0, but must be at least 1");
    let mut shapes = GOOD;
    (shapes[2][3], shapes[3][3]) = (0, 0);
    says(refusal(Attention::new(), shapes), &empty("v", "value_dim"), "v: value_dim is 0, but must be at least 1");
}

#[test]
fn scales_that_are_not_finite() {
    for (scale, words) in
        [(f32::INFINITY, "scale: inf, but must be finite"), (f32::NEG_INFINITY, "scale: -inf, but must be finite")]
    {
        let expected = Error::Number { argument: "scale", got: scale, expected: "finite" };
        says(refusal(Attention::new().scale(scale), GOOD), &expected, words);
    }
    // A NaN equals nothing, itself included.
    let mut shapes = GOOD;
    shapes[3][3] = 7;
    let n = |shape: [usize; 4]| vec![1.0f32; shape.iter().product()];
    let [q, k, v, mut out, _] = shapes.map(n);
    let [q, k, v] = [(&q, 0), (&k, 1), (&v, 2)].map(|(x, i)| View::bhld(x, shapes[i]).unwrap());
    let outputs = Outputs::new(ViewMut::bhld(&mut out, shapes[3]).unwrap());
    let error = Attention::new().scale(f32::NAN).problem(Inputs::new(q, k, v), outputs).unwrap_err();
    assert!(matches!(error, Error::Number { argument: "scale", got, expected: "finite" } if got.is_nan()));
    assert_eq!(error.to_string(), "scale: NaN, but must be finite");
    assert!(out.iter().all(|&x| x == 1.0));
}

#[test]
fn rules_that_need_an_alignment() {
    let unaligned = |rule| Error::Unaligned { rule, sequence: None, q_len: 3, kv_len: 5 };
    let words = "3 rows and 5 keys differ, and no alignment says where the rows stand among the keys \
                 (top-left, bottom-right or an offset)";
    says(refusal(Attention::new().causal(), GOOD), &unaligned("causal"), &format!("causal: {words}"));
    let window = Attention::new().window(Window::inclusive(Some(1), None));
    says(refusal(window, GOOD), &unaligned("window"), &format!("window: {words}"));
    for alignment in [Alignment::TopLeft, Alignment::BottomRight, Alignment::Offset(isize::MIN)] {
        assert_eq!(refusal(Attention::new().causal().align(alignment), GOOD), None);
    }
    // As many rows as keys: nothing to choose.
    let square = [[2, 4, 5, 6], GOOD[1], GOOD[2], [2, 4, 5, 7], [2, 4, 5, 1]];
    assert_eq!(refusal(Attention::new().causal(), square), None);
}

#[test]
fn outputs_past_the_address_space() {
    // Each input fits, by strides of 0; the output could not.
    let (x, big) = ([1.0f32], 1usize << 40);
    let view = |shape| View::from_strides(&x, 0, shape, [0; 4]).unwrap();
    let inputs = Inputs::new(view([1, 1, big, 1]), view([1, 1, 1, 1]), view([1, 1, 1, 1 << 24]));
    let mut out = [42.0];
    let error = Attention::new().problem(inputs, Outputs::new(ViewMut::bhld(&mut out, [1; 4]).unwrap())).err();
    let sizes = [1, 1, big, 1 << 24];
    let words = format!("out: sizes {sizes:?} do not fit the address space");
    says(error, &Error::TooLarge { what: "out", sizes }, &words);
    assert_eq!(out, [42.0]);
}

#[test]
fn views_that_do_not_fit() {
    let (mut data, max) = (vec![1.0f32; 24], usize::MAX);
    let (shape, strides) = ([1, 2, 3, 4], [24, 12, 4, 1]);
    let outside = |strides, reach, len| LayoutError::OutOfBounds { shape, strides, reach, len };
    let cases = [
        (
            View::bhld(&data[..23], shape).err(),
            outside(strides, (0, 23), 23),
            "a view of shape [1, 2, 3, 4] with strides [24, 12, 4, 1] takes 24 elements, but the slice has 23",
        ),
        (
            View::from_strides(&data, 0, shape, [0, -12, 4, 1]).err(),
            outside([0, -12, 4, 1], (-12, 11), 24),
            "a view of shape [1, 2, 3, 4] with strides [0, -12, 4, 1] reaches elements -12..=11, but the slice has 24; \
             negative strides need an offset that leaves room before it",
        ),
        (
            View::bhld(&data, [max, max, 1, 1]).err(),
            LayoutError::TooLarge { shape: [max, max, 1, 1] },
            "a view of shape [18446744073709551615, 18446744073709551615, 1, 1] is larger than the address space",
        ),
        (
            View::packed_qkv(&data, [1, 1, 3, 4], 2).err(),
            LayoutError::Heads { heads: 3, kv_heads: 2 },
            "packed heads do not fit: 3 query heads, 2 key/value heads",
        ),
        (
            ViewMut::from_strides(&mut data, 0, shape, [24, 0, 4, 1]).err(),
            LayoutError::Overlap { shape, strides: [24, 0, 4, 1] },
            "a mutable view of shape [1, 2, 3, 4] with strides [24, 0, 4, 1] holds an element twice; \
             a stride of 0 repeats elements, which only inputs may",
        ),
    ];
    for (got, expected, words) in cases {
        assert_eq!(got.as_ref(), Some(&expected));
        assert_eq!(expected.to_string(), words);
        let wrapped = Error::from(expected.clone());
        assert_eq!((wrapped.to_string().as_str(), &wrapped), (words, &Error::Layout(expected)));
        assert!(core::error::Error::source(&wrapped).is_some_and(|e| e.is::<LayoutError>()));
    }
    assert!(ViewMut::bhl(&mut data, [2, 3, 5]).is_err());
    assert!(ViewMut::blhd(&mut data, [2, 3, 5, 1]).is_err());
    assert!(View::packed_qkv(&data, [1, 1, 3, 4], 0).is_err());
}

#[test]
fn threads_may_share_them_and_question_marks_pass_them_on() {
    fn shared<T: Send + Sync>() {}
    fn error<T: core::error::Error + Send + Sync + 'static>() {}
    shared::<sdpa::Plan>();
    shared::<sdpa::Workspace>();
    shared::<sdpa::Exec>();
    shared::<Attention>();
    shared::<Inputs<'_>>();
    shared::<sdpa::Problem<'_>>();
    error::<Error>();
    error::<LayoutError>();
    let boxed: Box<dyn core::error::Error + Send + Sync> = Error::Heads { q_heads: 1, kv_heads: 2, of: "k" }.into();
    assert!(boxed.source().is_none());
}
