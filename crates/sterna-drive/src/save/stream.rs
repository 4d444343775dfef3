//! The VM's stream as it comes out of the pipe.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sterna_image::ImageError;

use super::check::is_whole_tail;
use super::run_state;

/// Bytes at the end of the stream that are held back, because they contain the run state.
const TAIL_BYTES: usize = 4 << 20;

/// The end of a save that the VM gave up.
const NO_END: &str = "the VM's stream has no end";
const READ: &str = "read of the VM's pipe";

/// Whether the stream was broken off, so that the VM knows the reason.
pub(crate) fn is_broken_off(error: &ImageError) -> bool {
    match error {
        ImageError::Request(text) => text == NO_END,
        ImageError::Io { call, .. } => *call == READ,
        _ => false,
    }
}

/// Reads the stream from the pipe.
pub(crate) struct Stream {
    pub(crate) pipe: File,
    /// The save was given up, so that the rest of the stream is not needed.
    pub(crate) is_ended: Arc<AtomicBool>,
    /// Path of the image, for errors.
    pub(crate) path: String,
    /// The run state to write into the stream, if any.
    pub(crate) state: Option<String>,
}

impl Stream {
    /// Passes the whole stream on. Its last bytes are held back until its end, because they contain the run state.
    pub(crate) fn pass(&mut self, to: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> Result<(), ImageError> {
        let (mut before, mut now, mut filled) = (Vec::new(), vec![0; TAIL_BYTES], 0);
        loop {
            let room = &mut now[filled..];
            let count = self.read(room).map_err(|error| self.io(READ, error))?;
            if count == 0 {
                break;
            }
            filled += count;
            if filled == TAIL_BYTES {
                to(&before).map_err(|error| self.io("write", error))?;
                std::mem::swap(&mut before, &mut now);
                now.resize(TAIL_BYTES, 0);
                filled = 0;
            }
        }
        let mut tail = [&before[..], &now[..filled]].concat();
        if !is_whole_tail(&tail) {
            return Err(ImageError::Request(NO_END.to_owned()));
        }
        if let Some(state) = &self.state
            && let Some(place) = run_state::find(&tail)
        {
            tail[place].copy_from_slice(&run_state::encode(state));
        }
        to(&tail).map_err(|error| self.io("write", error))
    }

    /// Reads the available bytes; 0 at the end. Checks every 50 ms whether the save was given up.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        const LOOK_UP: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        loop {
            if self.is_ended.load(Ordering::Acquire) {
                return Err(io::Error::other("the save was abandoned"));
            }
            let mut waiting = [PollFd::new(&self.pipe, PollFlags::IN)];
            match poll(&mut waiting, Some(&LOOK_UP)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => match self.pipe.read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    result => return result,
                },
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// An error of `call` at this save.
    pub(crate) fn io(&self, call: &'static str, source: io::Error) -> ImageError {
        ImageError::Io { file: self.path.clone(), call, source }
    }
}
