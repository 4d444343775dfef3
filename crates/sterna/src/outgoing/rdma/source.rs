//! The connected source: its stream, and what it has agreed on with the destination.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use sterna_transport::rdma::{Adapter, CompletionStatus, RdmaError};
use sterna_transport::{ByteStream, Channel, Direction, StreamError};
use sterna_wire::rdma::session::Command;
use sterna_wire::rdma::{BlockPlaces, ChunkSize, Registration};

use super::counts::RdmaCounts;
use crate::error::MigrationError;
use crate::rdma::{LaneSourceStream, SourceStream, Written};

/// WRITEs in flight, at most.
pub(super) const WRITES: u32 = 512;
/// How long a source without return path waits for the destination to disconnect.
const GOODBYE: Duration = Duration::from_secs(5);
/// The longest WRITE, and the most that is posted with one call.
const LONGEST_WRITE: u64 = 2 << 20;
/// No side registers more slowly than so many bytes a second.
const SLOWEST_REGISTRATION: u64 = 16 << 20;

/// A connected source.
pub(in crate::outgoing) struct RdmaSource {
    pub(super) stream: Arc<SourceStream>,
    /// The stream as a channel.
    pub(in crate::outgoing) channel: Arc<Channel>,
    pub(super) peer: Peer,
    pub(super) registration: Registration,
    pub(super) chunk: ChunkSize,
    pub(super) pinned_limit: Option<u64>,
    /// What the destination registers at once, at most; of a Sterna.
    pub(super) destination_limit: Option<u64>,
    /// Where the destination has its blocks, once it has said so.
    pub(super) places: OnceLock<BlockPlaces>,
    pub(super) stall: Duration,
    pub(super) counts: Arc<RdmaCounts>,
    /// The connections of lanes, and each as a channel: of two Sternas with multifd.
    pub(in crate::outgoing) lanes: Vec<Connected>,
    /// The chunk size of a QEMU, once it has been probed.
    pub(super) qemu_chunk: OnceLock<ChunkSize>,
}

/// The connection of a lane, and the same as a channel.
pub(super) type Connected = (Arc<LaneSourceStream>, Arc<Channel>);

/// Whose rules are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Qemu,
    /// With this chunk size.
    Sterna(ChunkSize),
}

impl RdmaSource {
    /// Ends the adapter's access to memory: when this returns, it reads nothing more for this migration.
    pub(in crate::outgoing) fn destroy(&self) {
        self.stream.destroy();
        for (lane, _) in &self.lanes {
            lane.destroy();
        }
        self.counts.closed();
    }

    /// Fails if a WRITE or a message has failed: a destination disconnects because of it, and this side may hear of the
    /// disconnect first.
    pub(in crate::outgoing) fn check(&self) -> Result<(), MigrationError> {
        first_failure(&self.stream).map_or(Ok(()), |error| Err(self.failed()(error.into())))
    }

    /// The last byte of the stream was written: waits until it is there. Without a return path nothing else will come (§7):
    /// a Sterna is shown the end at once, as it may wait for that with the guest paused; a QEMU disconnects first, for which this
    /// waits some seconds.
    pub(in crate::outgoing) fn finish(&self, has_return_path: bool) -> Result<(), MigrationError> {
        self.stream.flush(Some(self.stall)).map_err(self.failed())?;
        if !has_return_path && self.is_sterna() {
            // All that was sent has arrived. The destination's end may come first.
            let _ = self.stream.finish_writing();
            return Ok(());
        }
        let began = Instant::now();
        while !has_return_path && !self.stream.peer_has_closed() && began.elapsed() < GOODBYE {
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// In bytes: an operator's wish, and no more than keeps completions coming.
    pub(super) fn longest_write(&self) -> u64 {
        self.chunk.bytes().min(LONGEST_WRITE)
    }

    pub(super) fn is_sterna(&self) -> bool {
        self.peer != Peer::Qemu
    }

    /// Whether windows are given back when there are too many.
    pub(super) fn gives_back(&self) -> bool {
        let is_limited = self.pinned_limit.is_some() || self.destination_limit.is_some();
        let blocks = self.places.get().map(BlockPlaces::blocks).unwrap_or_default();
        let pins_nothing = (0..blocks.len()).all(|block| self.on_demand_key(block).is_some());
        self.is_sterna() && is_limited && (blocks.is_empty() || !pins_nothing)
    }

    /// The key of a whole block, if the destination has registered it without pinning it: of a Sterna without pin-all.
    pub(super) fn on_demand_key(&self, block: usize) -> Option<u32> {
        let place = self.places.get()?.blocks().get(block)?;
        let is_on_demand = self.is_sterna() && self.registration == Registration::Dynamic;
        (is_on_demand && place.key != 0).then_some(place.key)
    }

    pub(super) fn adapter(&self) -> Arc<dyn Adapter> {
        self.stream.main().connection().adapter()
    }

    pub(super) fn places(&self) -> Result<&BlockPlaces, MigrationError> {
        let unknown =
            || MigrationError::Internal("memory is to be written before the blocks are known".to_owned());
        self.places.get().ok_or_else(unknown)
    }

    /// Sends a command, and gives its answer. The destination may be about to register so many bytes.
    pub(super) fn command(
        &self,
        command: Command,
        message: &[u8],
        registering: u64,
    ) -> Result<Written, MigrationError> {
        let limit = self.stall + Duration::from_secs(registering / SLOWEST_REGISTRATION);
        let written = self.stream.command(command, message, Some(limit)).map_err(self.failed())?;
        if matches!(written, Written::Answer(_)) {
            self.counts.exchanged();
        }
        Ok(written)
    }

    /// This side has shut the connection down.
    pub(super) fn cancelled(&self) -> MigrationError {
        let cancelled = StreamError::Rdma(RdmaError::Cancelled { address: self.channel.peer().to_owned() });
        self.failed()(cancelled)
    }

    /// What an error of the stream means for the migration.
    pub(super) fn failed(&self) -> impl Fn(StreamError) -> MigrationError + '_ {
        |error| self.explain(error)
    }

    fn explain(&self, error: StreamError) -> MigrationError {
        use CompletionStatus::{RemoteAccess, RnrRetryExceeded};
        let error = match error {
            StreamError::Rdma(end) if end.is_end() => first_failure(&self.stream).unwrap_or(end).into(),
            other => other,
        };
        if let StreamError::Rdma(RdmaError::Failed { status, remote_address, .. }) = &error {
            if *status == RnrRetryExceeded {
                self.counts.receiver_was_not_ready();
            }
            // Keys of REGISTER_RESULT are in use: not with pin-all. A Sterna registers what is asked for, whatever its chunk size.
            if let (RemoteAccess, Some(address), Registration::Dynamic, Peer::Qemu) =
                (*status, remote_address, self.registration, self.peer)
            {
                let chunk = self.qemu_chunk.get().copied().unwrap_or_default();
                return registered_less(self.channel.peer(), self.places.get(), chunk, *address);
            }
        }
        self.channel.stream_error(Direction::Write, error).into()
    }
}

/// What broke the connection, if it was a WRITE or a message of this side.
fn first_failure(stream: &SourceStream) -> Option<RdmaError> {
    stream.main().reap().err().filter(|error| matches!(error, RdmaError::Failed { .. }) && !error.is_end())
}

/// The destination's adapter has refused a WRITE into memory that the destination was asked to register.
fn registered_less(
    peer: &str,
    places: Option<&BlockPlaces>,
    chunk: ChunkSize,
    address: u64,
) -> MigrationError {
    let blocks = places.map(BlockPlaces::blocks).unwrap_or_default();
    let place = blocks.iter().enumerate().find_map(|(index, block)| {
        let offset = address.checked_sub(block.host_address).filter(|offset| *offset < block.length_bytes)?;
        Some(format!("offset {offset:#x} of block {index}"))
    });
    let place = place.unwrap_or_else(|| format!("address {address:#x}"));
    MigrationError::PeerIncompatible {
        what: format!(
            "{peer}: the destination refused a WRITE to {place} (remote access error), and it was asked to register that \
             memory: it has registered less, probably one chunk of {chunk}; set x-rdma-chunk-size to {} at the \
             destination, or rdma-pin-all at the source",
            chunk.window()
        ),
    }
}
