//! The pipe for a back end's state, with a time limit for transfers without progress.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::error::{StateDirection, VhostUserError};

/// Size of the pipe, which the kernel permits every user: as much as one chunk.
const PIPE_BYTES: usize = 1 << 20;

/// The front end's end of the pipe.
#[derive(Debug)]
pub(super) struct StatePipe {
    device: Arc<str>,
    direction: StateDirection,
    limit: Duration,
    /// An end of a pipe that was made here. No other process can make it block.
    file: File,
    /// The back end's own pipe, if the back end sent one.
    theirs: Option<Theirs>,
    bytes: u64,
}

/// An end of the back end's own pipe. The back end shares the open file and can make it blocking at any time.
/// Therefore this process never reads or writes it directly. Bytes are spliced between it and a pipe of this
/// process with non-blocking calls.
#[derive(Debug)]
struct Theirs {
    pipe: File,
    /// The other end of this process's pipe.
    inner: OwnedFd,
}

/// Creates a pipe. Returns this process's end and the back end's end.
pub(super) fn pair(
    device: &Arc<str>,
    direction: StateDirection,
    limit: Duration,
) -> Result<(StatePipe, OwnedFd), VhostUserError> {
    let failed = |source: rustix::io::Errno| VhostUserError::System {
        device: Arc::clone(device),
        what: "making a pipe for the state",
        source: source.into(),
    };
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
    // The kernel may refuse more memory to a user with many pipes. A smaller pipe works as well.
    let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
    let (ours, theirs) = match direction {
        StateDirection::Save => (reader, writer),
        StateDirection::Load => (writer, reader),
    };
    // Without this, a write could wait beyond the limit. The other end has its own flags.
    fcntl_getfl(&ours).and_then(|flags| fcntl_setfl(&ours, flags | OFlags::NONBLOCK)).map_err(failed)?;
    let device = Arc::clone(device);
    Ok((StatePipe { device, direction, limit, file: ours.into(), theirs: None, bytes: 0 }, theirs))
}

impl StatePipe {
    /// Uses `pipe` instead, an end of a pipe that the back end made itself.
    ///
    /// # Errors
    /// `pipe` is not a pipe. Files and sockets are refused, because no read of them is certain not to block.
    pub(super) fn over(
        device: &Arc<str>,
        direction: StateDirection,
        limit: Duration,
        pipe: File,
    ) -> Result<Self, VhostUserError> {
        let is_pipe = pipe.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo());
        if !is_pipe {
            return Err(VhostUserError::Misbehaved {
                device: Arc::clone(device),
                request: "SET_DEVICE_STATE_FD",
                rule: "the descriptor that it supplied is not a pipe".to_owned(),
            });
        }
        let (ours, inner) = pair(device, direction, limit)?;
        Ok(Self { theirs: Some(Theirs { pipe, inner }), ..ours })
    }

    /// Reads the available bytes. 0 if the back end has closed its end.
    pub(super) fn read(&mut self, to: &mut [u8]) -> Result<usize, VhostUserError> {
        let since = Instant::now();
        loop {
            match self.file.read(to) {
                Ok(n) => {
                    self.bytes += n as u64;
                    return Ok(n);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && self.theirs.is_some() => {
                    self.fetch(since)?;
                }
                Err(error) => self.after(error, PollFlags::IN, since)?,
            }
        }
    }

    /// Writes all bytes of `from`.
    pub(super) fn write(&mut self, mut from: &[u8]) -> Result<(), VhostUserError> {
        let mut since = Instant::now();
        while !from.is_empty() {
            match self.file.write(from) {
                Ok(n) => {
                    self.pass_on(n)?;
                    self.bytes += n as u64;
                    from = &from[n..];
                    since = Instant::now();
                }
                Err(error) => self.after(error, PollFlags::OUT, since)?,
            }
        }
        Ok(())
    }

    /// Number of bytes that can be read without waiting.
    pub(super) fn readable(&self) -> u64 {
        let theirs = self.theirs.as_ref().map_or(0, |theirs| waiting(&theirs.pipe));
        waiting(&self.file).saturating_add(theirs)
    }

    /// Moves at least one byte from the back end's pipe to ours. At its end, closes ours.
    fn fetch(&mut self, since: Instant) -> Result<(), VhostUserError> {
        while let Some(theirs) = &self.theirs {
            match splice(&theirs.pipe, None, &theirs.inner, None, PIPE_BYTES, SpliceFlags::NONBLOCK) {
                Ok(0) => self.theirs = None,
                Ok(_) => break,
                Err(error) => self.after(error.into(), PollFlags::IN, since)?,
            }
        }
        Ok(())
    }

    /// Moves the `left` bytes in our pipe to the back end's pipe.
    fn pass_on(&self, mut left: usize) -> Result<(), VhostUserError> {
        let mut since = Instant::now();
        while let Some(theirs) = &self.theirs
            && left > 0
        {
            match splice(&theirs.inner, None, &theirs.pipe, None, left, SpliceFlags::NONBLOCK) {
                Ok(n) => (left, since) = (left - n, Instant::now()),
                Err(error) => self.after(error.into(), PollFlags::OUT, since)?,
            }
        }
        Ok(())
    }

    /// Waits if the error permits a retry. The wait ends at the limit after the last transferred byte, even
    /// if the back end takes the available bytes away in between.
    fn after(&self, error: io::Error, interest: PollFlags, since: Instant) -> Result<(), VhostUserError> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => self.wait(interest, since),
            _ => Err(self.failed(error)),
        }
    }

    fn wait(&self, interest: PollFlags, since: Instant) -> Result<(), VhostUserError> {
        let left = self.limit.saturating_sub(since.elapsed());
        let stalled = || VhostUserError::Stalled {
            device: Arc::clone(&self.device),
            direction: self.direction,
            bytes: self.bytes,
            limit: self.limit,
        };
        if left.is_zero() {
            return Err(stalled());
        }
        let timeout = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let pipe = self.theirs.as_ref().map_or(self.file.as_fd(), |theirs| theirs.pipe.as_fd());
        match poll(&mut [PollFd::from_borrowed_fd(pipe, interest)], Some(&timeout)) {
            Ok(0) => Err(stalled()),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(self.failed(error.into())),
        }
    }

    fn failed(&self, source: io::Error) -> VhostUserError {
        VhostUserError::Pipe {
            device: Arc::clone(&self.device),
            direction: self.direction,
            bytes: self.bytes,
            source,
        }
    }
}

/// Number of bytes in a pipe.
fn waiting(pipe: &File) -> u64 {
    rustix::io::ioctl_fionread(pipe).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(direction: StateDirection) -> (StatePipe, File) {
        let (ours, theirs) = pair(&"fs".into(), direction, Duration::from_millis(30)).expect("a pipe");
        (ours, theirs.into())
    }

    #[test]
    fn read_of_what_the_back_end_wrote_ends_when_it_closes() {
        let (mut ours, mut theirs) = both(StateDirection::Save);
        theirs.write_all(b"state").expect("room");
        drop(theirs);
        let mut bytes = [0; 8];

        assert_eq!(ours.readable(), 5);
        assert_eq!(ours.read(&mut bytes).expect("bytes"), 5);
        assert_eq!(&bytes[..5], b"state");
        assert_eq!(ours.read(&mut bytes).expect("the end"), 0);
    }

    #[test]
    fn read_from_a_back_end_that_writes_nothing_says_so() {
        let (mut ours, theirs) = both(StateDirection::Save);

        let error = ours.read(&mut [0; 8]).expect_err("nothing comes");

        assert!(matches!(error, VhostUserError::Stalled { bytes: 0, .. }), "{error}");
        drop(theirs);
    }

    #[test]
    fn write_to_a_back_end_that_reads_nothing_says_so() {
        let (mut ours, theirs) = both(StateDirection::Load);

        let error = ours.write(&vec![7; 4 << 20]).expect_err("nobody reads");

        assert!(matches!(error, VhostUserError::Stalled { bytes: 1.., .. }), "{error}");
        drop(theirs);
    }

    #[test]
    fn write_to_a_back_end_that_closed_says_so() {
        let (mut ours, theirs) = both(StateDirection::Load);
        drop(theirs);

        let error = ours.write(b"state").expect_err("nobody can read");

        assert!(matches!(error, VhostUserError::Pipe { bytes: 0, .. }), "{error}");
    }
}
