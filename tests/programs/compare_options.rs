//! The conformance cases of `tests/conformance/options.rs` through the `compare` program: what it writes, and that it is content
//! with every path it ran.

use crate::cases::{Case, Outcome, Tolerance, run_all};
use crate::program::{Written, run};
use crate::temporary_folder::TemporaryFolder;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::ffi::OsStr;
use std::path::Path;

/// As in `tests/conformance/options.rs`.
const TOLERANCE: Tolerance = Tolerance { rtol: 2e-6, atol: 2e-6 };

const CASES: &str = "tests/conformance/options";

/// Runs a case with more flags; fails unless all is well.
fn compare(case: &Case, flags: &str, output: &Path) -> Result<Written, String> {
    let args: Vec<String> = serde_json::from_value(case.metadata.clone()).map_err(|e| e.to_string())?;
    let mut all = vec![case.path.as_os_str()];
    all.extend(args.iter().map(OsStr::new));
    all.extend(flags.split(' ').map(OsStr::new));
    all.extend(["--output".as_ref(), output.as_os_str()]);
    let _ = std::fs::remove_file(output);
    let ran = run(all);
    let complaint = String::from_utf8_lossy(&ran.stderr);
    if ran.status.code() != Some(0) || !complaint.is_empty() {
        return Err(format!("{}: {complaint}", ran.status));
    }
    Ok(Written::read(output))
}

/// Holds `out` and `lse` against the case's.
fn check(case: &Case, written: &Written) -> Result<f64, String> {
    let mut worst = 0.0f64;
    for name in ["out", "lse"] {
        let expected = case.tensor(&format!("expected.{name}"))?;
        let (shape, got) = written.tensor(name);
        expected.expect_shape(&shape)?;
        worst = worst.max(TOLERANCE.check(name, &got, expected)?);
    }
    Ok(worst)
}

#[test]
fn the_program_writes_the_expected_answers() {
    let folder = TemporaryFolder::new("answers");
    run_all("SDPA_OPTION_CASES", CASES, "args", |case| {
        let written = compare(case, "--only fused --repeat 1", &folder.file("out.safetensors"))?;
        if written.names() != ["lse", "out"] {
            return Err(format!("it wrote {:?}", written.names()));
        }
        Ok(Outcome::Passed(check(case, &written)?))
    });
}

/// The scores and weights that it writes are those of the output it writes.
#[test]
fn the_program_writes_scores_and_weights() {
    let folder = TemporaryFolder::new("scores");
    run_all("SDPA_OPTION_CASES", CASES, "args", |case| {
        let flags = "--only fused --repeat 1 --isa portable --weights --scores raw --scores masked --scores softcap";
        let written = compare(case, flags, &folder.file("out.safetensors"))?;
        if written.names() != ["lse", "out", "scores.masked", "scores.raw", "scores.softcap", "weights"] {
            return Err(format!("it wrote {:?}", written.names()));
        }
        let worst = check(case, &written)?;
        let (shape, masked) = written.tensor("scores.masked");
        let [b, h, l, keys] = shape[..] else { return Err(format!("shape {shape:?}")) };
        let (q, k) = (&case.tensor("q")?.shape, &case.tensor("k")?.shape);
        if [b, h, l, keys] != [q[0], q[1], q[2], k[2]] {
            return Err(format!("shape {shape:?}"));
        }
        let ((_, lse), (_, weights)) = (written.tensor("lse"), written.tensor("weights"));
        for (i, (&score, &weight)) in masked.iter().zip(&weights).enumerate() {
            let expected = if score == f64::NEG_INFINITY { 0.0 } else { (score - lse[i / keys]).exp() };
            if !((weight - expected).abs() <= 1e-5 && (expected != 0.0 || weight == 0.0)) {
                return Err(format!("weight {i} is {weight:e}, but by its score it is {expected:e}"));
            }
        }
        let ((_, raw), (_, capped)) = (written.tensor("scores.raw"), written.tensor("scores.softcap"));
        let plain = ["bias", "alibi_slopes"].iter().all(|name| !case.tensors.contains_key(*name));
        let apart = |(i, &score): (usize, &f64)| plain && score != f64::NEG_INFINITY && score != capped[i];
        if let Some((i, score)) = masked.iter().enumerate().find(|&x| apart(x)) {
            return Err(format!("score {i} is {score}, but nothing was added to {}", capped[i]));
        }
        if let Some(i) = (0..raw.len()).find(|&i| capped[i].abs() > raw[i].abs() * (1.0 + 1e-6)) {
            return Err(format!("score {i} is {}, but the cap made {} of it", raw[i], capped[i]));
        }
        Ok(Outcome::Passed(worst))
    });
}

/// Lists of selected keys are masks that keep the listed keys: units of two keys for groups of two rows, by key/value head.
#[test]
fn lists_of_selected_keys_are_masks() {
    const HEADS: usize = 4;
    const ROWS: usize = 5;
    const KEYS: usize = 7;
    const DIM: usize = 8;
    let numbers = |n: usize, factor: usize| -> Vec<u8> {
        (0..n).flat_map(|i| ((i * factor % 257) as f32 / 128.0 - 1.0).to_le_bytes()).collect()
    };
    // Two key/value heads, three groups of rows, four places: a unit may be the last, half key; a list may be empty.
    let lists: [[&[i32]; 3]; 2] = [[&[3, 0], &[1], &[]], [&[2, 1, 0, 3], &[3], &[0, 2]]];
    let row = |list: &[i32]| [list, &[-1; 4][list.len()..]].concat();
    let selected: Vec<u8> =
        lists.iter().flatten().flat_map(|list| row(list)).flat_map(|number| number.to_le_bytes()).collect();
    let keeps = |i: usize| lists[i / KEYS / ROWS / 2][i / KEYS % ROWS / 2].contains(&((i % KEYS / 2) as i32));
    let mask: Vec<u8> = (0..HEADS * ROWS * KEYS).map(|i| u8::from(keeps(i))).collect();
    let folder = TemporaryFolder::new("lists");
    let written = |name: &str, option: (&str, Dtype, &[usize], &[u8]), flags: &str| {
        let (q, k, v) =
            (numbers(HEADS * ROWS * DIM, 7919), numbers(2 * KEYS * DIM, 104729), numbers(2 * KEYS * DIM, 31));
        let tensors = [
            ("q", Dtype::F32, &[1, HEADS, ROWS, DIM][..], &q[..]),
            ("k", Dtype::F32, &[1, 2, KEYS, DIM], &k),
            ("v", Dtype::F32, &[1, 2, KEYS, DIM], &v),
            option,
        ];
        let views = tensors.map(|(name, dtype, shape, bytes)| {
            (name, TensorView::new(dtype, shape.to_vec(), bytes).expect("bytes for the shape"))
        });
        let [input, output] = ["in", "out"].map(|end| folder.file(&format!("{name}.{end}")));
        std::fs::write(&input, safetensors::serialize(views, None).expect("tensors")).expect("a file");
        let flags = flags.split_whitespace().map(OsStr::new);
        let files = [input.as_os_str(), "--output".as_ref(), output.as_os_str(), "--repeat".as_ref(), "1".as_ref()];
        let ran = run(files.into_iter().chain(flags));
        assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
        (String::from_utf8(ran.stdout).expect("UTF-8"), Written::read(&output))
    };
    let masked = ("mask", Dtype::U8, &[1, HEADS, ROWS, KEYS][..], &mask[..]);
    let (without, by_mask) = written("mask", masked, "--json");
    let listed = ("selected", Dtype::I32, &[1, 2, 3, 4][..], &selected[..]);
    let (with, by_lists) = written("lists", listed, "--selected 2,2 --json");
    for name in ["out", "lse"] {
        let ((shape, expected), (_, got)) = (by_mask.tensor(name), by_lists.tensor(name));
        let far = |(a, b): (&f64, &f64)| a != b && (a - b).abs() > 1e-6;
        assert!(!expected.iter().zip(&got).any(far), "{name} {shape:?}: {got:?}, but by a mask {expected:?}");
    }
    let objects = |text: &str| -> Vec<serde_json::Value> {
        text.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect()
    };
    for path in objects(&with) {
        assert_eq!(path["dense_median_ms"].is_f64(), path["path"] == "fused", "{path}");
        assert!(path["within_bounds"] == true && path["gflops"].is_null(), "{path}");
    }
    assert!(objects(&without).iter().all(|path| path["dense_median_ms"].is_null()), "{without}");
    let (table, _) = written("lists", listed, "--selected 2,2 --only fused");
    let words = "selected keys [1, 2, 3, 4], a list for 2 row(s), units of 2 key(s)";
    assert!(table.contains(words) && table.contains("dense") && table.contains("\nDense: "), "{table}");
}
