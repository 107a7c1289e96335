//! `Plan::explain`: counts of blocks and FLOPs, what is said about a call, and how it is printed.

use crate::support::Rng;
use sdpa::{
    Alignment, Attention, Exec, Explanation, Inputs, Isa, KvCache, KvShape, Machine, Mask, NoMatrixUnit, Outputs, Plan,
    Point, View, ViewMut, Window,
};

const D: usize = 16;

/// Explains a call of one head with the same row everywhere.
fn explain(attention: Attention, rows: usize, keys: usize, machine: Option<Machine>) -> Explanation {
    let (data, mut out) = (vec![0.0; D], vec![0.0; rows * D]);
    let view = |rows| View::from_strides(&data, 0, [1, 1, rows, D], [0, 0, 0, 1]).unwrap();
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, rows, D]).unwrap());
    let problem = attention.problem(Inputs::new(view(rows), view(keys), view(keys)), outputs).unwrap();
    Plan::new(&problem, Exec::serial()).explain(&problem, machine)
}

/// 2·(D + Dv) for each pair.
fn flops(pairs: usize) -> f64 {
    (pairs * 4 * D) as f64
}

fn share(e: &Explanation) -> f64 {
    e.blocks.0 as f64 / (e.blocks.0 + e.blocks.1) as f64
}

#[test]
fn without_rules_everything_is_computed() {
    let e = explain(Attention::new(), 1024, 1024, None);
    let tiles = 1024usize.div_ceil(Isa::detect().tile().0) as u64;
    assert_eq!(e.blocks, (tiles * 4, 0));
    assert_eq!((e.useful_flops, e.computed_flops), (flops(1024 * 1024), flops(1024 * 1024)));
    assert_eq!(e.bytes, (4 * 4 * 1024 * D) as f64);
    assert_eq!(e.seconds, None);
    // Keys of no whole panel are computed in whole panels.
    let e = explain(Attention::new(), 10, 20, None);
    assert_eq!((e.useful_flops, e.computed_flops), (flops(10 * 20), flops(10 * 32)));
}

#[test]
fn causal_skips_about_half() {
    let length = 4096;
    let e = explain(Attention::new().causal(), length, length, None);
    assert!((0.5..0.56).contains(&share(&e)), "{:?}", e.blocks);
    assert_eq!(e.useful_flops, flops(length * (length + 1) / 2));
    assert!((1.0..1.02).contains(&(e.computed_flops / e.useful_flops)), "{e}");
    // Rows before the first key compute nothing.
    let e = explain(Attention::new().causal().align(Alignment::Offset(-2000)), 1000, 1000, None);
    assert_eq!((e.blocks.0, e.useful_flops, e.computed_flops), (0, 0.0, 0.0));
}

#[test]
fn a_window_of_a_long_sequence_skips_most() {
    let length = 16_384;
    let e = explain(Attention::new().causal().window(Window::inclusive(Some(255), None)), length, length, None);
    assert!(share(&e) < 0.04, "{:?}", e.blocks);
    let pairs = 256 * length - 255 * 256 / 2;
    assert_eq!(e.useful_flops, flops(pairs));
    assert!(e.computed_flops / e.useful_flops < 1.2, "{e}");
    // The first keys, kept, cost one block a tile more.
    let kept = explain(
        Attention::new().causal().window(Window::inclusive(Some(255), None).keep_first(4)),
        length,
        length,
        None,
    );
    assert!(kept.blocks.0 > e.blocks.0 && share(&kept) < 0.06, "{:?}", kept.blocks);
    assert!(kept.useful_flops > e.useful_flops);
}

/// Blocks are not looked at one by one: neither those that no row sees, nor those that all rows see.
#[test]
fn no_number_of_keys_takes_time() {
    const ROWS: usize = 7;
    let far = Attention::new().align(Alignment::Offset((1 << 39) + 100));
    let window = Window::inclusive(Some(2), Some(3)).keep_first(4);
    let tiles = ROWS.div_ceil(Isa::detect().tile().0);
    for keys in [1usize << 40, (1 << 50) + 3] {
        for (attention, seen, pairs) in [
            (Attention::new().causal().align(Alignment::TopLeft), 1, (1..=ROWS).sum()),
            (far.window(window), 2, ROWS * (4 + 6)),
            (far.window(window).causal(), 2, ROWS * (4 + 3)),
            (
                far.window(Window::inclusive(None, Some(0))),
                (1 << 31) + 1,
                (0..ROWS).map(|row| (1 << 39) + 101 + row).sum(),
            ),
            (Attention::new(), keys.div_ceil(256), ROWS * keys),
        ] {
            let (data, mut out) = ([0.5; D], [0.0; ROWS * D]);
            let view = |rows| View::from_strides(&data, 0, [1, 1, rows, D], [0, 0, 0, 1]).unwrap();
            let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, ROWS, D]).unwrap());
            let problem = attention.problem(Inputs::new(view(ROWS), view(keys), view(keys)), outputs).unwrap();
            let plan = Plan::new(&problem, Exec::serial().threads(3));
            let e = plan.explain(&problem, None);
            let all = keys.div_ceil(256) * tiles;
            assert_eq!(e.blocks, ((seen * tiles) as u64, (all - seen * tiles) as u64), "{attention:?}, {keys} keys");
            assert_eq!(e.useful_flops, 4.0 * D as f64 * pairs as f64, "{attention:?}, {keys} keys");
            assert!(!plan.balance(&problem, 2).is_empty(), "{attention:?}, {keys} keys");
        }
    }
}

/// Counts are those of each pair of a row and a key.
#[test]
fn counts_are_those_of_pairs() {
    let tile_rows = Isa::detect().tile().0;
    for seed in 0..300 {
        let rng = &mut Rng::new(seed);
        let (rows, keys) = (1 + rng.below(20), 1 + rng.below(2000));
        let offset = rng.below(3000) as isize - 800;
        let side = |rng: &mut Rng| rng.pick(&[None, Some(0), Some(3), Some(100), Some(255), Some(700)]);
        let (left, right, first, causal) = (side(rng), side(rng), rng.pick(&[0, 0, 5, 300, 900]), rng.below(2) == 0);
        let mut attention = Attention::new().align(Alignment::Offset(offset));
        attention = attention.window(Window::inclusive(left, right).keep_first(first));
        attention = if causal { attention.causal() } else { attention };
        let sees = |row: usize, key: usize| {
            let (at, key) = (row as isize + offset, key as isize);
            let inside = left.is_none_or(|n| at - n as isize <= key) && right.is_none_or(|n| key <= at + n as isize);
            (inside || (0..first as isize).contains(&key)) && (!causal || key <= at)
        };
        let (mut blocks, mut useful, mut computed) = ((0, 0), 0, 0);
        for tile in (0..rows).step_by(tile_rows) {
            let tile = tile..rows.min(tile + tile_rows);
            for block in (0..keys).step_by(256) {
                let block = block..keys.min(block + 256);
                let seen: Vec<usize> = block.filter(|&key| tile.clone().any(|row| sees(row, key))).collect();
                useful += seen.iter().map(|&key| tile.clone().filter(|&row| sees(row, key)).count()).sum::<usize>();
                let (Some(low), Some(high)) = (seen.first(), seen.last()) else {
                    blocks.1 += 1;
                    continue;
                };
                blocks.0 += 1;
                computed += (high / 16 * 16 + 16 - low / 16 * 16) * tile.len();
            }
        }
        let e = explain(attention, rows, keys, None);
        let counts = (e.blocks, e.useful_flops, e.computed_flops);
        assert_eq!(counts, (blocks, flops(useful), flops(computed)), "seed {seed}: {rows} × {keys}, {attention:?}");
    }
}

/// Keys that the call does not name are not read.
#[test]
fn bytes_are_those_of_the_sequences_of_the_call() {
    let (lens, data) = ([700, 5, 300], [0.5; D]);
    let view = |heads, rows| View::from_strides(&data, 0, [1, heads, rows, D], [0, 0, 0, 1]).unwrap();
    let mut cache = KvCache::new(3, KvShape { kv_heads: 2, head_dim: D, value_dim: D }).unwrap();
    for (sequence, len) in lens.into_iter().enumerate() {
        cache.append_to(sequence, view(2, len), view(2, len)).unwrap();
    }
    for (sequences, keys) in [(&[0, 1, 2][..], 1005), (&[1, 2], 305), (&[2], 300)] {
        let shape = [sequences.len(), 4, 1, D];
        let q = View::from_strides(&data, 0, shape, [0, 0, 0, 1]).unwrap();
        let mut out = vec![0.0; shape.iter().product()];
        // All sequences, in their own order, need no list.
        let all = Inputs::cached(q, &cache);
        let inputs = if keys == 1005 { all } else { all.sequences(sequences) };
        let problem = Attention::new().problem(inputs, Outputs::new(ViewMut::bhld(&mut out, shape).unwrap())).unwrap();
        let e = Plan::new(&problem, Exec::serial()).explain(&problem, None);
        let floats = 2 * sequences.len() * 4 * D + 2 * keys * 2 * D;
        assert_eq!(e.bytes, 4.0 * floats as f64, "{sequences:?}");
    }
}

#[test]
fn lengths_and_heads_count() {
    let (data, mut out) = (vec![0.0; D], vec![0.0; 2 * 4 * 100 * D]);
    let view = |heads, rows| View::from_strides(&data, 0, [2, heads, rows, D], [0, 0, 0, 1]).unwrap();
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [2, 4, 100, D]).unwrap());
    let inputs = Inputs::new(view(4, 100), view(2, 300), view(2, 300)).kv_lens(&[300, 0]);
    let problem = Attention::new().problem(inputs, outputs).unwrap();
    let e = Plan::new(&problem, Exec::serial()).explain(&problem, None);
    let tiles = 100usize.div_ceil(Isa::detect().tile().0) as u64;
    assert_eq!(e.blocks, (4 * tiles * 2, 0));
    assert_eq!(e.useful_flops, flops(4 * 100 * 300));
}

#[test]
fn a_machine_makes_a_time() {
    let machine = Machine { flops: 1e9, bytes: 1e9 };
    let e = explain(Attention::new(), 512, 512, Some(machine));
    assert_eq!(e.seconds, Some(e.useful_flops / 1e9));
    let starved = Machine { flops: 1e30, bytes: 1e6 };
    let e = explain(Attention::new(), 512, 512, Some(starved));
    assert_eq!(e.seconds, Some(e.bytes / 1e6));
    let measured = Machine::measure(Isa::detect());
    assert!(measured.flops > 1e8 && measured.bytes > 1e8, "{measured:?}");
}

#[test]
fn notes_say_why() {
    let (data, bias, keep) = (vec![0.0; D * 20], [0.0; 20], [true; 20]);
    let (mut out, mut lse) = (vec![0.0; 20 * 5], vec![0.0; 20]);
    let (mut weights, mut mass) = (vec![0.0; 400], vec![0.0; 20]);
    let backwards = View::from_strides(&data, D - 1, [1, 1, 20, D], [0, 0, 0, -1]).unwrap();
    let values = View::from_strides(&data, 0, [1, 1, 20, 5], [0, 0, D as isize, 1]).unwrap();
    let inputs = Inputs::new(backwards, backwards, values)
        .bias(View::bhld(&bias, [1, 1, 1, 20]).unwrap())
        .mask(Mask::keep(View::bhld(&keep, [1, 1, 1, 20]).unwrap()));
    let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 20, 5]).unwrap())
        .lse(ViewMut::bhl(&mut lse, [1, 1, 20]).unwrap())
        .scores(Point::Weights, ViewMut::bhld(&mut weights, [1, 1, 20, 20]).unwrap())
        .key_weight_sums(ViewMut::bhl(&mut mass, [1, 1, 20]).unwrap());
    let problem = Attention::new().problem(inputs, outputs).unwrap();
    let narrowest = Isa::available().next().unwrap();
    let e = Plan::new(&problem, Exec::serial().isa(narrowest)).explain(&problem, None);
    let mut expected = vec![
        "queries are copied",
        "keys are packed element by element",
        "values are copied: value_dim is not a multiple of 16",
        "the mask is read tile by tile",
        "the bias is read tile by tile",
        "scores are written out, so nothing is skipped",
        "key weight sums take two more",
        "one thread",
    ];
    if narrowest != Isa::detect() {
        expected.insert(0, "portable as set");
    }
    if narrowest.matrix_unit().is_ok() {
        expected.push("the matrix unit multiplies");
    }
    assert_eq!(e.notes.len(), expected.len(), "{:?}", e.notes);
    for (note, expected) in e.notes.iter().zip(expected) {
        assert!(note.starts_with(expected), "{note:?} for {expected:?}");
    }
    let plain = explain(Attention::new(), 20, 20, None);
    let unit = matches!(Isa::detect().matrix_unit(), Ok(()) | Err(NoMatrixUnit::Refused));
    assert_eq!(plain.notes.iter().filter(|note| note.contains("matrix unit")).count(), usize::from(unit));
    assert_eq!(plain.notes.len(), 1 + usize::from(unit), "{:?}", plain.notes);
    for (sides, narrow) in [([255, 256], true), ([256, 256], false)] {
        let [left, right] = sides.map(Some);
        let e = explain(Attention::new().window(Window::inclusive(left, right)), 20, 20, None);
        assert_eq!(e.notes.iter().any(|note| note.starts_with("the window is narrow")), narrow, "{sides:?}");
    }
    for (rows, step, far) in [(17, 1023, false), (17, 1024, true), (16, 1024, false)] {
        let (data, mut out) = (vec![0.0; 20 * step], vec![0.0; rows * 16]);
        let view = |rows, step| View::from_strides(&data, 0, [1, 1, rows, 16], [0, 0, step as isize, 1]).unwrap();
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, rows, 16]).unwrap());
        let inputs = Inputs::new(view(rows, 16), view(20, 16), view(20, step));
        let problem = Attention::new().problem(inputs, outputs).unwrap();
        let e = Plan::new(&problem, Exec::serial()).explain(&problem, None);
        assert_eq!(e.notes.iter().any(|note| note.contains("4 KiB or more apart")), far, "{rows} rows, {step}");
    }
}

#[test]
fn it_prints() {
    let e = explain(Attention::new().causal(), 1024, 1024, Some(Machine { flops: 1e9, bytes: 1e9 }));
    let text = e.to_string();
    let lines: Vec<&str> = text.lines().collect();
    let plan = e.plan.to_string();
    assert!(text.starts_with(&plan), "{text}");
    let rest = &lines[plan.lines().count()..];
    assert_eq!(rest[0], format!("tiles of rows against key blocks: {} computed, {} skipped", e.blocks.0, e.blocks.1));
    let percent = 100.0 * e.useful_flops / e.computed_flops;
    assert_eq!(rest[1], format!("{:.3} GFLOP useful, {percent:.0} % of what is computed", e.useful_flops / 1e9));
    assert_eq!(rest[2], "0.3 MB of tensors, at least 33.587 ms");
    assert!(rest[3..].iter().all(|line| line.starts_with("- ")), "{text}");
    assert!(plan.starts_with("1 × 1 heads (1 key/value), 1024 rows × 1024 keys, 16 → 16\n"), "{plan}");
    assert!(plan.contains("KiB of scratch each"), "{plan}");
}

/// Sequences without rows, and rows without heads, are not gone through.
#[test]
fn calls_without_rows_or_heads_are_explained_at_once() {
    let data = [0.0; D];
    for [batch, heads, rows] in [[1 << 50, 1, 0], [1, 0, 1 << 50]] {
        let view = |rows| View::from_strides(&data, 0, [batch, heads, rows, D], [0, 0, 0, 1]).unwrap();
        let outputs = Outputs::new(ViewMut::<f32>::bhld(&mut [], [batch, heads, rows, D]).unwrap());
        let problem = Attention::new().problem(Inputs::new(view(rows), view(5), view(5)), outputs).unwrap();
        let e = Plan::new(&problem, Exec::serial()).explain(&problem, None);
        assert_eq!((e.blocks, e.useful_flops, e.computed_flops), ((0, 0), 0.0, 0.0));
    }
}
