//! Tables and rotary positions: against f64, in any arrangement of sequences, and what they refuse.

use crate::vectors::{bits, normal};
use sdpa::Exec;
use sdpa_layers::{Compute, Embedding, Rope, RopePairs, Sequences};

#[test]
fn sines_and_cosines_are_those_of_the_paper() {
    for width in [1, 2, 7, 32] {
        let table = Embedding::sinusoidal(5000, width).unwrap();
        assert_eq!((table.entries(), table.width()), (5000, width));
        let mut x = vec![0.0; 5000 * width];
        table.add_positions(&mut x, Sequences::one(5000), 0, &mut Compute::default()).unwrap();
        for (i, &got) in x.iter().enumerate() {
            let (position, column) = ((i / width) as f64, i % width);
            let angle = position / 10_000f64.powf((column / 2 * 2) as f64 / width as f64);
            let expected = if column % 2 == 0 { angle.sin() } else { angle.cos() };
            assert!((f64::from(got) - expected).abs() < 1e-7, "{width}: row {position}, column {column}");
        }
    }
}

#[test]
fn pairs_are_turned_by_their_angle_and_the_rest_stays() {
    let (heads, head_dim, dim, rows, first) = (3, 10, 6, 40, 7);
    let x = normal(rows * heads * head_dim, 1);
    for pairs in [RopePairs::Half, RopePairs::Interleaved] {
        let rope = Rope::new(rows + first, dim, 500.0, pairs).unwrap();
        let mut got = x.clone();
        rope.rotate(&mut got, [heads, head_dim], Sequences::one(rows), first, &mut Compute::default()).unwrap();
        for (n, (got, x)) in got.chunks_exact(head_dim).zip(x.chunks_exact(head_dim)).enumerate() {
            let position = (first + n / heads) as f64;
            for pair in 0..dim / 2 {
                let (a, b) = if pairs == RopePairs::Half { (pair, pair + 3) } else { (2 * pair, 2 * pair + 1) };
                let (sin, cos) = (position * 500f64.powf(-(2.0 * pair as f64) / dim as f64)).sin_cos();
                let (x, y) = (f64::from(x[a]), f64::from(x[b]));
                assert!((f64::from(got[a]) - (x * cos - y * sin)).abs() < 1e-6, "{pairs:?}: {n}, {pair}");
                assert!((f64::from(got[b]) - (x * sin + y * cos)).abs() < 1e-6, "{pairs:?}: {n}, {pair}");
            }
            assert_eq!(got[dim..], x[dim..]);
        }
    }
}

#[test]
fn a_product_depends_on_the_distance_alone() {
    let (q, k) = (normal(64, 2), normal(64, 3));
    let rope = Rope::new(5000, 64, 10_000.0, RopePairs::Half).unwrap();
    let at = |x: &[f32], position: usize| {
        let mut x = x.to_vec();
        rope.rotate(&mut x, [1, 64], Sequences::one(1), position, &mut Compute::default()).unwrap();
        x
    };
    let product = |i: usize, j: usize| -> f32 { at(&q, i).iter().zip(at(&k, j)).map(|(q, k)| q * k).sum() };
    for shift in [1, 100, 4000] {
        assert!((product(20, 3) - product(20 + shift, 3 + shift)).abs() < 1e-5, "{shift}");
    }
}

#[test]
fn each_sequence_counts_for_itself() {
    let (width, first) = (8, 3);
    let rope = Rope::new(64, 4, 10_000.0, RopePairs::Interleaved).unwrap();
    let table = Embedding::new(normal(64 * width, 4), width).unwrap();
    let run = |x: &[f32], sequences: Sequences<'_>, exec: Exec| {
        let (mut x, mut compute) = (x.to_vec(), Compute::new(exec));
        rope.rotate(&mut x, [2, 4], sequences, first, &mut compute).unwrap();
        table.add_positions(&mut x, sequences, first, &mut compute).unwrap();
        x
    };
    let ends = [0, 0, 5, 5, 6, 36, 36];
    let x = normal(36 * width, 5);
    let together = run(&x, Sequences::Ragged(&ends), Exec::serial());
    for range in (0..6).map(|s| Sequences::Ragged(&ends).rows(s)) {
        let part = &x[range.start * width..range.end * width];
        let alone = run(part, Sequences::one(range.len()), Exec::serial());
        assert_eq!(bits(&alone), bits(&together[range.start * width..range.end * width]), "{range:?}");
        let batch = run(&part.repeat(3), Sequences::Even { batch: 3, len: range.len() }, Exec::serial());
        assert_eq!(bits(&batch), bits(&alone.repeat(3)), "{range:?}");
    }
}

#[test]
fn threads_do_not_show() {
    let (rows, width) = (20_000, 64);
    let rope = Rope::new(50, 32, 10_000.0, RopePairs::Half).unwrap();
    let table = Embedding::new(normal(100 * width, 6), width).unwrap();
    let tokens: Vec<u32> = (0..rows as u32).map(|i| i * 7 % 100).collect();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    let run = |threads: usize| {
        let (mut x, mut compute) = (vec![f32::NAN; rows * width], Compute::new(Exec::serial().threads(threads)));
        let sequences = Sequences::Even { batch: rows / 50, len: 50 };
        table.look_up(&tokens, &mut x, &mut compute).unwrap();
        table.add_positions(&mut x, sequences, 0, &mut compute).unwrap();
        rope.rotate(&mut x, [2, 32], sequences, 0, &mut compute).unwrap();
        bits(&x)
    };
    let one = run(1);
    for threads in [2, 3, 4] {
        assert!(pool.install(|| run(threads)) == one, "{threads}");
    }
}

/// `$call` is refused with these words.
macro_rules! refused {
    ($call:expr, $words:expr) => {
        assert_eq!($call.unwrap_err().to_string(), $words)
    };
}

#[test]
fn a_number_past_the_table_is_named_with_its_place_and_the_limit() {
    let mut compute = Compute::default();
    let table = Embedding::new(vec![1.0; 20], 2).unwrap();
    let mut x = vec![0.5; 6];
    refused!(
        table.look_up(&[9, 10, 3], &mut x, &mut compute),
        "tokens: entry 1 is 10, but must be at most 9, the last row of the table"
    );
    refused!(
        table.look_up(&[u32::MAX; 3], &mut x, &mut compute),
        "tokens: entry 0 is 4294967295, but must be at most 9, the last row of the table"
    );
    let three = Sequences::one(3);
    let last = "positions: entry 2 is 10, but must be at most 9, the last row of the table";
    refused!(table.add_positions(&mut x, three, 8, &mut compute), last);
    let past = "positions: entry 0 is 11, but must be at most 9, the last row of the table";
    refused!(table.add_positions(&mut x, three, 11, &mut compute), past);
    let past = format!("positions: entry 0 is {}, but must be at most 9, the last row of the table", usize::MAX);
    refused!(table.add_positions(&mut x, three, usize::MAX, &mut compute), past);
    let ragged = Sequences::Ragged(&[0, 1, 3]);
    let second = "positions: entry 2 is 10, but must be at most 9, the last row of the table";
    refused!(table.add_positions(&mut x, ragged, 9, &mut compute), second);
    let rope = Rope::new(10, 2, 10_000.0, RopePairs::Half).unwrap();
    refused!(rope.rotate(&mut x, [1, 2], three, 8, &mut compute), last);
    assert_eq!(x, [0.5; 6]);
    // The last position is there.
    rope.rotate(&mut x, [1, 2], three, 7, &mut compute).unwrap();
    table.add_positions(&mut x, three, 7, &mut compute).unwrap();
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let mut compute = Compute::default();
    refused!(Embedding::new([], 2), "embedding: number of entries is 0, but must be at least 1");
    refused!(Embedding::new([1.0], 0), "embedding: width is 0, but must be at least 1");
    refused!(Embedding::new([1.0; 3], 2), "embedding: length is 3, but must be a multiple of 2, the width of a row");
    refused!(
        Embedding::sinusoidal(usize::MAX, 2),
        format!("embedding: sizes [{}, 2, 1, 1] do not fit the address space", usize::MAX)
    );
    refused!(Rope::new(8, 3, 1e4, RopePairs::Half), "rope dim: 3, but must be even");
    refused!(Rope::new(8, 0, 1e4, RopePairs::Half), "rope: dim is 0, but must be at least 1");
    refused!(Rope::new(0, 2, 1e4, RopePairs::Half), "rope: number of positions is 0, but must be at least 1");
    for theta in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let words = format!("rope theta: {theta}, but must be positive and finite");
        refused!(Rope::new(8, 2, theta, RopePairs::Half), words);
    }
    refused!(Rope::from_frequencies(8, &[1.0, f64::NAN], RopePairs::Half), "rope frequencies: NaN, but must be finite");
    let words = format!("rope: sizes [{}, 2, 1, 1] do not fit the address space", usize::MAX / 4);
    refused!(Rope::new(usize::MAX / 4, 2, 1e4, RopePairs::Half), words);

    let table = Embedding::new(vec![1.0; 20], 2).unwrap();
    let rope = Rope::new(10, 4, 1e4, RopePairs::Half).unwrap();
    let mut x = vec![0.5; 8];
    refused!(
        table.look_up(&[1, 2], &mut x, &mut compute),
        "out: length is 8, but must be exactly 4, the number of rows × their width"
    );
    refused!(
        table.add_positions(&mut x, Sequences::one(3), 0, &mut compute),
        "x: rows is 4, but must be exactly 3, the tokens of all sequences"
    );
    refused!(
        table.add_positions(&mut x[..7], Sequences::one(3), 0, &mut compute),
        "x: length is 7, but must be a multiple of 2, the width of a row"
    );
    let falling = Sequences::Ragged(&[0, 3, 2, 4]);
    refused!(
        table.add_positions(&mut x, falling, 0, &mut compute),
        "sequences: entry 2 is 2, but must be at least 3, the entry before it"
    );
    let lengths = "sequences: entry 0 is 3, but must be exactly 0, where cumulative lengths begin";
    refused!(table.add_positions(&mut x, Sequences::Ragged(&[3, 1]), 0, &mut compute), lengths);
    let early = "sequences: entry 1 is 3, but must be exactly 4, the number of rows";
    refused!(table.add_positions(&mut x, Sequences::Ragged(&[0, 3]), 0, &mut compute), early);
    refused!(
        rope.rotate(&mut x, [4, 2], Sequences::one(1), 0, &mut compute),
        "x: head_dim is 2, but must be at least 4, the dim of the rope"
    );
    refused!(rope.rotate(&mut x, [0, 4], Sequences::one(1), 0, &mut compute), "x: heads is 0, but must be at least 1");
    refused!(
        rope.rotate(&mut x, [1, 4], Sequences::one(1), 0, &mut compute),
        "x: rows is 2, but must be exactly 1, the tokens of all sequences"
    );
    assert_eq!(x, [0.5; 8]);
    // Nothing to do is done, whatever its batch.
    let nothing = Sequences::Even { batch: usize::MAX, len: 0 };
    rope.rotate(&mut [], [1, 4], nothing, 0, &mut compute).unwrap();
    table.add_positions(&mut [], Sequences::Even { batch: 0, len: 99 }, 0, &mut compute).unwrap();
}

#[test]
fn tables_that_no_machine_can_hold_are_refused() {
    for pairs in [RopePairs::Half, RopePairs::Interleaved] {
        let rope = |positions, dim| Rope::new(positions, dim, 1e4, pairs);
        let sizes = |positions: usize, dim: usize| {
            format!("rope: sizes [{positions}, {dim}, 1, 1] do not fit the address space")
        };
        refused!(rope(1, usize::MAX - 1), sizes(1, usize::MAX - 1));
        refused!(rope(1, 1 << 61), sizes(1, 1 << 61));
        refused!(rope(0, usize::MAX - 1), "rope: number of positions is 0, but must be at least 1");
        // Few enough to have an address each, and more than there is memory for.
        refused!(rope(1, 1 << 60), format!("rope: could not allocate {} bytes", 1usize << 62));
        refused!(rope(1 << 58, 2), format!("rope: could not allocate {} bytes", 1usize << 61));
        refused!(
            Rope::from_frequencies(1 << 58, &[1.0], pairs),
            format!("rope: could not allocate {} bytes", 1usize << 61)
        );
    }
    let sizes = format!("embedding: sizes [{}, 2, 1, 1] do not fit the address space", 1usize << 61);
    refused!(Embedding::sinusoidal(1 << 61, 2), sizes);
    refused!(Embedding::sinusoidal(1 << 58, 2), format!("embedding: could not allocate {} bytes", 1usize << 61));
    refused!(Embedding::sinusoidal(usize::MAX, 0), "embedding: width is 0, but must be at least 1");
    refused!(Embedding::sinusoidal(0, usize::MAX), "embedding: number of entries is 0, but must be at least 1");
}

#[test]
fn rows_rotated_by_positions_of_their_own_are_rows_that_begin_there() {
    let rope = Rope::new(40, 6, 10_000.0, RopePairs::Half).expect("good sizes");
    let factor = 1.25;
    let scaled = rope.clone().attention_factor(factor).expect("finite");
    let x: Vec<f32> = (0..5 * 16).map(|i| (i as f32).sin()).collect();
    let positions = [7, 0, 39, 7, 3];
    for rope in [&rope, &scaled] {
        let mut got = x.clone();
        rope.rotate_by(&mut got, [2, 8], &positions, &mut Compute::default()).expect("they fit");
        for ((got, x), &position) in got.chunks(16).zip(x.chunks(16)).zip(&positions) {
            let mut row = x.to_vec();
            rope.rotate(&mut row, [2, 8], Sequences::one(1), position as usize, &mut Compute::default())
                .expect("it fits");
            assert_eq!(got, row);
            // Columns behind the rope's are not touched, by a factor neither.
            assert_eq!([&got[6..8], &got[14..]], [&x[6..8], &x[14..]]);
        }
    }
    let (mut one, mut other) = (x.clone(), x.clone());
    rope.rotate_by(&mut one, [2, 8], &positions, &mut Compute::default()).expect("they fit");
    scaled.rotate_by(&mut other, [2, 8], &positions, &mut Compute::default()).expect("they fit");
    for (n, (one, other)) in one.iter().zip(&other).enumerate() {
        let expected = if n % 8 < 6 { factor * one } else { *one };
        assert!((other - expected).abs() <= 1e-6, "{n}: {other} and {expected}");
    }
    for bad in [&[7, 0, 40, 7, 3][..], &[7, 0, -1, 7, 3], &[0; 4]] {
        let mut same = x.clone();
        let error = rope.rotate_by(&mut same, [2, 8], bad, &mut Compute::default()).expect_err("a mistake");
        assert!(error.to_string().contains("positions"), "{error}");
        assert_eq!(same, x);
    }
    assert!(rope.attention_factor(f32::NAN).is_err());
}
