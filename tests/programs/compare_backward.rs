//! The conformance cases of `tests/conformance/backward.rs` through `compare --backward`: what it writes and prints.

use crate::cases::{Case, Outcome, Tolerance, run_all};
use crate::program::{Written, run};
use crate::temporary_folder::TemporaryFolder;
use std::ffi::OsStr;

/// As in `tests/conformance/backward.rs`.
const TOLERANCE: Tolerance = Tolerance { rtol: 1e-5, atol: 1e-5 };

const CASES: &str = "tests/conformance/backward";
const NAMES: [&str; 6] = ["dalibi_slopes", "dbias", "dk", "dq", "dsinks", "dv"];

#[test]
fn the_program_writes_the_expected_gradients() {
    let folder = TemporaryFolder::new("gradients");
    run_all("SDPA_BACKWARD_CASES", CASES, "args", |case| check(case, &folder));
}

fn check(case: &Case, folder: &TemporaryFolder) -> Result<Outcome, String> {
    let (args, output) = (case.metadata.clone(), folder.file("out.safetensors"));
    let args: Vec<String> = serde_json::from_value(args).map_err(|e| e.to_string())?;
    let mut all = vec![case.path.as_os_str()];
    all.extend(args.iter().map(OsStr::new));
    all.extend(["--backward", "--only", "fused", "--repeat", "1", "--json", "--output"].map(OsStr::new));
    all.push(output.as_os_str());
    let ran = run(all);
    let complaint = String::from_utf8_lossy(&ran.stderr);
    if ran.status.code() != Some(0) || !complaint.is_empty() {
        return Err(format!("{}: {complaint}", ran.status));
    }
    for line in String::from_utf8_lossy(&ran.stdout).lines() {
        let row: serde_json::Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
        if row["path"] != "fused" || !row["max_abs_errors"]["dq"].is_f64() || !row["backward_ms"].is_f64() {
            return Err(format!("it printed {line}"));
        }
    }
    let written = Written::read(&output);
    let expected = NAMES.into_iter().filter(|name| case.tensors.contains_key(&format!("expected.{name}")));
    if written.names() != expected.clone().collect::<Vec<_>>() {
        return Err(format!("it wrote {:?}", written.names()));
    }
    let mut worst = 0.0f64;
    for name in expected {
        let expected = case.tensor(&format!("expected.{name}"))?;
        let (shape, got) = written.tensor(name);
        expected.expect_shape(&shape)?;
        worst = worst.max(TOLERANCE.check(name, &got, expected)?);
    }
    Ok(Outcome::Passed(worst))
}

#[test]
fn contradictions_are_refused() {
    for (flags, message) in [
        (&["--backward", "--explain"][..], "--explain: is about the forward pass, but got --backward too"),
        (&["--backward", "--only", "unfused"], "--only: unfused has no backward pass, but got --backward too"),
        (&["--sweep", "--backward"], "--backward: is about one call, but --sweep makes many"),
    ] {
        let ran = run(flags);
        assert_eq!(ran.status.code(), Some(2), "{flags:?}");
        assert_eq!(String::from_utf8_lossy(&ran.stderr), format!("compare: {message}\n"));
    }
}
