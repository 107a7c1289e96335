//! Products of bfloat16 by the machine's own instruction, of whole numbers and of parts: one answer however the work is cut and
//! wherever the tensors lie, within the documented distance of the exact one; and the exact one where there is no such instruction.

use super::short::{Rounded, Short, append, cache_of, empty_cache};
use crate::kv_support::{Pool, cuts, same_full};
use crate::options::{Case, Full, Wanted, same_rows};
use crate::support::{LAYOUTS, Rng, Tensor, execs};
use sdpa::{Alignment, Attention, BlockTable, Dtype, Exec, Inputs, Outputs, Pages, Plan, Precision, ViewMut, Window};

const BF16: [Dtype; 3] = [Dtype::Bf16; 3];

/// Precision, and threads with an instruction set on which it is not the exact one.
#[derive(Debug, Clone, Copy)]
struct Way {
    precision: Precision,
    exec: Exec<'static>,
}

impl Way {
    fn of(self, case: Case, types: [Dtype; 3]) -> Short {
        Short::new(Case { precision: self.precision, ..case }, types)
    }

    /// Types of queries, keys and values that it multiplies by such instructions.
    fn types(self, rng: &mut Rng) -> [Dtype; 3] {
        const MIXED: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::Bf16];
        match self.precision {
            Precision::Native => rng.pick(&[BF16, BF16, MIXED, [Dtype::Bf16, Dtype::Bf16, Dtype::F16]]),
            _ => rng.pick(&[BF16, MIXED, [Dtype::F32; 3], [Dtype::F16; 3], [Dtype::Bf16, Dtype::F32, Dtype::F16]]),
        }
    }

    /// One type of queries, keys and values that it multiplies by such instructions.
    fn types_alike(self, rng: &mut Rng) -> [Dtype; 3] {
        [if self.precision == Precision::Native {
            Dtype::Bf16
        } else {
            rng.pick(&[Dtype::F32, Dtype::Bf16, Dtype::F16])
        }; 3]
    }
}

fn native() -> Vec<Way> {
    let found = execs().filter(|(isa, _)| isa.has_native_bf16());
    let found: Vec<_> = found.map(|(_, exec)| Way { precision: Precision::Native, exec }).collect();
    if found.is_empty() {
        eprintln!("SKIPPED: this machine has no bfloat16 dot product");
    }
    found
}

fn accurate() -> Vec<Way> {
    let found = execs().filter(|(isa, _)| isa.matrix_unit().is_ok());
    let found: Vec<_> = found.map(|(_, exec)| Way { precision: Precision::Accurate, exec }).collect();
    if found.is_empty() {
        eprintln!("SKIPPED: this machine has no matrix unit");
    }
    found
}

fn all() -> Vec<Way> {
    [native(), accurate()].concat()
}

fn run(short: &Short, exec: Exec, wanted: Wanted) -> Full {
    short.case.run_over(short.source(), exec, wanted)
}

/// Elsewhere, and where nothing is bfloat16, it is the exact call.
#[test]
fn exact_where_there_is_nothing_to_gain() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let case = Case::random(&mut rng, 300_000);
        for (precision, types) in [
            (Precision::Native, BF16),
            (Precision::Native, [Dtype::Bf16, Dtype::F32, Dtype::F16]),
            (Precision::Accurate, [Dtype::F32; 3]),
        ] {
            let exact = Short::new(case.clone(), types).wide;
            for (isa, exec) in execs() {
                let gains = match precision {
                    Precision::Native => types == BF16 && isa.has_native_bf16(),
                    _ => isa.matrix_unit().is_ok(),
                };
                if gains {
                    continue;
                }
                let (short, what) =
                    (Way { precision, exec }.of(case.clone(), types), format!("seed {seed}, {types:?}, {isa}"));
                same_full(&what, &run(&short, exec, Wanted::ALL), &exact.run_over(short.source(), exec, Wanted::ALL));
            }
        }
    }
}

/// Threads, layouts, caches and pages do not show, under any options; what no sequence has may be anything.
#[test]
fn one_answer() {
    for way @ Way { exec, .. } in all() {
        // Parts take longer in the scalar model of a unit.
        for seed in 0..if way.precision == Precision::Native { 150 } else { 60 } {
            let mut rng = Rng::new(80_000 + seed);
            let types = way.types(&mut rng);
            let mut case = Case::random(&mut rng, 500_000);
            // Keys and values longer than what is packed at once, too.
            if seed % 30 == 0 {
                let (rows, keys) = (1 + rng.below(20), 1 + rng.below(300));
                case = Case::of_sizes(&mut rng, [1, 2, 1, rows, keys, 301, 290]);
            }
            if seed % 2 == 0 {
                case = case.side_by_side();
            }
            let short = way.of(case, types);
            for wanted in [Wanted::LEAST, Wanted::ALL] {
                let expected = run(&short, exec, wanted);
                same_full(&format!("seed {seed}, threads"), &run(&short, exec.threads(64), wanted), &expected);
                let mut laid = short.wide.clone();
                for x in [&mut laid.q, &mut laid.k, &mut laid.v] {
                    *x = x.laid_out(rng.pick(&LAYOUTS));
                }
                same_full(&format!("seed {seed}, layout"), &run(&way.of(laid, types), exec, wanted), &expected);
                if seed % 2 != 0 {
                    continue;
                }
                let fill = rng.pick(&[f32::NAN, f32::INFINITY, 1e38]);
                let page = rng.pick(&[1, 3, 16, 17, 256]);
                let pool = Pool::of(&short.wide, page, [rng.pick(&LAYOUTS), rng.pick(&LAYOUTS)], fill, &mut rng);
                let (k, v) = (Rounded::new(&pool.k, types[1]), Rounded::new(&pool.v, types[2]));
                let table = BlockTable { entries: &pool.entries, lens: &pool.lens };
                let pages = Pages::new(k.view(), v.view(), table).expect("a good table");
                let paged = short.case.run_over(Inputs::paged(short.qkv[0].view(), pages), exec, wanted);
                same_full(&format!("seed {seed}, pages of {page}"), &paged, &expected);
                if types[1] == types[2] {
                    let mut held = short.wide.clone();
                    let cache = cache_of(&mut held, types[2], &mut rng);
                    let held = way.of(held, types);
                    let cached = held.case.run_over(Inputs::cached(held.qkv[0].view(), &cache), exec, wanted);
                    same_full(&format!("{way:?}, {types:?}, seed {seed}, cache"), &cached, &run(&held, exec, wanted));
                }
            }
        }
    }
}

/// Prompts in parts and tokens alone, from a cache: the rows of the prefill. One key more or less beside its pair, too.
#[test]
fn chunks_and_steps_are_the_prefill() {
    for way @ Way { exec, precision } in all() {
        for length in [1, 2, 17, 255, 256, 257, 513] {
            for n in 0..8 {
                let mut rng = Rng::new(1000 * length as u64 + n);
                let [d, dv] = [(); 2].map(|()| rng.pick(&[1, 2, 7, 16, 33, 64, 80, 130, 273]));
                let mut case = Case::plain(&mut rng, [1, 4, 2, length, length, d, dv]);
                let types @ [dtype, ..] = way.types_alike(&mut rng);
                (case.causal, case.precision) = (true, precision);
                case.q = Rounded::new(&case.q, dtype).wide;
                let mut cache = empty_cache(&case, dtype);
                let from = length.saturating_sub(5);
                let parts = cuts(from, &mut rng).into_iter().chain((from..length).map(|i| i..i + 1));
                let mut answers = Vec::new();
                for rows in parts {
                    append((&mut cache, dtype), &mut case, 0, rows.clone(), &mut rng);
                    let chunk = Case { alignment: Some(Alignment::BottomRight), ..case.chunk(rows.clone(), rows.end) };
                    let q = Rounded::new(&chunk.q, dtype);
                    let got = chunk.run_over(Inputs::cached(q.view(), &cache), exec, Wanted::LEAST);
                    answers.push((rows.start, chunk, got));
                }
                case.alignment = Some(Alignment::TopLeft);
                let short = way.of(case, types);
                let whole = run(&short, exec, Wanted::LEAST);
                for (start, chunk, got) in answers {
                    let place = |[b, h, i]: [usize; 3]| Some([b, h, start + i]);
                    let what = format!("{precision}, {dtype}, length {length}, {d} and {dv} long, from {start}");
                    same_rows(&what, (&chunk, &got), (&short.wide, &whole), place);
                }
            }
        }
    }
}

/// What a mask hides from everyone may be NaN or ∞, and rolled back keys too.
#[test]
fn hidden_memory_does_not_show() {
    for way @ Way { exec, precision } in all() {
        for (n, fill) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
            for sizes in [[1, 4, 2, 1, 301, 64, 64], [2, 2, 1, 40, 77, 33, 80], [1, 3, 3, 7, 257, 2, 5]] {
                let mut rng = Rng::new(n as u64);
                let mut case = Case::plain(&mut rng, sizes);
                let types @ [dtype, ..] = way.types_alike(&mut rng);
                let seen = sizes[4] - 1 - n;
                case.kv_lens = Some(vec![seen; sizes[0]]);
                let mut cache = empty_cache(&case, dtype);
                let poison = |x: &Tensor| Rounded::new(&Tensor::filled(x.shape, fill), dtype);
                cache.append(poison(&case.k).view(), poison(&case.v).view()).unwrap();
                for b in 0..sizes[0] {
                    cache.clear(b).unwrap();
                    append((&mut cache, dtype), &mut case, b, 0..seen, &mut Rng::new(0));
                }
                let expected = run(&way.of(case.clone(), types), exec, Wanted::LEAST);
                for x in [&mut case.k, &mut case.v] {
                    for at in crate::support::indices(x.shape).filter(|at| at[2] >= seen) {
                        x.set(at, fill);
                    }
                }
                let short = way.of(case, types);
                let what = format!("{precision}, {sizes:?}, {fill}");
                same_full(&what, &run(&short, exec, Wanted::LEAST), &expected);
                let held =
                    Case { kv_lens: None, k: short.wide.k.rows(0..seen), v: short.wide.v.rows(0..seen), ..short.wide };
                let cached = held.run_over(Inputs::cached(short.qkv[0].view(), &cache), exec, Wanted::LEAST);
                same_full(&format!("{what}, rolled back"), &cached, &expected);
            }
        }
    }
}

/// Queries of other types are rounded; weights are, too, and their sum is that of rounded ones. And it is not the exact call.
#[test]
fn errors_are_within_the_documented_bounds() {
    for way @ Way { exec, .. } in native() {
        let mut different = 0;
        for seed in 0..60 {
            let mut rng = Rng::new(90_000 + seed);
            let mut case = Case::random(&mut rng, 200_000);
            case.functions = Default::default();
            let q = Rounded::new(&case.q, Dtype::Bf16);
            let wide = way.of(Case { q: case.q.clone(), ..case.clone() }, [Dtype::F32, Dtype::Bf16, Dtype::Bf16]);
            let short = way.of(Case { q: q.wide, ..case }, BF16);
            let got = run(&short, exec, Wanted::LEAST);
            same_full(&format!("seed {seed}, rounded queries"), &run(&wide, exec, Wanted::LEAST), &got);
            let exact = short.case.oracle_over::<f64>(short.source());
            let mut sizes = short.clone();
            for x in [&mut sizes.qkv[2].wide, &mut sizes.wide.v] {
                x.data.iter_mut().for_each(|x| *x = x.abs());
            }
            sizes.qkv[2] = Rounded::new(&sizes.qkv[2].wide, Dtype::Bf16);
            let weighed = sizes.case.oracle_over::<f64>(sizes.source());
            let (heads, (rows, _), dv) = (short.wide.heads(), short.wide.longest(), short.wide.v.shape[3]);
            for [b, h, i] in short.wide.every_row() {
                let (at, row) = short.wide.row_at(b, i);
                let n = (b * heads + h) * rows + i;
                let lse = f64::from(got.lse.get([at, h, row, 0]));
                let bound = 0.0041 + 2e-5 * exact.lse[n].abs().max(4.0);
                let near = lse == exact.lse[n] || (lse - exact.lse[n]).abs() <= bound;
                assert!(near, "seed {seed}: LSE {lse}, {}", exact.lse[n]);
                for c in 0..dv {
                    let (got, exact) = (f64::from(got.out.get([at, h, row, c])), exact.out[n * dv + c]);
                    // Σ w·|v − o| is at most Σ w·|v| + |o|.
                    let size = weighed.out[n * dv + c];
                    let bound = 0.0041 * (size + exact.abs()) + 4e-5 * size + 1e-30;
                    assert!((got - exact).abs() <= bound, "seed {seed}, {:?}: {got}, not {exact}", [b, h, i, c]);
                    different += usize::from((got - exact).abs() > 1e-4 * weighed.out[n * dv + c]);
                }
            }
        }
        assert!(different > 1000, "nothing was rounded: {different}");
    }
}

/// Values that are all 1 come out as 1: what is summed is what values are multiplied by, from whatever key on.
#[test]
fn weights_are_summed_as_they_are_rounded() {
    for way @ Way { exec, .. } in all() {
        for (seed, [rows, keys]) in [[1, 300], [7, 600], [40, 517], [3, 17]].into_iter().enumerate() {
            for window in [None, Some(70)] {
                let mut rng = Rng::new(seed as u64);
                let mut case = Case::plain(&mut rng, [1, 2, 1, rows, keys, 48, 20]);
                let types = way.types_alike(&mut rng);
                (case.causal, case.alignment) = (true, Some(Alignment::BottomRight));
                case.window = window.map(|before| Window::inclusive(Some(before), Some(0)));
                case.v = Tensor::filled(case.v.shape, 1.0);
                let got = run(&way.of(case, types), exec, Wanted::LEAST);
                let off = got.out.data.iter().map(|x| (x - 1.0).abs()).fold(0.0, f32::max);
                assert!(off < 2e-6, "{rows} rows, {keys} keys, {window:?}: off by {off:e}");
            }
        }
    }
}

/// Values wider than what is packed as floats, beside a query that is no number, or a value that is infinite.
#[test]
fn what_is_not_finite_stays_in_its_place() {
    for way @ Way { exec, .. } in all() {
        for [rows, dv] in [[9, 512], [16, 272], [16, 512], [40, 600]] {
            let case = Case::plain(&mut Rng::new(7), [1, 2, 1, rows, 20, 64, dv]);
            let types = way.types_alike(&mut Rng::new(rows as u64));
            let finite = run(&way.of(case.clone(), types), exec, Wanted::LEAST);
            let (mut no_number, mut infinite) = (case.clone(), case);
            no_number.q.data[0] = f32::NAN;
            infinite.v.data[5 * dv + 3] = f32::INFINITY;
            let [no_number, infinite] =
                [no_number, infinite].map(|case| run(&way.of(case, types), exec, Wanted::LEAST));
            for (place, finite) in finite.out.data.iter().enumerate() {
                let (row, column) = (place / dv, place % dv);
                let [nan, inf] = [no_number.out.data[place], infinite.out.data[place]];
                assert!(
                    if row == 0 { nan.is_nan() } else { nan.to_bits() == finite.to_bits() },
                    "{row}, {column}: {nan}"
                );
                assert!(if column == 3 { inf == f32::INFINITY } else { inf.to_bits() == finite.to_bits() }, "{inf}");
            }
        }
    }
}

/// With parts, errors are no larger than those of the naive `f32` loop: on scores of usual size and large ones.
#[test]
fn parts_are_as_exact_as_floats() {
    for way @ Way { exec, .. } in accurate() {
        for (seed, d) in [32, 48, 64, 80, 128, 256].into_iter().enumerate() {
            for (factor, types) in
                [(1.0, [Dtype::F32; 3]), (4.0, [Dtype::F32; 3]), (16.0, [Dtype::F32; 3]), (4.0, [Dtype::F16; 3])]
            {
                let mut case = Case::plain(&mut Rng::new(seed as u64), [1, 2, 1, 70, 600, d, d]);
                case.q.data.iter_mut().for_each(|x| *x *= factor);
                let short = way.of(case, types);
                let exact = short.case.oracle_over::<f64>(short.source());
                let naive = short.case.oracle_over::<f32>(short.source());
                let got = run(&short, exec, Wanted::LEAST);
                let worst = |out: &[f32]| {
                    let errors = out.iter().zip(&exact.out).map(|(got, exact)| (f64::from(*got) - exact).abs());
                    errors.fold(0.0, f64::max)
                };
                let (ours, naive) = (worst(&got.out.data), worst(&naive.out));
                assert!(ours <= naive, "{d} long, queries times {factor}, {types:?}: {ours:e}, naive {naive:e}");
            }
        }
    }
}

/// A plan says whether it will happen.
#[test]
fn plans_say_so() {
    let says = |precision, types: [Dtype; 3], exec: Exec<'static>| {
        let short = Way { precision, exec }.of(Case::plain(&mut Rng::new(1), [1, 1, 1, 2, 3, 4, 5]), types);
        let mut out = [0.0; 10];
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 2, 5]).unwrap());
        let problem = Attention::new().precision(precision).problem(short.source(), outputs).unwrap();
        Plan::new(&problem, exec).explain(&problem, None).to_string()
    };
    for (isa, exec) in execs() {
        let words = if isa.has_native_bf16() {
            "bfloat16 is multiplied as it is"
        } else {
            "has no fast bf16 dot product here; Native has no effect"
        };
        let said = says(Precision::Native, BF16, exec);
        assert!(said.contains(words), "{said}");
        assert!(says(Precision::Native, [Dtype::F32; 3], exec).contains("neither keys nor values are bfloat16"));
        let words = match isa.matrix_unit() {
            Ok(()) => "the matrix unit multiplies\n",
            Err(_) => "has no matrix unit; Accurate has no effect",
        };
        let said = says(Precision::Accurate, [Dtype::F32; 3], exec) + "\n";
        assert!(said.contains(words), "{said}");
    }
}
