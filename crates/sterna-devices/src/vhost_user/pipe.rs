//! The pipe through which a back end's state moves, with a limit for how long it may stand still.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use super::{StateDirection, VhostUserError};

/// What the kernel gives anybody: as much as one chunk.
const PIPE_BYTES: usize = 1 << 20;

/// Our end.
#[derive(Debug)]
pub(super) struct StatePipe {
    device: Arc<str>,
    direction: StateDirection,
    limit: Duration,
    file: File,
    bytes: u64,
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
    Ok((StatePipe::new(device, direction, limit, ours.into())?, theirs))
}

impl StatePipe {
    /// Takes a descriptor of which the other end is the back end's: maybe one that it made itself.
    pub(super) fn new(
        device: &Arc<str>,
        direction: StateDirection,
        limit: Duration,
        file: File,
    ) -> Result<Self, VhostUserError> {
        // Or a write could wait beyond the limit.
        let set = fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags | OFlags::NONBLOCK));
        set.map_err(|source| VhostUserError::System {
            device: Arc::clone(device),
            what: "setting up the pipe for the state",
            source: source.into(),
        })?;
        Ok(Self { device: Arc::clone(device), direction, limit, file, bytes: 0 })
    }

    /// Reads what there is; 0: the back end has closed its end.
    pub(super) fn read(&mut self, to: &mut [u8]) -> Result<usize, VhostUserError> {
        loop {
            match self.file.read(to) {
                Ok(n) => {
                    self.bytes += n as u64;
                    return Ok(n);
                }
                Err(error) => self.after(error, PollFlags::IN)?,
            }
        }
    }

    /// Writes all.
    pub(super) fn write(&mut self, mut from: &[u8]) -> Result<(), VhostUserError> {
        while !from.is_empty() {
            match self.file.write(from) {
                Ok(n) => {
                    self.bytes += n as u64;
                    from = &from[n..];
                }
                Err(error) => self.after(error, PollFlags::OUT)?,
            }
        }
        Ok(())
    }

    /// Bytes that could be read at once.
    pub(super) fn readable(&self) -> u64 {
        rustix::io::ioctl_fionread(&self.file).unwrap_or(0)
    }

    /// Waits, if the error says that waiting helps.
    fn after(&self, error: io::Error, interest: PollFlags) -> Result<(), VhostUserError> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => self.wait(interest),
            _ => Err(self.failed(error)),
        }
    }

    fn wait(&self, interest: PollFlags) -> Result<(), VhostUserError> {
        let limit = Timespec {
            tv_sec: self.limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: self.limit.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::from_borrowed_fd(self.file.as_fd(), interest)], Some(&limit)) {
            Ok(0) => Err(VhostUserError::Stalled {
                device: Arc::clone(&self.device),
                direction: self.direction,
                bytes: self.bytes,
                limit: self.limit,
            }),
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
