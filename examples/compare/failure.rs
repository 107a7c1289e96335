//! Why the program stops before it has computed anything.

use std::fmt;

/// Bad arguments, files or shapes: one line that names what is wrong, and both values where there are two.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Refused(String);

pub(crate) type Result<T> = std::result::Result<T, Refused>;

impl Refused {
    /// Refuses in these words. Line breaks and other control characters, which file names and tensor names may hold,
    /// become spaces: the message stays one line.
    pub(crate) fn new(message: impl fmt::Display) -> Self {
        Self(message.to_string().replace(char::is_control, " "))
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

impl From<sdpa::Error> for Refused {
    fn from(e: sdpa::Error) -> Self {
        Self::new(e)
    }
}

impl From<sdpa::LayoutError> for Refused {
    fn from(e: sdpa::LayoutError) -> Self {
        Self::new(e)
    }
}
