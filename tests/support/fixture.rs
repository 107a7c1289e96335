//! Reads a safetensors file of weights, inputs and answers.
#![allow(dead_code, reason = "every test binary compiles this module and uses its part of it")]

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::path::{Path, PathBuf};

/// A file in memory.
pub(crate) struct Fixture {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Fixture {
    /// From `tests/fixtures`, or the file that this environment variable names.
    pub(crate) fn open(name: &str, variable: &str) -> Self {
        // The package's folder, or one above it.
        let folders = || Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|folder| folder.join("tests/fixtures"));
        let own = || folders().find(|folder| folder.is_dir()).expect("the repository's fixtures").join(name);
        let path = std::env::var_os(variable).map_or_else(own, PathBuf::from);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self { path, bytes }
    }

    fn tensor<T>(&self, name: &str, read: impl FnOnce(&TensorView<'_>) -> Option<T>) -> T {
        let file = SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{}: {name}: {e}", self.path.display()));
        read(&view).unwrap_or_else(|| panic!("{}: {name} is {:?}", self.path.display(), view.dtype()))
    }

    /// A tensor of f32, or of f16, which f32 holds exactly.
    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        self.tensor(name, |view| match view.dtype() {
            Dtype::F32 => Some(view.data().as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect()),
            Dtype::F16 => {
                Some(view.data().as_chunks().0.iter().map(|&x| half::f16::from_le_bytes(x).to_f32()).collect())
            }
            _ => None,
        })
    }

    /// Token numbers.
    pub(crate) fn tokens(&self, name: &str) -> Vec<u32> {
        let number = |&x: &[u8; 8]| u32::try_from(i64::from_le_bytes(x)).expect("a token");
        self.tensor(name, |view| {
            (view.dtype() == Dtype::I64).then(|| view.data().as_chunks().0.iter().map(number).collect())
        })
    }

    /// Bytes, of a boolean mask for one.
    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        self.tensor(name, |view| matches!(view.dtype(), Dtype::U8 | Dtype::BOOL).then(|| view.data().to_vec()))
    }

    pub(crate) fn shape<const N: usize>(&self, name: &str) -> [usize; N] {
        self.tensor(name, |view| view.shape().try_into().ok())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.bytes).expect("a safetensors file").tensor(name).is_ok()
    }
}

/// Largest absolute difference, if it is within the tolerance; NaN is not.
pub(crate) fn assert_close(what: &str, got: &[f32], expected: &[f32], tolerance: f64) -> f64 {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    let mut worst = (0.0, 0);
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let off = (f64::from(got) - f64::from(expected)).abs();
        assert!(!off.is_nan(), "{what}: element {i} is {got}, expected {expected}");
        if off > worst.0 {
            worst = (off, i);
        }
    }
    let (off, i) = worst;
    assert!(off <= tolerance, "{what}: off by {off:.2e} at element {i}: {}, expected {}", got[i], expected[i]);
    off
}
