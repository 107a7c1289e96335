//! Tensors of candle as views of `sdpa`: the same memory, shape and strides.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, DeviceLocation, Error, Layout, Result, Storage, Tensor, bail};
use sdpa::View;

/// Returns candle's error with the message of one of `sdpa`'s.
pub(crate) fn refused(e: impl Into<sdpa::Error>) -> Error {
    Error::msg(format_args!("sdpa: {}", e.into()))
}

/// Returns the memory of a tensor, if it is the CPU's.
pub(crate) fn on_cpu<'a>(argument: &str, storage: &'a Storage) -> Result<&'a CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        Storage::Cuda(_) | Storage::Metal(_) => Err(elsewhere(argument, storage.device().location())),
    }
}

/// Refuses a tensor that is not on the CPU.
pub(crate) fn check_device(argument: &str, tensor: &Tensor) -> Result<()> {
    let device = tensor.device();
    if device.is_cpu() { Ok(()) } else { Err(elsewhere(argument, device.location())) }
}

/// Returns the error of a tensor that is not on the CPU.
fn elsewhere(argument: &str, location: DeviceLocation) -> Error {
    let device = match location {
        DeviceLocation::Cpu => "cpu".to_owned(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    };
    Error::msg(format_args!("sdpa: {argument}: device is {device}, but must be cpu"))
}

/// Returns a tensor of `f64` in `f32`, by an operation that candle tracks; any other as it is.
pub(crate) fn narrowed(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(if tensor.dtype() == DType::F64 { DType::F32 } else { tensor.dtype() })
}

/// Returns queries, keys or values as they lie in memory.
pub(crate) fn tensor<'a>(argument: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<sdpa::Tensor<'a>> {
    if layout.dims().len() != 4 {
        bail!("sdpa: {argument}: shape is {:?}, but must be [batch, heads, rows, dim]", layout.dims());
    }
    floats(argument, storage, layout)
}

/// Returns elements of any float type that `sdpa` reads, in at most four dimensions, as they lie in memory.
pub(crate) fn floats<'a>(argument: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<sdpa::Tensor<'a>> {
    Ok(match storage {
        CpuStorage::F32(data) => view(argument, data, layout)?.into(),
        CpuStorage::BF16(data) => view(argument, data, layout)?.into(),
        CpuStorage::F16(data) => view(argument, data, layout)?.into(),
        other => return Err(wrong_type(argument, other.dtype(), "f32, bf16, f16 or f64")),
    })
}

/// Refuses a mask or bias of two or three dimensions that may begin with the batch: candle broadcasts it as `[rows, keys]` or
/// `[heads, rows, keys]`, but frameworks also have `[batch, keys]` and `[batch, rows, keys]`.
pub(crate) fn check_front(argument: &str, dims: &[usize], batch: usize) -> Result<()> {
    let (of_batch, of_rest) = match *dims {
        [n, columns] => ([n, 1, 1, columns], [1, 1, n, columns]),
        [n, rows, columns] => ([n, 1, rows, columns], [1, n, rows, columns]),
        _ => return Ok(()),
    };
    if dims[0] == batch && batch > 1 {
        bail!(
            "sdpa: {argument}: shape is {dims:?}, and the batch is {batch}: reshape to {of_batch:?} if the first dimension is \
             the batch, otherwise to {of_rest:?}"
        );
    }
    Ok(())
}

/// Refuses a mask of another type than `u8`.
pub(crate) fn check_bytes(argument: &str, mask: &Tensor) -> Result<()> {
    if mask.dtype() == DType::U8 { Ok(()) } else { Err(wrong_type(argument, mask.dtype(), "u8")) }
}

/// Returns a mask as it lies in memory.
pub(crate) fn mask<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<View<'a, u8>> {
    match storage {
        CpuStorage::U8(data) => view("mask", data, layout),
        other => Err(wrong_type("mask", other.dtype(), "u8")),
    }
}

fn wrong_type(argument: &str, dtype: DType, expected: &str) -> Error {
    Error::msg(format_args!("sdpa: {argument}: type is {}, but must be {expected}", dtype.as_str()))
}

/// Returns a view of at most four dimensions; those missing in front are 1.
fn view<'a, T>(argument: &str, data: &'a [T], layout: &Layout) -> Result<View<'a, T>> {
    let (shape4, strides) = (shape4(argument, layout.dims())?, layout.stride());
    let mut strides4 = [0; 4];
    for (to, &stride) in strides4[4 - strides.len()..].iter_mut().zip(strides) {
        // A stride beyond the address space is refused as out of bounds, unless nothing is stepped along it.
        *to = isize::try_from(stride).unwrap_or(isize::MAX);
    }
    View::from_strides(data, layout.start_offset(), shape4, strides4).map_err(refused)
}

/// Returns a shape of at most four dimensions with those missing in front.
pub(crate) fn shape4(argument: &str, dims: &[usize]) -> Result<[usize; 4]> {
    let Some(missing) = 4usize.checked_sub(dims.len()) else {
        bail!("sdpa: {argument}: shape is {dims:?}, but must have at most four dimensions")
    };
    let mut shape4 = [1; 4];
    shape4[missing..].copy_from_slice(dims);
    Ok(shape4)
}

/// Returns the numbers of a list, in `f32`.
pub(crate) fn numbers(argument: &str, list: &Tensor) -> Result<Vec<f32>> {
    check_list(argument, list, list.dtype().is_float(), "of floats")?;
    list.to_dtype(DType::F32)?.to_vec1()
}

/// Returns the numbers of a tensor of integers, in the order of its shape.
pub(crate) fn integers(tensor: &Tensor) -> Result<Vec<i64>> {
    tensor.to_dtype(DType::I64)?.flatten_all()?.to_vec1()
}

/// Returns the numbers of a list of lengths.
pub(crate) fn lengths(argument: &str, list: &Tensor) -> Result<Vec<usize>> {
    check_list(argument, list, list.dtype().is_int(), "of integers")?;
    let list = integers(list)?.into_iter().enumerate();
    list.map(|(index, got)| {
        usize::try_from(got)
            .map_err(|_| Error::msg(format_args!("sdpa: {argument}: entry {index} is {got}, but must be at least 0")))
    })
    .collect()
}

fn check_list(argument: &str, list: &Tensor, fits: bool, expected: &str) -> Result<()> {
    if !fits || list.rank() != 1 {
        let (dims, dtype) = (list.dims(), list.dtype().as_str());
        bail!("sdpa: {argument}: shape is {dims:?} of {dtype}, but must be one dimension {expected}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_device() {
        // Candle may add a backtrace.
        let says = |location, words: &str| elsewhere("k", location).to_string().starts_with(words);
        assert!(says(DeviceLocation::Cuda { gpu_id: 1 }, "sdpa: k: device is cuda:1, but must be cpu"));
        assert!(says(DeviceLocation::Metal { gpu_id: 0 }, "sdpa: k: device is metal:0, but must be cpu"));
    }
}
