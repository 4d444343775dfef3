//! Saves a guest into a pipe whose reader stores the stream, such as `sterna save` with a format of its own.
//!
//! As with a file ([`super::file`]), nothing answers, each step that can fail comes before the commit, and the guest
//! stays stopped and may run again. The commit is the end of the pipe. A reader must not store a stream without its end.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sterna_proto::source::Event as Fed;
use sterna_transport::{Address, CancelFlag, IoPart};

use super::carrier::facts::Facts;
use super::carrier::interface::Carrier;
use super::carrier::stream::{begin_ram, greet};
use super::carrier::transport::Transport;
use super::carrier::writers::{Writers, main_lane};
use super::file::record_compatibility;
use super::main_channel::MainChannel;
use super::main_stream::{MainStream, Sink};
use super::shared::Shared;
use crate::error::MigrationError;

/// Bytes that are collected for one write.
const BUFFER_BYTES: usize = 256 << 10;
/// Interval between two looks whether the save was cancelled, while the pipe is full.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The transport of a pipe that was handed over.
pub(super) static TRANSPORT: Transport = Transport {
    facts: Facts {
        stores: true,
        can_ask: false,
        can_reconnect: false,
        gains_by_multifd: false,
        takes_device_packets: false,
        gains_by_hints: true,
        counts_rdma: false,
    },
    open: |shared| Ok(Box::new(SavePipe::open(shared)?)),
    ask: |question| Err(MigrationError::Internal(format!("{} answers no question", question.to))),
};

/// A migration into a pipe.
pub(super) struct SavePipe {
    shared: Arc<Shared>,
    main: Arc<MainChannel>,
    pipe: Arc<PipeStream>,
}

impl SavePipe {
    fn open(shared: &Arc<Shared>) -> Result<Self, MigrationError> {
        let Address::Handed(handed) = &shared.session.to else {
            return Err(MigrationError::Internal(format!("{} is no pipe", shared.session.to)));
        };
        let name = shared.session.to.to_string();
        let failed = |error: io::Error| MigrationError::system(format!("{name}: {error}"), error);
        let pipe = handed.take().map_err(failed)?;
        rustix::io::ioctl_fionbio(&pipe, true).map_err(|error| failed(error.into()))?;
        let cancel = shared.session.connecting.clone();
        let pipe = Arc::new(PipeStream { name, cancel, state: Mutex::new((Some(pipe), Vec::new())) });
        let sink: Arc<dyn Sink> = pipe.clone();
        let main =
            MainStream::new(sink, Arc::clone(&shared.measures.counters), shared.guest.source.section_ids());
        Ok(Self { shared: Arc::clone(shared), main: MainChannel::new(None, main), pipe })
    }
}

impl Carrier for SavePipe {
    fn main(&self) -> &Arc<MainChannel> {
        &self.main
    }

    fn greet(&self) -> Result<(), MigrationError> {
        greet(&self.shared, &self.main)?;
        record_compatibility(&self.shared, &self.main)
    }

    fn begin_ram(&mut self) -> Result<(), MigrationError> {
        begin_ram(&self.shared, &self.main)
    }

    fn lanes(&mut self) -> Result<Writers, MigrationError> {
        Ok(Writers::new(&self.shared, vec![main_lane(&self.shared, &self.main)?], false))
    }

    fn end_round(&self, _is_last: bool) -> Result<(), MigrationError> {
        Ok(())
    }

    fn end_ram(&self) -> Result<(), MigrationError> {
        self.main.with(|stream| stream.ram_part(true, false))
    }

    fn store(&self) -> Option<Result<(), MigrationError>> {
        let store = || {
            self.main.with(|stream| self.shared.guest.source.send_end(stream))?;
            self.pipe.flush()
        };
        Some(store())
    }

    fn end(&self) -> Result<(), MigrationError> {
        self.pipe.close();
        Ok(())
    }

    fn end_failed(&self) -> Fed {
        Fed::Shut(1)
    }
}

/// Collects bytes, and writes them into the pipe.
struct PipeStream {
    name: String,
    cancel: CancelFlag,
    /// The pipe, until it is closed, and the collected bytes.
    state: Mutex<(Option<OwnedFd>, Vec<u8>)>,
}

impl PipeStream {
    fn flush(&self) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        let (pipe, bytes) = &mut *state;
        self.write(pipe.as_ref(), bytes)
    }

    fn close(&self) {
        self.state.lock().0 = None;
    }

    fn write(&self, pipe: Option<&OwnedFd>, bytes: &mut Vec<u8>) -> Result<(), MigrationError> {
        let failed = |error: Errno| {
            let error = io::Error::from(error);
            MigrationError::system(format!("{}: write: {error}", self.name), error)
        };
        let pipe = pipe.ok_or_else(|| MigrationError::Internal(format!("{} is closed", self.name)))?;
        let mut left = &bytes[..];
        while !left.is_empty() {
            if self.cancel.is_cancelled() {
                return Err(MigrationError::Cancelled);
            }
            match rustix::io::write(pipe, left) {
                Ok(count) => left = &left[count..],
                Err(Errno::AGAIN) => {
                    let mut waiting = [PollFd::new(pipe, PollFlags::OUT)];
                    match poll(&mut waiting, Some(&LOOK)) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(error) => return Err(failed(error)),
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        bytes.clear();
        Ok(())
    }
}

impl Sink for PipeStream {
    fn write_parts(&self, parts: &[IoPart<'_>]) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        let (pipe, collected) = &mut *state;
        for part in parts {
            match part {
                IoPart::Bytes(bytes) => collected.extend_from_slice(bytes),
                IoPart::Ram(window) => {
                    let start = collected.len();
                    collected.resize(start + window.len(), 0);
                    window.copy_to(&mut collected[start..])?;
                }
            }
            if collected.len() >= BUFFER_BYTES {
                self.write(pipe.as_ref(), collected)?;
            }
        }
        Ok(())
    }
}
