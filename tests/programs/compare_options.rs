//! The conformance cases of `tests/conformance/options.rs` through the `compare` program: what it writes, and that it is content
//! with every path it ran.

use crate::cases::{Case, Outcome, Tolerance, run_all};
use crate::program::{Written, run};
use crate::temporary_folder::TemporaryFolder;
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
