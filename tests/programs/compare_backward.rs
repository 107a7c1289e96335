//! The conformance cases of `tests/conformance/backward.rs` through `compare --backward`: what it writes and prints.

use crate::cases::{Case, Outcome, Tolerance, run_all};
use crate::program::{Written, run};
use crate::temporary_folder::TemporaryFolder;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
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

/// Every path has its row, with the errors of all gradients within their bounds; one that cannot be is named.
#[test]
fn there_is_a_row_for_every_path() {
    let shape = ["--backward", "--shape", "2,4,2,37,70,8,12", "--repeat", "2", "--threads", "1", "--json"];
    for (options, unfused, complaint) in [
        (&["--causal", "--align", "bottom-right"][..], true, ""),
        (
            &["--softcap", "5"],
            false,
            "compare: no unfused path: softcap: needs the fused path; the unfused baseline has no such option\n",
        ),
    ] {
        let ran = run(shape.iter().chain(options));
        assert_eq!((ran.status.code(), String::from_utf8_lossy(&ran.stderr).as_ref()), (Some(0), complaint));
        let rows: Vec<serde_json::Value> =
            String::from_utf8_lossy(&ran.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        for path in ["naive", "unfused", "fused"] {
            assert_eq!(rows.iter().any(|row| row["path"] == path), unfused || path != "unfused", "{path}");
        }
        for row in rows {
            assert_eq!(row["runs"], 2);
            let errors = ["dq", "dk", "dv"].map(|name| row["max_abs_errors"][name].as_f64().unwrap());
            assert!(errors.iter().all(|error| (1e-9..1e-5).contains(error)), "{row}");
            let [both, backward] = ["median_ms", "backward_ms"].map(|key| row[key].as_f64().unwrap());
            assert!(0.0 < backward && (backward < both || row["path"] == "naive"), "{row}");
        }
    }
}

/// An output gradient that is not finite makes NaN of the gradients of the keys it sees, which is what they should be.
#[test]
fn fused_paths_are_within_their_bounds_where_an_output_gradient_is_infinite() {
    let folder = TemporaryFolder::new("infinite");
    for (name, poison) in [("infinite", f32::INFINITY), ("nan", f32::NAN)] {
        let numbers: Vec<f32> = (0..2 * 5 * 4).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        let mut d_out = numbers.clone();
        d_out[2 * 4 + 1] = poison;
        let [qkv, d_out] = [numbers, d_out].map(|x| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        let view = |data| TensorView::new(Dtype::F32, vec![1, 2, 5, 4], data).unwrap();
        let views = [("q", view(&qkv)), ("k", view(&qkv)), ("v", view(&qkv)), ("d_out", view(&d_out))];
        let file = folder.file(&format!("{name}.safetensors"));
        std::fs::write(&file, safetensors::serialize(views, None).unwrap()).unwrap();
        for options in [&["--causal"][..], &[]] {
            let args = ["--backward", "--repeat", "1"].iter().chain(options).map(OsStr::new);
            let ran = run([file.as_os_str()].into_iter().chain(args));
            let table = String::from_utf8_lossy(&ran.stdout);
            assert_eq!(ran.status.code(), Some(0), "{table}");
            // The unfused baseline may be marked.
            let mut paths =
                table.lines().filter(|line| line.starts_with("fused") || line.starts_with("naive")).peekable();
            assert!(
                paths.peek().is_some() && paths.all(|line| !line.contains('!') && !line.contains("inf")),
                "{table}"
            );
        }
    }
}

#[test]
fn contradictions_are_refused() {
    for (flags, message) in [
        (&["--backward", "--explain"][..], "--explain: is about the forward pass, but got --backward too"),
        (
            &["--backward", "--only", "unfused", "--shape", "1,1,1,5,5,4,4", "--softcap", "2"],
            "no unfused path: softcap: needs the fused path; the unfused baseline has no such option",
        ),
        (&["--sweep", "--backward"], "--backward: is about one call, but --sweep makes many"),
    ] {
        let ran = run(flags);
        assert_eq!(ran.status.code(), Some(2), "{flags:?}");
        assert_eq!(String::from_utf8_lossy(&ran.stderr), format!("compare: {message}\n"));
    }
}
