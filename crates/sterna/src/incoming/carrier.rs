//! The operations of an incoming migration that differ between transports (sockets, files, RDMA).

use std::sync::Arc;
use std::time::Duration;

use sterna_proto::MigrationId;
use sterna_ram::GuestRam;
use sterna_transport::Channel;
use sterna_wire::multifd::BlockTable;
use sterna_wire::ram::BlockList;

use crate::error::MigrationError;
use crate::pages::RamSink;
use crate::stats::IncomingRdmaStatistics;

/// A transport of an incoming migration. The default methods suit sockets and files.
pub(super) trait Carrier: Send + Sync {
    /// Whether the source writes pages into their places itself, before the packets that name them.
    fn writes_pages(&self) -> bool {
        false
    }

    /// The migration that the source named when it connected.
    ///
    /// `None` if the transport's handshake has no field for it (specs/rdma.md §2.3).
    fn session(&self) -> Option<MigrationId> {
        None
    }

    /// What the main channel's hooks start, where the transport has hooks.
    fn hooks<'a>(
        &'a self,
        _receiver: &'a dyn Receiver,
        _channel: &Arc<Channel>,
    ) -> Option<Box<dyn Hooks + 'a>> {
        None
    }

    /// Waits at most `_limit` until the source has opened the return path on the main channel.
    fn await_return_path(&self, _limit: Duration) -> Result<(), MigrationError> {
        Ok(())
    }

    /// Called after the last page was received: afterwards the source cannot write guest memory. `_tell`
    /// reports problems to the operator.
    fn end_writes(&self, _tell: &dyn Fn(&str)) -> Result<(), MigrationError> {
        Ok(())
    }

    /// Sends the source an error on the transport's own channel.
    fn say_error(&self) {}

    /// Closes all connections and ends the source's access to guest memory.
    fn close(&self) {}

    /// The statistics that only this transport measures.
    fn statistics(&self) -> Option<IncomingRdmaStatistics> {
        None
    }
}

/// What a transport needs of the migration that it carries.
#[cfg_attr(not(feature = "rdma"), allow(dead_code, reason = "only phases of RDMA ask"))]
pub(super) trait Receiver {
    /// How long the peer may be silent.
    fn stall_limit(&self) -> Duration;

    /// The guest's RAM, once its blocks are known.
    fn ram(&self) -> Result<&GuestRam, MigrationError>;

    /// Where pages go; `None` where the guest is not in memory.
    fn ram_sink(&self) -> Option<&RamSink>;

    /// So many pages were zero.
    fn count_zero_pages(&self, pages: u64);

    /// Tells the operator.
    fn warn(&self, text: String);
}

/// Phases in the stream in which the transport and not the stream brings pages.
pub(super) trait Hooks {
    /// The source has named RAM's blocks. Every name is in `table`.
    fn blocks_came(&mut self, blocks: &BlockList, table: &BlockTable) -> Result<(), MigrationError>;

    /// Handles a hook that was read from the stream. Returns when its phase is over.
    fn run(&mut self) -> Result<(), MigrationError>;
}

/// The carrier of sockets and files, which need no special handling.
pub(super) struct Plain;

impl Carrier for Plain {}
