//! Views of any offset, shape and strides reach nothing outside their memory, and calls with them do not panic.

use proptest::prelude::*;
use sdpa::{Attention, Inputs, Outputs, View, ViewMut};

/// Strides and sizes from the sane to the extreme.
fn strides() -> impl Strategy<Value = [isize; 4]> {
    let one = || prop_oneof![4 => -30..30isize, 1 => any::<isize>(), 1 => prop::sample::select(vec![isize::MIN, isize::MAX, 0])];
    [one(), one(), one(), one()]
}

fn shape() -> impl Strategy<Value = [usize; 4]> {
    let one = || prop_oneof![12 => 0..5usize, 1 => any::<usize>(), 1 => prop::sample::select(vec![usize::MAX, isize::MAX as usize])];
    [one(), one(), one(), one()]
}

fn offset() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 0..100usize, 1 => any::<usize>(), 1 => prop::sample::select(vec![usize::MAX, isize::MAX as usize])]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 20_000,
        failure_persistence: None,
        rng_seed: proptest::test_runner::RngSeed::Fixed(20_261_121),
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_view_reaches_outside(len in 0..100usize, offset in offset(), shape in shape(), strides in strides()) {
        let mut data: Vec<usize> = (0..len).collect();
        let small = shape.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).is_some_and(|n| (1..=256).contains(&n));
        let expected = |index: [usize; 4]| {
            offset as i128 + index.iter().zip(strides).map(|(&i, s)| i as i128 * s as i128).sum::<i128>()
        };
        if let Ok(view) = View::from_strides(&data, offset, shape, strides) {
            prop_assert_eq!((view.shape(), view.strides()), (shape, strides));
            for index in crate::support::indices(shape).take(if small { usize::MAX } else { 0 }) {
                prop_assert_eq!(view.get(index).map(|&x| x as i128), Some(expected(index)));
            }
            prop_assert!(view.get([shape[0], 0, 0, 0]).is_none() && view.get([usize::MAX; 4]).is_none());
        } else if small {
            // Refused: then something does lie outside.
            let outside = |index| !(0..len as i128).contains(&expected(index));
            prop_assert!(crate::support::indices(shape).any(outside), "refused a view that fits");
        }
        if let Ok(view) = ViewMut::from_strides(&mut data, offset, shape, strides) && small {
            let mut all: Vec<i128> = crate::support::indices(shape).map(expected).collect();
            let n = all.len();
            all.sort_unstable();
            all.dedup();
            prop_assert_eq!(all.len(), n, "an element is held twice");
            prop_assert!(crate::support::indices(shape).all(|i| view.as_view().get(i).is_some()));
        }
    }

    #[test]
    fn named_layouts_refuse_any_shape_that_does_not_fit(len in 0..100usize, shape in shape(), kv_heads in 0..5usize) {
        let mut data = vec![0.0f32; len];
        let n = shape.iter().try_fold(1usize, |n, &s| n.checked_mul(s));
        for view in [View::bhld(&data, shape), View::blhd(&data, shape)] {
            // A shape with a 0 in it is empty, but may still be too large to have strides.
            let fits = if view.is_ok() { n.is_some_and(|n| n <= len) } else { n.is_none_or(|n| n > len || n == 0) };
            prop_assert!(fits, "{:?} of {}", shape, len);
        }
        let _ = View::packed_qkv(&data, shape, kv_heads);
        if let Ok([q, k, v]) = ViewMut::packed_qkv(&mut data, shape, kv_heads) {
            let all: usize = [q, k, v].iter().map(|view| view.shape().iter().product::<usize>()).sum();
            prop_assert!(all <= len, "{:?} of {}", shape, len);
        }
        let _ = ViewMut::blhd(&mut data, shape);
        let _ = ViewMut::bhl(&mut data, [shape[0], shape[1], shape[2]]);
    }

    /// Views that exist can be called with: whatever the strides, an answer or an error.
    #[test]
    fn no_call_panics(sizes: [u8; 7], far in shape(), strides in [strides(), strides(), strides()], square: bool) {
        let data = [1.0f32; 64];
        // Sizes that mostly fit together, now and then one that is out of all proportion.
        let [b, h, hkv, lq, lk, d, dv] = sizes.map(|n| n as usize % 5);
        let (far, lk) = (if sizes[0] > 240 { far[0] } else { h * hkv }, if square { lq } else { lk });
        let shapes = [[b, far, lq, d], [b, hkv, lk, d], [b, hkv, lk, dv]];
        let views = [0, 1, 2].map(|i| View::from_strides(&data, 30, shapes[i], strides[i]));
        if let [Ok(q), Ok(k), Ok(v)] = views {
            let mut out = [0.0; 1024];
            let shape = [q.shape()[0], q.shape()[1], q.shape()[2], v.shape()[3]];
            if let Ok(out) = ViewMut::bhld(&mut out, shape) {
                let _ = sdpa::attention(&Attention::new(), Inputs::new(q, k, v), Outputs::new(out));
            }
        }
    }
}
