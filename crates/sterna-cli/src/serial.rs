//! Where a guest's console goes.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use crate::exit::Stop;

/// `FILE`, `stdio` or `none`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Serial {
    /// Thrown away.
    None,
    /// Our standard output.
    Stdio,
    /// A file, emptied first.
    File(PathBuf),
}

impl std::str::FromStr for Serial {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "stdio" | "-" => Ok(Self::Stdio),
            "" => Err("name a file, `stdio` or `none`".into()),
            path => Ok(Self::File(path.strip_prefix("file:").unwrap_or(path).into())),
        }
    }
}

impl Serial {
    /// Opens it.
    pub fn open(&self) -> Result<Box<dyn Write + Send>, Stop> {
        Ok(match self {
            Self::None => Box::new(io::sink()),
            Self::Stdio => Box::new(Flushed(io::stdout())),
            Self::File(path) => Box::new(File::create(path).map_err(|error| {
                Stop::failed(format!(
                    "cannot write the console to {}: {error}. Name another file.",
                    path.display()
                ))
            })?),
        })
    }
}

/// A console is read while it is written.
struct Flushed<W>(W);

impl<W: Write> Write for Flushed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.0.write(bytes)?;
        self.0.flush()?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
