//! Element types and precisions through the `compare` program: what it reads, computes, writes, prints and refuses.

use crate::program::{Written, run};
use crate::temporary_folder::TemporaryFolder;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use sdpa::{Bf16, F16, Isa};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Names and shapes of queries, keys and values.
const SHAPES: [(&str, [usize; 4]); 3] = [("q", [2, 4, 19, 24]), ("k", [2, 2, 37, 24]), ("v", [2, 2, 37, 40])];
/// Largest error of an exact path on these.
const EXACT: f64 = 1e-5;

/// Reproducible numbers between −2 and 2 that no 16-bit type holds.
fn numbers(shape: [usize; 4]) -> impl Iterator<Item = f32> {
    (0..shape.iter().product::<usize>()).map(|i| (i * 7919 % 2003) as f32 / 500.7 - 2.0)
}

/// Rounds a number to a type.
fn rounded(x: f32, to: Dtype) -> f32 {
    match to {
        Dtype::BF16 => Bf16::from_f32(x).to_f32(),
        Dtype::F16 => F16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// Bytes of the nearest element of a type.
fn bytes(x: f32, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => Bf16::from_f32(x).0.to_le_bytes().to_vec(),
        Dtype::F16 => F16::from_f32(x).0.to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

/// Writes a file of queries, keys and values of these types, of numbers rounded to `first` before.
fn write(folder: &TemporaryFolder, first: Dtype, dtypes: [Dtype; 3]) -> PathBuf {
    let of = |((_, shape), dtype)| numbers(shape).flat_map(|x| bytes(rounded(x, first), dtype)).collect();
    let data: Vec<Vec<u8>> = SHAPES.into_iter().zip(dtypes).map(of).collect();
    let view = |(((name, shape), dtype), data)| (name, TensorView::new(dtype, Vec::from(shape), data).unwrap());
    let views = SHAPES.into_iter().zip(dtypes).zip(data.iter().map(Vec::as_slice)).map(view);
    let path = folder.file(&format!("{first:?}-{dtypes:?}.safetensors"));
    std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    path
}

/// Runs the program on a file; fails unless it is content.
fn compare(file: &Path, flags: &str, output: &Path) -> (Vec<Value>, Written) {
    let ran = run(arguments(file, &format!("{flags} --repeat 1 --json --output"), Some(output)));
    let complaint = String::from_utf8_lossy(&ran.stderr);
    assert_eq!((ran.status.code(), complaint.as_ref()), (Some(0), ""), "{flags}");
    let rows = String::from_utf8_lossy(&ran.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (rows, Written::read(output))
}

fn arguments<'a>(file: &'a Path, flags: &'a str, output: Option<&'a Path>) -> Vec<&'a OsStr> {
    let flags = flags.split_whitespace().map(OsStr::new);
    [file.as_os_str()].into_iter().chain(flags).chain(output.map(Path::as_os_str)).collect()
}

/// Files of 16-bit elements are computed in them, on every instruction set, within bounds: with the bits of the same numbers in
/// `f32`, unless a matrix unit or other products of bfloat16 are used.
#[test]
fn files_of_16_bits_are_computed_in_their_type() {
    let folder = TemporaryFolder::new("types");
    let output = folder.file("out.safetensors");
    for (dtype, name) in [(Dtype::BF16, "bf16"), (Dtype::F16, "f16")] {
        let (short, wide) = (write(&folder, dtype, [dtype; 3]), write(&folder, dtype, [Dtype::F32; 3]));
        let (rows, expected) = compare(&wide, "--precision native", &output);
        assert!(rows.iter().all(|row| row["dtype"] == "f32"), "{rows:?}");
        for precision in ["exact", "native", "accurate"] {
            let (rows, written) = compare(&short, &format!("--precision {precision}"), &output);
            let rounds = |isa: Isa| dtype == Dtype::BF16 && precision == "native" && isa.has_native_bf16();
            for isa in Isa::available() {
                let mut of_isa = rows.iter().filter(|row| row["isa"] == isa.name()).peekable();
                assert!(of_isa.peek().is_some(), "{isa}");
                for row in of_isa {
                    assert_eq!((&row["dtype"], &row["precision"]), (&json!(name), &json!(precision)), "{row}");
                    let error = row["max_abs_error"].as_f64().unwrap();
                    assert!(row["within_bounds"] == true && (error > EXACT) == rounds(isa), "{row}");
                }
            }
            for row in rows.iter().filter(|row| row["path"] != "fused") {
                assert_eq!((&row["dtype"], &row["precision"]), (&json!("f32"), &Value::Null), "{row}");
            }
            for tensor in ["out", "lse"] {
                let same = written.tensor(tensor) == expected.tensor(tensor);
                let in_parts = precision == "accurate" && Isa::detect().matrix_unit().is_ok();
                assert_eq!(same, !rounds(Isa::detect()) && !in_parts, "{tensor}, {name}, {precision}");
            }
        }
    }
}

/// `--dtype` rounds the numbers of a file, or widens them.
#[test]
fn files_are_converted() {
    let folder = TemporaryFolder::new("converted");
    let output = folder.file("out.safetensors");
    let wide = write(&folder, Dtype::F32, [Dtype::F32; 3]);
    for (dtype, name) in [(Dtype::BF16, "bf16"), (Dtype::F16, "f16")] {
        let short = write(&folder, dtype, [dtype; 3]);
        let expected = compare(&short, "--only fused", &output).1;
        for (file, to) in [(&wide, name), (&short, "f32"), (&short, name)] {
            let (rows, written) = compare(file, &format!("--dtype {to} --only fused"), &output);
            assert!(rows.iter().all(|row| row["dtype"] == to), "{rows:?}");
            for tensor in ["out", "lse"] {
                assert_eq!(written.tensor(tensor), expected.tensor(tensor), "{name}, to {to}");
            }
        }
    }
}

/// Gradients of 16-bit tensors, too, have the bits of the same numbers in `f32`.
#[test]
fn gradients_of_files_of_16_bits() {
    let folder = TemporaryFolder::new("short-gradients");
    let output = folder.file("out.safetensors");
    for dtype in [Dtype::BF16, Dtype::F16] {
        let of = |dtypes| compare(&write(&folder, dtype, dtypes), "--backward --threads 1", &output);
        let ((rows, written), (_, expected)) = (of([dtype; 3]), of([Dtype::F32; 3]));
        let name = format!("{dtype:?}").to_lowercase();
        for row in &rows {
            assert_eq!(row["dtype"], json!(if row["path"] == "fused" { &name } else { "f32" }), "{row}");
            assert_eq!(row["within_bounds"], true, "{row}");
        }
        for gradient in ["dq", "dk", "dv"] {
            assert_eq!(written.tensor(gradient), expected.tensor(gradient), "{gradient}, {name}");
        }
    }
}

/// The table names what is not the default.
#[test]
fn tables_name_types_and_bounds() {
    let folder = TemporaryFolder::new("types-table");
    let [short, wide] = [Dtype::BF16, Dtype::F32].map(|dtype| write(&folder, dtype, [dtype; 3]));
    let said = |file: &Path, flags: &str| {
        let Output { status, stdout, .. } = run(arguments(file, &format!("{flags} --repeat 1 --only fused"), None));
        let text = String::from_utf8(stdout).unwrap();
        assert_eq!(status.code(), Some(0), "{text}");
        text
    };
    let words = "fused paths in bf16, precision";
    assert!(!said(&wide, "").contains("precision") && !said(&wide, "--precision native").contains("Native products"));
    assert!(said(&wide, "--precision native").contains("fused paths in f32, precision native\n"));
    let exact = said(&short, "");
    assert!(exact.contains(&format!("{words} exact\n")) && !exact.contains("Native products"), "{exact}");
    let native = said(&short, "--precision native");
    let has_native = Isa::available().any(Isa::has_native_bf16);
    assert!(native.contains(&format!("{words} native\n")), "{native}");
    assert_eq!(native.contains("\nNative products ("), has_native, "{native}");
    assert!(!said(&short, "--precision native --isa portable").contains("Native products"));
    assert!(said(&short, "--backward").contains(&format!("{words} exact\n")));
}

#[test]
fn mixed_types_are_refused() {
    let folder = TemporaryFolder::new("mixed");
    let [short, half, wide] = [Dtype::BF16, Dtype::F16, Dtype::F32];
    for (dtypes, message) in [
        ([short, half, short], "k: dtype is F16, but must be that of q, BF16"),
        ([short, short, wide], "v: dtype is F32, but must be that of q, BF16"),
        ([wide, half, half], "k: dtype is F16, but must be that of q, F32"),
    ] {
        let file = write(&folder, wide, dtypes);
        for flags in ["", "--dtype bf16", "--backward"] {
            let ran = run(arguments(&file, flags, None));
            let said = String::from_utf8_lossy(&ran.stderr);
            assert_eq!((ran.status.code(), ran.stdout.len()), (Some(2), 0), "{said}");
            assert_eq!(said, format!("compare: {}: {message}\n", file.display()));
        }
    }
}
