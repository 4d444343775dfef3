//! What a destination at `rdma:` has beside its channel: its connections, and the memory that is registered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_transport::ByteStream as _;
use sterna_wire::WireError;
use sterna_wire::rdma::{Admission, ChunkSize, ConnectReply, Introduction, Part};

use super::refusals::Refusals;
use super::windows::Windows;
use crate::error::MigrationError;
use crate::params::{Capabilities, Parameters};
use crate::rdma::{DestinationStream, LaneDestinationStream};
use crate::stats::IncomingRdmaStatistics;

/// What a destination at `rdma:` has beside its channel.
pub(in crate::incoming) struct Rdma {
    pub(super) chunk: ChunkSize,
    pub(super) pinned_limit_bytes: Option<u64>,
    connections: Mutex<Connections>,
    changed: Condvar,
    /// Guest memory that is registered.
    pub(super) windows: Mutex<Windows>,
    pub(super) refusals: Refusals,
    /// Questions that are being answered.
    pub(super) questions: AtomicUsize,
    pub(super) commands: AtomicU64,
    pub(super) zero_ranges: AtomicU64,
}

/// The connections of one source at a time.
struct Connections {
    admission: Admission,
    /// How many main connections were admitted so far. The number says which of them another connection belongs to.
    source: u64,
    /// The main connection, once it is accepted.
    main: Option<Arc<DestinationStream>>,
    /// Lanes that were accepted for it.
    lanes: Vec<Arc<LaneDestinationStream>>,
    /// No connection of a migration is taken any more.
    is_over: bool,
}

impl Rdma {
    pub(in crate::incoming) fn new(params: &Parameters, capabilities: &Capabilities) -> Self {
        // The source gives windows back by their first chunk, so chunks are no longer than windows below the limit.
        let limit = params.rdma.pinned_limit_bytes;
        let chunk = limit.map_or(params.rdma.chunk, |limit| params.rdma.chunk.twice_within(limit));
        let lanes = if capabilities.multifd { params.multifd_channels } else { 0 };
        let admission = Admission::new(lanes, chunk).with_pinned_limit(limit);
        let connections = Connections { admission, source: 0, main: None, lanes: Vec::new(), is_over: false };
        Self {
            chunk,
            pinned_limit_bytes: limit,
            connections: Mutex::new(connections),
            changed: Condvar::new(),
            windows: Mutex::default(),
            refusals: Refusals::default(),
            questions: AtomicUsize::new(0),
            commands: AtomicU64::new(0),
            zero_ranges: AtomicU64::new(0),
        }
    }

    /// The connections of the migration.
    pub(in crate::incoming) fn stream(&self) -> Result<Arc<DestinationStream>, MigrationError> {
        let gone = || MigrationError::Internal("there is no main connection over RDMA".to_owned());
        self.connections.lock().main.clone().ok_or_else(gone)
    }

    /// What the source said when it connected, if it is a Sterna.
    pub(in crate::incoming) fn introduction(&self) -> Option<Introduction> {
        self.connections.lock().admission.introduction()
    }

    /// The source opens the return path: waits until its connection is there. It was asked for before the stream began.
    pub(in crate::incoming) fn await_return_path(&self, limit: Duration) -> Result<(), MigrationError> {
        let mut connections = self.connections.lock();
        let is_coming = |connections: &mut Connections| {
            let is_there = connections.main.as_ref().is_some_and(|main| main.has_return_path());
            connections.admission.has(Part::ReturnPath) && !is_there && !connections.is_over
        };
        self.changed.wait_while_for(&mut connections, is_coming, limit);
        if connections.is_over || connections.main.as_ref().is_some_and(|main| main.has_return_path()) {
            return Ok(());
        }
        let what = "the source wants answers (return-path) and made one RDMA connection: give both sides the capability \
                    return-path, or neither";
        Err(MigrationError::PeerIncompatible { what: what.to_owned() })
    }

    /// Takes the source's right to write away: when this returns, nothing is written to guest memory any more.
    pub(in crate::incoming) fn end_writes(&self) -> Result<(), MigrationError> {
        let failed = |error| {
            let what = "the source's right to write guest memory could not be taken away, so the guest cannot start here";
            MigrationError::System(format!("{what}: {error}"))
        };
        self.stream()?.end_remote_writes().map_err(failed)?;
        let lanes = self.connections.lock().lanes.clone();
        lanes.iter().try_for_each(|lane| lane.end_remote_writes()).map_err(failed)
    }

    /// Tells the source that this side has failed, as far as it hears.
    pub(in crate::incoming) fn say_error(&self) {
        if let Ok(stream) = self.stream() {
            stream.say_error();
        }
    }

    /// Destroys the queue pairs, and then deregisters all memory: takes long where there is much of it.
    pub(in crate::incoming) fn close(&self) {
        let (main, lanes) = {
            let mut connections = self.connections.lock();
            connections.is_over = true;
            (connections.main.take(), std::mem::take(&mut connections.lanes))
        };
        self.changed.notify_all();
        if let Some(main) = main {
            main.destroy();
        }
        lanes.iter().for_each(|lane| lane.destroy());
        let windows = self.windows.lock().end();
        drop(windows);
    }

    pub(in crate::incoming) fn statistics(&self) -> IncomingRdmaStatistics {
        let windows = self.windows.lock();
        IncomingRdmaStatistics {
            registrations: windows.made(),
            pinned_bytes: windows.bytes(),
            commands: self.commands.load(Ordering::Relaxed),
            zero_ranges: self.zero_ranges.load(Ordering::Relaxed),
        }
    }
}

impl Rdma {
    /// Decides on private data alone: what the connection is, and which source it belongs to.
    pub(super) fn admit(
        &self,
        private_data: &[u8],
        is_migrating: bool,
    ) -> Result<(Part, ConnectReply, u64), WireError> {
        let mut connections = self.connections.lock();
        if !is_migrating && connections.main.as_ref().is_some_and(|main| main.peer_has_closed()) {
            // The source has gone, and its greeter has not noticed yet.
            connections.admission.ended(Part::Main);
            connections.main = None;
            connections.lanes.clear();
        }
        let before = connections.admission.clone();
        let (part, reply) = connections.admission.request(private_data)?;
        let has_begun = connections.main.as_ref().is_some_and(|main| main.has_begun_phases());
        if part != Part::Question && (connections.is_over || part == Part::ReturnPath && has_begun) {
            connections.admission = before;
            let rule = format!("{part}, and the migration has begun: it comes too late");
            return Err(WireError::incompatible("RDMA connect request", 8, "specs/rdma.md §2.4", rule));
        }
        if part == Part::Main {
            connections.source += 1;
        }
        Ok((part, reply, connections.source))
    }

    /// A connection that was admitted has gone before it was of use: its place is free. Without the main connection
    /// nothing is left of the others.
    pub(super) fn gone(&self, part: Part, source: u64) {
        let mut connections = self.connections.lock();
        if connections.source != source || connections.is_over {
            return;
        }
        connections.admission.ended(part);
        let (main, lanes) = match part {
            Part::Main => (connections.main.take(), std::mem::take(&mut connections.lanes)),
            _ => (None, Vec::new()),
        };
        drop(connections);
        self.changed.notify_all();
        if let Some(main) = main {
            main.destroy();
        }
        lanes.iter().for_each(|lane| lane.destroy());
    }

    /// The main connection is accepted; takes it in. False: it came too late.
    pub(super) fn accepted_main(&self, source: u64, stream: Arc<DestinationStream>) -> bool {
        let mut connections = self.connections.lock();
        let is_wanted = connections.source == source && !connections.is_over;
        if is_wanted {
            connections.main = Some(stream);
        }
        self.changed.notify_all();
        is_wanted
    }

    /// A lane is accepted; takes it in. False: it came too late.
    pub(super) fn accepted_lane(&self, source: u64, stream: Arc<LaneDestinationStream>) -> bool {
        let mut connections = self.connections.lock();
        let is_wanted = connections.source == source && !connections.is_over;
        if is_wanted {
            connections.lanes.push(stream);
        }
        is_wanted
    }

    /// Waits until the main connection of a source is accepted.
    pub(super) fn wait_for_main(&self, source: u64, limit: Duration) -> Option<Arc<DestinationStream>> {
        let until = Instant::now().checked_add(limit)?;
        let mut connections = self.connections.lock();
        loop {
            let is_there = connections.admission.has(Part::Main) && connections.source == source;
            if !is_there || connections.is_over {
                return None;
            }
            if let Some(main) = &connections.main {
                return Some(main.clone());
            }
            if self.changed.wait_until(&mut connections, until).timed_out() {
                return None;
            }
        }
    }

    /// The return path of a source is accepted: wakes whoever waits for it.
    pub(super) fn accepted_return_path(&self) {
        // Whoever waits for it looks under the lock.
        drop(self.connections.lock());
        self.changed.notify_all();
    }
}
