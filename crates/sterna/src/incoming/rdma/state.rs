//! State of an `rdma:` destination in addition to its channel: connections and registered memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_transport::ByteStream as _;
use sterna_transport::rdma::Connection;
use sterna_wire::WireError;
use sterna_wire::rdma::{Admission, ChunkSize, ConnectReply, Introduction, Part};

use super::refusals::Refusals;
use super::windows::Windows;
use super::writers::Writers;
use crate::error::{MigrationError, RdmaDifference};
use crate::params::{Capabilities, Parameters};
use crate::rdma::{DestinationStream, LaneDestinationStream};
use crate::stats::IncomingRdmaStatistics;

/// Connections, registered memory and counters of an `rdma:` destination.
pub(in crate::incoming) struct Rdma {
    pub(super) chunk: ChunkSize,
    pub(super) pinned_limit_bytes: Option<u64>,
    connections: Mutex<Connections>,
    changed: Condvar,
    /// The registered guest memory.
    pub(super) windows: Mutex<Windows>,
    pub(super) refusals: Refusals,
    /// Number of questions that are being answered.
    pub(super) questions: AtomicUsize,
    pub(super) commands: AtomicU64,
    pub(super) zero_ranges: AtomicU64,
}

/// The connections of the current source. There is one source at a time.
struct Connections {
    admission: Admission,
    /// How many main connections were admitted so far. This number identifies the source of another connection.
    source: u64,
    /// The main connection, once it is accepted.
    main: Option<Arc<DestinationStream>>,
    /// Lanes that were accepted for that main connection.
    lanes: Vec<Arc<LaneDestinationStream>>,
    /// All connections with the right to write: the above, and those that are not accepted yet.
    writers: Writers,
    /// No connection of a migration is accepted any more.
    is_over: bool,
}

impl Rdma {
    pub(in crate::incoming) fn new(params: &Parameters, capabilities: &Capabilities) -> Self {
        // The source returns windows by their first chunk, so chunks must not be longer than windows below the
        // limit.
        let limit = params.rdma.pinned_limit_bytes;
        let chunk = limit.map_or(params.rdma.chunk, |limit| params.rdma.chunk.twice_within(limit));
        let lanes = if capabilities.multifd { params.multifd_channels } else { 0 };
        let admission = Admission::new(lanes, chunk).with_pinned_limit(limit);
        let connections = Connections {
            admission,
            source: 0,
            main: None,
            lanes: Vec::new(),
            writers: Writers::default(),
            is_over: false,
        };
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

    /// The main connection of the migration.
    pub(in crate::incoming) fn stream(&self) -> Result<Arc<DestinationStream>, MigrationError> {
        let gone = || MigrationError::Internal("there is no main connection over RDMA".to_owned());
        self.connections.lock().main.clone().ok_or_else(gone)
    }

    /// The introduction that a Sterna source sent when it connected.
    pub(in crate::incoming) fn introduction(&self) -> Option<Introduction> {
        self.connections.lock().admission.introduction()
    }

    /// Waits for the connection of the return path when the source opens it. The source requested that
    /// connection before the stream began.
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
        Err(RdmaDifference::ReturnPath.into())
    }

    /// Removes the source's right to write. When this returns, the source cannot write guest memory any more.
    /// Reports the connections that had to be closed for this.
    ///
    /// A connection that has ended has no right left, and is no error. Without a return path a source closes
    /// its connections when it has sent everything, and the guest is complete then.
    pub(in crate::incoming) fn end_writes(&self, tell: &dyn Fn(&str)) -> Result<(), MigrationError> {
        let main = self.stream()?;
        let (lanes, writers) = {
            let mut connections = self.connections.lock();
            (connections.lanes.clone(), connections.writers.end())
        };
        let endpoints = || [main.main()].into_iter().chain(lanes.iter().map(|lane| lane.endpoint()));
        let is_used =
            |writer: &Arc<dyn Connection>| endpoints().any(|end| Arc::ptr_eq(end.connection(), writer));
        // All data has arrived, so a connection that is not accepted yet carries nothing that is needed.
        writers.iter().filter(|writer| !is_used(writer)).for_each(|writer| writer.destroy());
        for endpoint in endpoints() {
            if let Err(error) = endpoint.end_remote_writes() {
                tell(&format!(
                    "the adapter refused to take the source's right to write away ({error}), so that connection was ended \
                     instead: nothing is written over it any more"
                ));
            }
        }
        Ok(())
    }

    /// Sends the source an error, if the source still receives.
    pub(in crate::incoming) fn say_error(&self) {
        if let Ok(stream) = self.stream() {
            stream.say_error();
        }
    }

    /// Destroys the queue pairs, and then deregisters all memory. This takes long for much memory.
    pub(in crate::incoming) fn close(&self) {
        let (main, lanes, writers) = {
            let mut connections = self.connections.lock();
            connections.is_over = true;
            let lanes = std::mem::take(&mut connections.lanes);
            (connections.main.take(), lanes, connections.writers.end())
        };
        self.changed.notify_all();
        if let Some(main) = main {
            main.destroy();
        }
        lanes.iter().for_each(|lane| lane.destroy());
        writers.iter().for_each(|writer| writer.destroy());
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
    /// Decides on a connect request by its private data alone: its purpose, and its source.
    pub(super) fn admit(
        &self,
        private_data: &[u8],
        is_migrating: bool,
    ) -> Result<(Part, ConnectReply, u64), WireError> {
        let mut connections = self.connections.lock();
        if !is_migrating && connections.main.as_ref().is_some_and(|main| main.peer_has_closed()) {
            // The source has closed its connection, and its greeter has not noticed yet.
            connections.admission.ended(Part::Main);
            connections.main = None;
            connections.lanes.clear();
            let source = connections.source;
            connections.writers.of(source).iter().for_each(|writer| writer.destroy());
        }
        let before = connections.admission.clone();
        let (part, reply) = connections.admission.request(private_data)?;
        let has_begun = connections.main.as_ref().is_some_and(|main| main.has_begun_phases());
        let is_over = connections.is_over || connections.writers.are_over();
        if part != Part::Question && (is_over || part == Part::ReturnPath && has_begun) {
            connections.admission = before;
            let rule = format!("{part}, and the migration has begun: it comes too late");
            return Err(WireError::incompatible("RDMA connect request", 8, "specs/rdma.md §2.4", rule));
        }
        if part == Part::Main {
            connections.source += 1;
        }
        Ok((part, reply, connections.source))
    }

    /// Frees the place of an admitted connection that ended before it was used. If it is the main connection,
    /// all others of its source end as well.
    pub(super) fn gone(&self, part: Part, source: u64) {
        let mut connections = self.connections.lock();
        if connections.source != source || connections.is_over {
            return;
        }
        connections.admission.ended(part);
        let (main, lanes, writers) = match part {
            Part::Main => {
                let lanes = std::mem::take(&mut connections.lanes);
                (connections.main.take(), lanes, connections.writers.of(source))
            }
            _ => (None, Vec::new(), Vec::new()),
        };
        drop(connections);
        self.changed.notify_all();
        if let Some(main) = main {
            main.destroy();
        }
        lanes.iter().for_each(|lane| lane.destroy());
        // Lanes that are not accepted yet: the next source must not inherit them.
        writers.iter().for_each(|writer| writer.destroy());
    }

    /// Registers a connection with the right to write, before it is connected. False: no further connection is
    /// allowed, or its source is gone.
    pub(super) fn enters(&self, source: u64, connection: &Arc<dyn Connection>) -> bool {
        let mut connections = self.connections.lock();
        let is_over = connections.is_over || connections.writers.are_over();
        if is_over || connections.source != source || !connections.admission.has(Part::Main) {
            return false;
        }
        connections.writers.enter(source, connection);
        true
    }

    /// Stores an accepted main connection. False: it came too late.
    pub(super) fn accepted_main(&self, source: u64, stream: Arc<DestinationStream>) -> bool {
        let mut connections = self.connections.lock();
        let is_wanted = connections.source == source && !connections.is_over;
        if is_wanted {
            connections.main = Some(stream);
        }
        self.changed.notify_all();
        is_wanted
    }

    /// Stores an accepted lane. False: it came too late.
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

    /// Wakes the thread that waits for a source's return path, after it was accepted.
    pub(super) fn accepted_return_path(&self) {
        // The waiting thread checks its condition under the lock, so taking the lock prevents a lost wake-up.
        drop(self.connections.lock());
        self.changed.notify_all();
    }
}
