//! `--serial`: where a guest's console output goes, and keyboard input for it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::getpgrp;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};

use crate::exit::Stop;
use crate::host::Hosted;

/// The argument `FILE`, `stdio` or `none`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Serial {
    /// No destination: output is discarded.
    None,
    /// Standard output of this process.
    Stdio,
    /// A file, which is truncated first.
    File(PathBuf),
}

impl std::str::FromStr for Serial {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "stdio" | "-" => Ok(Self::Stdio),
            "" => Err("give a file, `stdio` or `none`".into()),
            path => Ok(Self::File(path.strip_prefix("file:").unwrap_or(path).into())),
        }
    }
}

impl Serial {
    /// Opens the destination of the output.
    pub fn open(&self) -> Result<Box<dyn Write + Send>, Stop> {
        Ok(match self {
            Self::None => Box::new(io::sink()),
            Self::Stdio => Box::new(Flushed(io::stdout())),
            Self::File(path) => Box::new(File::create(path).map_err(|error| {
                Stop::failed(format!(
                    "cannot write the console to {}: {error}. Give another file.",
                    path.display()
                ))
            })?),
        })
    }
}

impl Serial {
    /// Sends keyboard input to the guest.
    /// As long as the result lives, a terminal delivers each key immediately; Ctrl-C still ends the program.
    /// A program in the background gets no keyboard input.
    pub fn keyboard(&self, vm: Arc<Hosted>) -> Result<Option<Keyboard>, Stop> {
        let is_in_background = tcgetpgrp(io::stdin()).is_ok_and(|group| group != getpgrp());
        if *self != Self::Stdio || is_in_background {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin()).ok();
        if let Some(before) = &before {
            let mut each_key = before.clone();
            each_key.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            // A terminal that refuses this mode delivers whole lines.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &each_key);
        }
        let keyboard = Keyboard { before };
        std::thread::Builder::new()
            .name("keyboard".to_owned())
            .spawn(move || type_all(io::stdin(), |keys| vm.machine().type_in(keys)))
            .map_err(|error| Stop::failed(format!("cannot start a thread for the keyboard: {error}")))?;
        Ok(Some(keyboard))
    }
}

/// Restores the terminal's former mode when it is dropped.
#[derive(Debug)]
pub struct Keyboard {
    before: Option<Termios>,
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// Runs until the end of the input, or of the program.
fn type_all(mut keys: impl Read, type_in: impl Fn(&[u8]) -> usize) {
    /// Interval between two attempts. The guest reads its UART as fast as it can.
    const PATIENCE: Duration = Duration::from_millis(10);
    let mut bytes = [0; 64];
    while let Ok(length @ 1..) = keys.read(&mut bytes) {
        let mut left = &bytes[..length];
        while !left.is_empty() {
            match type_in(left) {
                0 => std::thread::sleep(PATIENCE),
                taken => left = &left[taken..],
            }
        }
    }
}

/// Flushes every write, because an operator reads the console while it is written.
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
