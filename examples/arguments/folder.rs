//! Check that files can be written to a folder, made before the work that they are to show.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

/// Writes a file of no length there and removes it: permissions alone do not say.
pub(crate) fn try_writing(folder: &Path) -> io::Result<()> {
    let file = folder.join(format!(".sdpa.{}.tmp", std::process::id()));
    OpenOptions::new().write(true).create_new(true).open(&file)?;
    fs::remove_file(&file)
}
