//! The connected source: its stream, and the settings that it has negotiated with the destination.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use sterna_transport::rdma::{Adapter, CompletionStatus, RdmaError};
use sterna_transport::{ByteStream, Channel, Direction, StreamError};
use sterna_wire::rdma::session::Command;
use sterna_wire::rdma::{BlockPlaces, ChunkSize, Registration};

use crate::error::{MigrationError, RdmaDifference, RemotePlace};
use crate::outgoing::measure::rdma_counts::RdmaCounts;
use crate::rdma::{LaneSourceStream, SourceStream, Written};

/// The most WRITEs in flight.
pub(super) const WRITES: u32 = 512;
/// The time that a source without return path waits for the destination to disconnect.
const GOODBYE: Duration = Duration::from_secs(5);
/// The longest WRITE, and the most bytes that one call posts.
const LONGEST_WRITE: u64 = 2 << 20;
/// The lowest assumed rate at which a side registers memory, in bytes per second.
const SLOWEST_REGISTRATION: u64 = 16 << 20;

/// A source that is connected over RDMA.
pub(in crate::outgoing) struct RdmaSource {
    pub(super) stream: Arc<SourceStream>,
    /// The stream as a channel.
    pub(in crate::outgoing) channel: Arc<Channel>,
    pub(super) peer: Peer,
    pub(super) registration: Registration,
    pub(super) chunk: ChunkSize,
    pub(super) pinned_limit: Option<u64>,
    /// The most bytes that a Sterna destination registers at the same time.
    pub(super) destination_limit: Option<u64>,
    /// The places of the destination's blocks, after its answer.
    pub(super) places: OnceLock<BlockPlaces>,
    pub(super) stall: Duration,
    pub(super) counts: Arc<RdmaCounts>,
    /// The connections of lanes, between two Sternas with multifd.
    pub(in crate::outgoing) lanes: Vec<Connected>,
    /// The chunk size of a QEMU, after it has been probed.
    pub(super) qemu_chunk: OnceLock<ChunkSize>,
}

/// The connection of a lane, and the same as a channel.
pub(super) type Connected = (Arc<LaneSourceStream>, Arc<Channel>);

/// The peer, whose rules for registration apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Qemu,
    /// A Sterna with this chunk size.
    Sterna(ChunkSize),
}

impl RdmaSource {
    /// Ends the adapter's access to memory: it reads none for this migration afterwards.
    pub(in crate::outgoing) fn destroy(&self) {
        self.stream.destroy();
        for (lane, _) in &self.lanes {
            lane.destroy();
        }
        self.counts.closed();
    }

    /// Fails if a WRITE or a message has failed.
    ///
    /// The destination then disconnects, and this side may learn of the disconnect before it learns of the
    /// failure.
    pub(in crate::outgoing) fn check(&self) -> Result<(), MigrationError> {
        first_failure(&self.stream).map_or(Ok(()), |error| Err(self.failed()(error.into())))
    }

    /// Waits until the last byte of the stream has arrived, after it was written.
    ///
    /// Without a return path no message follows (§7). A Sterna gets the end of the stream immediately, because it
    /// may wait for it with the guest paused. A QEMU disconnects first, and this side waits some seconds for
    /// that.
    pub(in crate::outgoing) fn finish(&self, has_return_path: bool) -> Result<(), MigrationError> {
        self.stream.flush(Some(self.stall)).map_err(self.failed())?;
        if !has_return_path && self.is_sterna() {
            // All data have arrived. The destination may close first, so an error here has no meaning.
            let _ = self.stream.finish_writing();
            return Ok(());
        }
        let began = Instant::now();
        while !has_return_path && !self.stream.peer_has_closed() && began.elapsed() < GOODBYE {
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// The longest WRITE in bytes: the operator's setting, at most [`LONGEST_WRITE`].
    ///
    /// The limit makes completions arrive regularly.
    pub(super) fn longest_write(&self) -> u64 {
        self.chunk.bytes().min(LONGEST_WRITE)
    }

    pub(super) fn is_sterna(&self) -> bool {
        self.peer != Peer::Qemu
    }

    /// Whether windows are given back at a limit.
    pub(super) fn gives_back(&self) -> bool {
        let is_limited = self.pinned_limit.is_some() || self.destination_limit.is_some();
        let blocks = self.places.get().map(BlockPlaces::blocks).unwrap_or_default();
        let pins_nothing = (0..blocks.len()).all(|block| self.on_demand_key(block).is_some());
        self.is_sterna() && is_limited && (blocks.is_empty() || !pins_nothing)
    }

    /// The key of a whole block that a Sterna destination has registered on demand.
    ///
    /// The destination pins nothing then. Only without pin-all.
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

    /// Sends a command, and gives its answer. The destination may have to register `bytes` before it answers.
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

    /// The error after this side has shut the connection down.
    pub(super) fn cancelled(&self) -> MigrationError {
        let cancelled = StreamError::Rdma(RdmaError::Cancelled { address: self.channel.peer().to_owned() });
        self.failed()(cancelled)
    }

    /// Converts an error of the stream into an error of the migration.
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
            // Keys of REGISTER_RESULT are used only without pin-all. A Sterna registers each requested range,
            // whatever its chunk size.
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

/// The failed WRITE or message of this side that broke the connection.
fn first_failure(stream: &SourceStream) -> Option<RdmaError> {
    stream.main().reap().err().filter(|error| matches!(error, RdmaError::Failed { .. }) && !error.is_end())
}

/// The error for a refused WRITE into memory that the destination should have registered.
fn registered_less(
    peer: &str,
    places: Option<&BlockPlaces>,
    chunk: ChunkSize,
    address: u64,
) -> MigrationError {
    let blocks = places.map(BlockPlaces::blocks).unwrap_or_default();
    let place = blocks.iter().enumerate().find_map(|(index, block)| {
        let offset = address.checked_sub(block.host_address).filter(|offset| *offset < block.length_bytes)?;
        Some(RemotePlace::Block { index, offset })
    });
    let place = place.unwrap_or(RemotePlace::Address(address));
    RdmaDifference::ChunkSize { peer: peer.to_owned(), place, chunk }.into()
}
