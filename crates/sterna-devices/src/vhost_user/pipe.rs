//! The pipe through which a back end's state moves, with a limit for how long it may stand still.

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

/// What the kernel gives anybody: as much as one chunk.
const PIPE_BYTES: usize = 1 << 20;

/// Our end.
#[derive(Debug)]
pub(super) struct StatePipe {
    device: Arc<str>,
    direction: StateDirection,
    limit: Duration,
    /// The end of a pipe that was made here: nobody else can make it block.
    file: File,
    /// A pipe that the back end made, if it did.
    theirs: Option<Theirs>,
    bytes: u64,
}

/// An end of the back end's own pipe. Whether a call to it waits is for the back end to say, at any moment, since it
/// shares the open file. So it is never read or written: bytes are spliced between it and a pipe of ours, in calls that
/// do not wait.
#[derive(Debug)]
struct Theirs {
    pipe: File,
    /// The other end of our pipe.
    inner: OwnedFd,
}

/// Both ends: ours, and the back end's.
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
    // A user who has many pipes gets smaller ones; they work as well.
    let _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
    let (ours, theirs) = match direction {
        StateDirection::Save => (reader, writer),
        StateDirection::Load => (writer, reader),
    };
    // Or a write could wait beyond the limit. The other end has flags of its own.
    fcntl_getfl(&ours).and_then(|flags| fcntl_setfl(&ours, flags | OFlags::NONBLOCK)).map_err(failed)?;
    let device = Arc::clone(device);
    Ok((StatePipe { device, direction, limit, file: ours.into(), theirs: None, bytes: 0 }, theirs))
}

impl StatePipe {
    /// The state goes through `pipe` instead, an end of a pipe that the back end made itself.
    ///
    /// # Errors
    /// It is none. A file or a socket need not be: there is no way to read them that surely does not wait.
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

    /// Reads what there is; 0: the back end has closed its end.
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

    /// Writes all.
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

    /// Bytes that could be read at once.
    pub(super) fn readable(&self) -> u64 {
        let theirs = self.theirs.as_ref().map_or(0, |theirs| waiting(&theirs.pipe));
        waiting(&self.file).saturating_add(theirs)
    }

    /// Fetches what there is in the back end's pipe, at least a byte; at its end closes ours.
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

    /// Passes on to the back end's pipe the `left` bytes that are in ours.
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

    /// Waits, if the error says that waiting helps, no longer than the limit since the last byte moved: also where the
    /// back end takes away what was to be had meanwhile.
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

/// Bytes in a pipe.
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
