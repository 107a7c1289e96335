//! What the conformance tests share: case files, tensors of any dtype, comparison, and the count of what passed.
#![allow(dead_code, reason = "compiled into each conformance test; none uses all of it")]

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// The elements of a tensor, each held exactly.
#[derive(Debug, Clone)]
pub(crate) enum Data {
    Float(Vec<f64>),
    Int(Vec<i64>),
    Bool(Vec<bool>),
}

#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Data,
}

impl Tensor {
    fn new(view: &TensorView<'_>) -> Result<Self, String> {
        let bytes = view.data();
        let data = match view.dtype() {
            Dtype::F16 => Data::Float(each(bytes, |b| half::f16::from_le_bytes(b).to_f64())),
            Dtype::BF16 => Data::Float(each(bytes, |b| half::bf16::from_le_bytes(b).to_f64())),
            Dtype::F32 => Data::Float(each(bytes, |b| f32::from_le_bytes(b).into())),
            Dtype::F64 => Data::Float(each(bytes, f64::from_le_bytes)),
            Dtype::I64 => Data::Int(each(bytes, i64::from_le_bytes)),
            Dtype::BOOL => Data::Bool(bytes.iter().map(|&b| b != 0).collect()),
            other => return Err(format!("dtype {other:?} is not read here")),
        };
        Ok(Self { dtype: view.dtype(), shape: view.shape().to_vec(), data })
    }

    /// The floats, in `f64`.
    pub(crate) fn floats(&self) -> Result<&[f64], String> {
        match &self.data {
            Data::Float(values) => Ok(values),
            _ => Err(format!("floats expected, got {:?}", self.dtype)),
        }
    }

    /// The floats, as the library takes them.
    pub(crate) fn f32s(&self) -> Result<Vec<f32>, String> {
        Ok(self.floats()?.iter().map(|&x| x as f32).collect())
    }

    /// Non-negative integers.
    pub(crate) fn lengths(&self) -> Result<Vec<usize>, String> {
        let Data::Int(values) = &self.data else { return Err(format!("integers expected, got {:?}", self.dtype)) };
        values.iter().map(|&n| usize::try_from(n).map_err(|_| format!("a length is {n}"))).collect()
    }

    /// The shape with ones in front, up to four dimensions.
    pub(crate) fn shape4(&self) -> Result<[usize; 4], String> {
        let rank = self.shape.len();
        let mut shape = [1; 4];
        shape.get_mut(4usize.wrapping_sub(rank)..).ok_or(format!("rank {rank}"))?.copy_from_slice(&self.shape);
        Ok(shape)
    }

    /// Fails unless this has the shape.
    pub(crate) fn expect_shape(&self, shape: &[usize]) -> Result<(), String> {
        if self.shape == shape { Ok(()) } else { Err(format!("shape {:?}, expected {shape:?}", self.shape)) }
    }
}

fn each<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&b| read(b)).collect()
}

/// One file.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) path: PathBuf,
    pub(crate) metadata: serde_json::Value,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl Case {
    /// The tensors, and the JSON found under `key` in the metadata.
    pub(crate) fn load(path: &Path, key: &str) -> Result<Self, String> {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let bytes = std::fs::read(path).map_err(|e| text(&e))?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| text(&e))?;
        let json = header.metadata().as_ref().and_then(|m| m.get(key)).ok_or(format!("no metadata '{key}'"))?;
        let metadata = serde_json::from_str(json).map_err(|e| text(&e))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| text(&e))?;
        let tensors = file.tensors().into_iter().map(|(name, view)| Ok((name, Tensor::new(&view)?)));
        Ok(Self { path: path.to_owned(), metadata, tensors: tensors.collect::<Result<_, String>>()? })
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<&Tensor, String> {
        self.tensors.get(name).ok_or_else(|| format!("no tensor '{name}'"))
    }
}

/// How far a result may be from what is expected.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tolerance {
    pub(crate) rtol: f64,
    pub(crate) atol: f64,
}

impl Tolerance {
    /// Fails unless every element is within `atol + rtol·|expected|`, and [`last_places`] of a 16-bit `expected` more.
    /// Infinities and NaN must be the same. Returns the largest error found, 0 for a 16-bit
    /// `expected`: there it says nothing.
    pub(crate) fn check(self, what: &str, got: &[f64], expected: &Tensor) -> Result<f64, String> {
        let values = expected.floats().map_err(|e| format!("{what}: {e}"))?;
        if got.len() != values.len() {
            return Err(format!("{what}: {} values, expected {}", got.len(), values.len()));
        }
        let mut worst = 0.0f64;
        for (i, (&x, &y)) in got.iter().zip(values).enumerate() {
            let limit = self.atol + self.rtol * y.abs() + last_places(y, expected.dtype);
            let error = (x - y).abs();
            let same = x == y || x.is_nan() && y.is_nan();
            if !(same || error <= limit) {
                return Err(format!("{what}[{i}] is {x:e}, expected {y:e} ± {limit:.1e} (shape {:?})", expected.shape));
            }
            worst = if same || last_places(y, expected.dtype) > 0.0 { worst } else { worst.max(error) };
        }
        Ok(worst)
    }
}

/// Two units in the last place of `x` in a 16-bit dtype, 0 for the others.
///
/// The expected values of 16-bit cases come from a reference that rounds every intermediate to that dtype (scaled q and
/// k, scores, exponentials, their sum, weights): recomputing `attention_4d_attn_mask_causal_bf16` with such roundings
/// gives its values to the bit, and over random cases of that shape they are one unit from the correctly rounded
/// answer in most and two in some. Nothing that computes in `f32` can be nearer to them than that.
fn last_places(x: f64, dtype: Dtype) -> f64 {
    let (bits, smallest) = match dtype {
        Dtype::F16 => (10, -14),
        Dtype::BF16 => (7, -126),
        _ => return 0.0,
    };
    let exponent = if x == 0.0 || !x.is_finite() { smallest } else { x.abs().log2().floor() as i32 };
    2.0 * 2f64.powi(exponent.max(smallest) - bits)
}

/// Rounds to a dtype, as a library that computes in `f32` and stores in that dtype would.
pub(crate) fn rounded(values: &[f32], dtype: Dtype) -> Vec<f64> {
    let round = |x: f32| match dtype {
        Dtype::F16 => half::f16::from_f32(x).to_f64(),
        Dtype::BF16 => half::bf16::from_f32(x).to_f64(),
        _ => x.into(),
    };
    values.iter().copied().map(round).collect()
}

/// What became of a case.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The largest error found.
    Passed(f64),
    /// Why it was not run.
    Skipped(&'static str),
}

/// Runs all cases of a directory (the one the environment variable names, if set) and prints what passed, failed and was
/// skipped, the latter two by name.
///
/// # Panics
/// If any case failed, or none ran.
pub(crate) fn run_all(variable: &str, default: &str, key: &str, run: impl Fn(&Case) -> Result<Outcome, String>) {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join(default);
    let directory = std::env::var_os(variable).map_or(default, PathBuf::from);
    let entries = std::fs::read_dir(&directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable directory").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    paths.sort();
    let (mut passed, mut failed, mut skipped, mut worst) = (0, 0, 0, (0.0, String::new()));
    for path in &paths {
        let name = path.file_stem().expect("it has an extension").to_string_lossy();
        // A panic fails its case, by name, and not the others.
        let result = catch_unwind(AssertUnwindSafe(|| run(&Case::load(path, key)?)));
        match result.unwrap_or_else(|_| Err("panicked, see above".into())) {
            Ok(Outcome::Passed(error)) => {
                passed += 1;
                worst = if error > worst.0 { (error, name.into_owned()) } else { worst };
            }
            Ok(Outcome::Skipped(why)) => {
                skipped += 1;
                println!("skipped {name}: {why}");
            }
            Err(why) => {
                failed += 1;
                println!("FAILED  {name}: {why}");
            }
        }
    }
    println!("{}: {passed} passed, {failed} failed, {skipped} skipped", directory.display());
    println!("largest error {:.1e} ({}), 16-bit answers not counted", worst.0, worst.1);
    assert!(failed == 0, "{failed} of {} cases failed", paths.len());
    assert!(passed > 0, "no case ran in {}", directory.display());
}

/// Checks that a case with another `value` at a place of its metadata fails, and why.
pub(crate) fn fails(
    case: &Case,
    key: &str,
    value: serde_json::Value,
    why: &str,
    run: impl Fn(&Case) -> Result<Outcome, String>,
) {
    let mut case = case.clone();
    *case.metadata.pointer_mut(key).unwrap() = value;
    let error = run(&case).expect_err(why);
    assert!(error.contains(why), "{error}, but expected {why}");
}
