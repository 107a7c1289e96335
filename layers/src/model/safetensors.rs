//! Weights from safetensors files.

use super::{ModelError, Tensor, TensorSource};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors};
use sdpa::tensor_file::{ends_fit, expected_length};

const FORMAT: &str = "a safetensors file";

/// Safetensors file in memory, with f32, f16 or bf16 tensors, which are widened when they are read.
///
/// The bytes may be read or memory-mapped. The crate does not map files itself: that takes `unsafe` code, which it
/// forbids.
///
/// ```
/// use sdpa_layers::{SafeTensorsFile, TensorSource};
/// # let header = br#"{"gain":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
/// # let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
/// # bytes.extend(header);
/// # bytes.extend([1.0f32, 2.0].map(f32::to_le_bytes).concat());
/// // bytes: as `std::fs::read("model.safetensors")` gives them
/// let file = SafeTensorsFile::new(&bytes)?;
/// let gain = file.tensor("gain")?.unwrap();
/// assert_eq!((gain.shape(), gain.data()), (&[2][..], &[1.0, 2.0][..]));
/// # Ok::<(), sdpa_layers::ModelError>(())
/// ```
#[derive(Debug)]
pub struct SafeTensorsFile<'a> {
    tensors: SafeTensors<'a>,
}

impl<'a> SafeTensorsFile<'a> {
    /// Reads the header and checks that it fits the file; tensors are not read.
    ///
    /// # Errors
    /// [`ModelError::Length`] for a file that is shorter or longer than its header says, [`ModelError::Format`] for
    /// anything else that is not safetensors.
    pub fn new(bytes: &'a [u8]) -> Result<Self, ModelError> {
        match ends_fit(bytes).and_then(|()| SafeTensors::deserialize(bytes)) {
            Ok(tensors) => Ok(Self { tensors }),
            Err(e) => Err(match expected_length(bytes, &e) {
                Some(expected) => ModelError::Length { got: bytes.len() as u64, expected },
                None => ModelError::Format { format: FORMAT, why: e.to_string() },
            }),
        }
    }
}

impl TensorSource for SafeTensorsFile<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, ModelError> {
        let Ok(view) = self.tensors.tensor(name) else { return Ok(None) };
        let bytes = view.data();
        let data: Vec<f32> = match view.dtype() {
            Dtype::F32 => widen(bytes, f32::from_le_bytes),
            Dtype::F16 => widen(bytes, |x| f16::from_le_bytes(x).to_f32()),
            Dtype::BF16 => widen(bytes, |x| bf16::from_le_bytes(x).to_f32()),
            other => {
                let got = format!("{other:?}");
                return Err(ModelError::Dtype { tensor: name.to_owned(), got, expected: "F32, F16 or BF16" });
            }
        };
        Ok(Some(Tensor::new(view.shape(), data)?))
    }

    fn contains(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }
}

fn widen<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    bytes.as_chunks::<N>().0.iter().map(|&x| number(x)).collect()
}
