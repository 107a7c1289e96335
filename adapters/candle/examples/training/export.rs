//! A trained model as a file: weights in f16, what else it needs in its header.

use super::Result;
use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;
use safetensors::serialize_to_file;
use std::collections::HashMap;
use std::path::Path;

/// Writes the variables of a model, and a header.
pub(crate) fn export(path: &Path, vars: &VarMap, header: &[(&str, String)]) -> Result<()> {
    let header = header.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect();
    let vars = vars.data().lock().expect("nobody panicked").clone();
    let short = |(name, var): (String, Var)| Ok((name, var.to_dtype(DType::F16)?));
    let tensors = vars.into_iter().map(short).collect::<candle_core::Result<HashMap<String, Tensor>>>()?;
    Ok(serialize_to_file(&tensors, Some(header), path)?)
}
