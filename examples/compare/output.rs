//! Writes answers to a file.

use crate::failure::{Refused, Result};
use crate::folder::try_writing;
use safetensors::tensor::{Dtype, TensorView};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Refuses early what could not be written at the end.
pub(crate) fn check(path: &Path) -> Result<()> {
    if path.file_name().is_none() || path.is_dir() {
        return Err(refuse(path, &"not a file name"));
    }
    match folder(path) {
        folder if folder.is_dir() => try_writing(&folder).map_err(|e| refuse(path, &e)),
        folder => Err(refuse(path, &format_args!("there is no folder {}", folder.display()))),
    }
}

/// A tensor to write, as f32.
#[derive(Debug)]
pub(crate) struct Named<'a> {
    pub(crate) name: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: &'a [f32],
}

/// Writes the tensors: all of the file, or none.
pub(crate) fn write(path: &Path, tensors: &[Named<'_>]) -> Result<()> {
    let bytes = |data: &[f32]| data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let bytes: Vec<_> = tensors.iter().map(|tensor| bytes(tensor.data)).collect();
    let view = |(tensor, bytes): (&Named<'_>, _)| {
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).map_err(|e| refuse(path, &e))?;
        Ok((tensor.name, view))
    };
    let views = tensors.iter().zip(bytes.iter().map(Vec::as_slice)).map(view).collect::<Result<Vec<_>>>()?;
    let file = safetensors::serialize(views, None).map_err(|e| refuse(path, &e))?;
    replace(path, &file).map_err(|e| refuse(path, &e))
}

/// Writes beside the file first: whoever reads it finds the old one or the new one, whole.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    let beside = folder(path).join(name);
    let mut file = OpenOptions::new().write(true).create_new(true).open(&beside)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&beside, path));
    written.inspect_err(|_| drop(fs::remove_file(&beside)))
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn refuse(path: &Path, why: &dyn std::fmt::Display) -> Refused {
    Refused::new(format_args!("--output: {}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temporary_folder::TemporaryFolder;
    use safetensors::SafeTensors;

    #[test]
    fn what_is_written_can_be_read() {
        let folder = TemporaryFolder::new("write");
        let path = folder.file("answer.safetensors");
        let (out, lse): (Vec<f32>, Vec<f32>) = ((0..12).map(|i| i as f32).collect(), vec![f32::NEG_INFINITY; 6]);
        for _ in 0..2 {
            let out = Named { name: "out", shape: vec![1, 2, 3, 2], data: &out };
            let lse = Named { name: "lse", shape: vec![1, 2, 3], data: &lse };
            write(&path, &[out, lse]).unwrap();
        }
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |name| file.tensor(name).unwrap();
        assert_eq!((tensor("out").shape(), tensor("out").dtype()), (&[1, 2, 3, 2][..], Dtype::F32));
        assert_eq!((tensor("lse").shape(), tensor("lse").dtype()), (&[1, 2, 3][..], Dtype::F32));
        assert_eq!(tensor("out").data()[44..], 11f32.to_le_bytes());
        assert_eq!(tensor("lse").data()[..4], f32::NEG_INFINITY.to_le_bytes());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn places_that_cannot_be_written_are_refused() {
        let folder = TemporaryFolder::new("refuse");
        let message = |path: &Path| check(path).unwrap_err().to_string();
        assert!(check(&folder.file("new")).is_ok());
        assert!(message(folder.path()).ends_with(": not a file name"));
        assert!(message(Path::new("")).ends_with(": not a file name"));
        let inside = folder.file("none/out");
        let none = folder.file("none");
        assert_eq!(message(&inside), format!("--output: {}: there is no folder {}", inside.display(), none.display()));
    }
}
