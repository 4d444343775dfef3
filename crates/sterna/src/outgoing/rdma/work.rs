//! State that the threads of a source over RDMA share.
//!
//! It consists of the registrations of both sides, and the pending work.

mod on_demand;
mod packets;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use sterna_ram::GuestRam;
use sterna_transport::rdma::{RdmaError, Registration, Write};
use sterna_wire::rdma::{
    self, BlockRange, ChunkProbe, ChunkSize, Destination, Lookahead, MOST_REPEATED, PlanLimits,
    RegistrationPlan, Step, next_write,
};

use super::gather::{Ranges, SHORT_ZEROS};
use super::source::{Peer, RdmaSource};
use super::used_blocks::UsedBlocks;
use crate::error::MigrationError;

/// The longest sleep of a thread, in case a wake-up was missed.
const PATIENCE: Duration = Duration::from_millis(100);
/// The least zero ranges in one message to a Sterna, before a round's end.
const ZEROS_AT_ONCE: usize = MOST_REPEATED as usize / 4;

/// Registrations and WRITEs of one migration, shared by its threads.
pub(in crate::outgoing) struct Work {
    pub(super) rdma: Arc<RdmaSource>,
    pub(super) ram: GuestRam,
    used: UsedBlocks,
    state: Mutex<State>,
    /// Wakes the lane. The next two wake the thread that sends commands and the thread that registers memory.
    lane: Condvar,
    asker: Condvar,
    memory: Condvar,
}

pub(super) struct State {
    /// The plan for this side's memory.
    own: Lookahead,
    registrations: BTreeMap<(usize, u64), Registration>,
    /// The plan for the destination's memory.
    remote: Remote,
    /// Registered windows of the destination: keys and lengths. The plan may already name further windows.
    keys: BTreeMap<(usize, u64), (u32, u64)>,
    /// The unit in which requests name windows.
    unit: ChunkSize,
    zeros: VecDeque<BlockRange>,
    /// All zero ranges are to be sent, also if there are few.
    is_last_zeros: bool,
    was_clearing: bool,
    /// A phase is open, and is not about to end.
    may_ask: bool,
    is_asking: bool,
    is_over: bool,
    failure: Option<MigrationError>,
}

enum Remote {
    /// The chunk size of a QEMU is not known yet. The runs wait until it is.
    Probing(ChunkProbe, Vec<BlockRange>),
    Known(Lookahead),
}

/// A command for the destination.
pub(super) enum Task {
    /// Request this range, to learn the destination's chunk size.
    Probe(BlockRange),
    Register(Vec<BlockRange>),
    GiveBack(Vec<BlockRange>),
    Clear(Vec<BlockRange>),
}

impl Work {
    /// The state of a new migration, without registrations.
    pub(in crate::outgoing) fn new(
        rdma: Arc<RdmaSource>,
        ram: &GuestRam,
        warn: impl Fn(String) + Send + Sync + 'static,
    ) -> Result<Arc<Self>, MigrationError> {
        let used = UsedBlocks::new(&rdma, ram, warn);
        let blocks: Vec<u64> = ram.blocks().iter().map(|block| block.len_bytes()).collect();
        let plan = |destination, own_chunk, pinned| {
            let most_message = u64::from(rdma.adapter().max_message_bytes());
            let limits = PlanLimits { own_chunk, most_message, pinned };
            let plan = RegistrationPlan::new(&blocks, destination, limits);
            plan.map_err(MigrationError::wire("RDMA memory"))
        };
        let own = plan(Destination::Sterna(rdma.chunk), rdma.chunk, own_limit(&rdma, used.may_follow())?)?;
        let ahead = |plan| Lookahead::new(plan, Lookahead::MOST_AHEAD);
        let mut unit = ChunkSize::LEAST;
        let remote = match (rdma.registration, rdma.peer) {
            (rdma::Registration::PinAll, _) => {
                rdma.counts.destination_pins(blocks.iter().sum());
                Remote::Known(ahead(plan(Destination::PinAll, rdma.chunk, None)?))
            }
            (_, Peer::Qemu) => Remote::Probing(ChunkProbe::new(&blocks), Vec::new()),
            (_, Peer::Sterna(chunk)) => {
                unit = chunk;
                // A window that is given back must begin at a destination's chunk that no other window uses. The
                // destination's chunks are small enough for its own limit.
                let of_source = rdma.pinned_limit.map(|limit| limit.max(2 * chunk.bytes()));
                let limit = of_source.into_iter().chain(rdma.destination_limit).min();
                let grid = if limit.is_some() { chunk } else { rdma.chunk };
                Remote::Known(ahead(plan(Destination::Sterna(chunk), grid, limit)?))
            }
        };
        let state = State {
            own: ahead(own),
            registrations: BTreeMap::new(),
            remote,
            keys: BTreeMap::new(),
            unit,
            zeros: VecDeque::new(),
            is_last_zeros: false,
            was_clearing: false,
            may_ask: false,
            is_asking: false,
            is_over: false,
            failure: None,
        };
        let (lane, asker, memory) = (Condvar::new(), Condvar::new(), Condvar::new());
        Ok(Arc::new(Self { rdma, ram: ram.clone(), used, state: Mutex::new(state), lane, asker, memory }))
    }

    /// The locked state, or the error if a thread has failed.
    pub(super) fn state(&self) -> Result<MutexGuard<'_, State>, MigrationError> {
        let state = self.state.lock();
        match &state.failure {
            Some(error) => Err(error.clone()),
            None => Ok(state),
        }
    }

    /// Adds ranges that are to be sent. Gives the bytes of data.
    pub(super) fn add(&self, ranges: &mut Ranges) -> Result<u64, MigrationError> {
        if ranges.data.is_empty() && ranges.zeros.is_empty() {
            return Ok(0);
        }
        self.use_blocks(&ranges.data);
        let mut state = self.state()?;
        for zeros in ranges.zeros.drain(..) {
            let is_short = !zeros.is_absent && zeros.range.length <= SHORT_ZEROS;
            if self.rdma.peer == Peer::Qemu && is_short && state.is_registered(&zeros.range) {
                ranges.data.push(zeros.range);
            } else {
                state.zeros.push_back(zeros.range);
            }
        }
        let bytes = ranges.data.iter().map(|range| range.length).sum();
        state.add(&ranges.data)?;
        ranges.data.clear();
        self.wake(state);
        Ok(bytes)
    }

    /// The next WRITEs whose memory is registered on both sides, and their bytes.
    ///
    /// Gives at most `most` WRITEs of at most `most_bytes`.
    pub(super) fn next_writes(
        &self,
        most_bytes: u64,
        most: usize,
    ) -> Result<(Vec<Write>, u64), MigrationError> {
        let places = self.rdma.places()?;
        let mut state = self.state()?;
        let (mut writes, mut bytes) = (Vec::new(), 0);
        while bytes < most_bytes && writes.len() < most {
            let State { own, remote: Remote::Known(remote), .. } = &mut *state else { break };
            let Some(range) = next_write(own, remote, most_bytes - bytes) else { break };
            let write = state.write(range, self.rdma.registration, places);
            writes.push(write.ok_or_else(|| {
                MigrationError::Internal(format!("{range:?} is to be written and is not registered"))
            })?);
            bytes += range.length;
        }
        Ok((writes, bytes))
    }

    /// The next command, without waiting, after the last one has been carried out. `None`: there is none now.
    pub(super) fn task_at_once(&self) -> Option<Task> {
        let mut state = self.state.lock();
        if state.is_over || state.failure.is_some() {
            return None;
        }
        let task = state.pick(self.rdma.is_sterna());
        state.is_asking = task.is_some();
        task
    }

    /// Records that `writes` WRITEs are complete. Gives their bytes.
    pub(super) fn written(&self, writes: usize) -> Result<u64, MigrationError> {
        let wire = MigrationError::wire("RDMA memory");
        let mut state = self.state()?;
        let mut bytes = 0;
        for _ in 0..writes {
            bytes += state.own.written().map_err(&wire)?.length;
            if let Remote::Known(remote) = &mut state.remote {
                remote.written().map_err(&wire)?;
            }
        }
        self.wake(state);
        Ok(bytes)
    }

    /// Waits for the next command to the destination. `None`: no more will follow.
    pub(super) fn next_task(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if state.is_asking {
                state.is_asking = false;
                self.lane.notify_all();
            }
            if state.is_over || state.failure.is_some() {
                return None;
            }
            let task = if state.may_ask { state.pick(self.rdma.is_sterna()) } else { None };
            if task.is_some() {
                state.is_asking = true;
                return task;
            }
            self.asker.wait_for(&mut state, PATIENCE);
        }
    }

    /// Waits for the next step with this side's memory. `None`: no more will follow.
    pub(super) fn next_own_step(&self) -> Option<Step> {
        let mut state = self.state.lock();
        loop {
            if state.is_over || state.failure.is_some() {
                return None;
            }
            match state.own.next_step(1) {
                Step::Wait => self.memory.wait_for(&mut state, PATIENCE),
                step => return Some(step),
            };
        }
    }

    /// Records that a window of this side's memory is registered.
    pub(super) fn registered(
        &self,
        window: BlockRange,
        registration: Registration,
    ) -> Result<(), MigrationError> {
        let mut state = self.state()?;
        state.registrations.insert((window.block, window.start), registration);
        state.own.registered(1).map_err(MigrationError::wire("RDMA memory"))?;
        self.wake(state);
        self.lane.notify_all();
        Ok(())
    }

    /// Removes windows of this side's memory that are to be deregistered. Gives their registrations.
    pub(super) fn given_back(&self, windows: &[BlockRange]) -> Result<Vec<Registration>, MigrationError> {
        let mut state = self.state()?;
        let registrations =
            windows.iter().filter_map(|window| state.registrations.remove(&(window.block, window.start)));
        Ok(registrations.collect())
    }

    /// Updates the state of the destination's memory, and wakes the threads that can work then.
    pub(super) fn learn(
        &self,
        change: impl FnOnce(&mut State) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let mut state = self.state()?;
        change(&mut state)?;
        self.wake(state);
        self.lane.notify_all();
        Ok(())
    }

    /// Records the failure of a thread, so that the others end.
    pub(super) fn fail(&self, error: MigrationError) {
        self.state.lock().failure.get_or_insert(error);
        self.wake_all();
    }

    /// Ends the threads, because no more pages follow. Registered memory stays registered.
    pub(super) fn end(&self) {
        self.state.lock().is_over = true;
        self.wake_all();
    }

    fn wake_all(&self) {
        for condvar in [&self.lane, &self.asker, &self.memory] {
            condvar.notify_all();
        }
    }

    /// Permits commands (a phase is open) or stops them (it is about to end). Gives whether one is being carried
    /// out.
    pub(super) fn let_ask(&self, may_ask: bool) -> Result<bool, MigrationError> {
        let mut state = self.state()?;
        state.may_ask = may_ask;
        if may_ask {
            self.asker.notify_all();
        }
        Ok(state.is_asking)
    }

    /// Sets whether all zero ranges are to be sent, also if there are few.
    pub(super) fn send_all_zeros(&self, all: bool) -> Result<(), MigrationError> {
        self.state()?.is_last_zeros = all;
        self.asker.notify_all();
        Ok(())
    }

    /// Waits for a change, or for a short time. Returns immediately if a WRITE can be posted.
    pub(super) fn wait(&self, mut state: MutexGuard<'_, State>) {
        if !state.may_write() {
            self.lane.wait_for(&mut state, PATIENCE);
        }
    }

    /// Wakes the threads that send commands and register memory, if they have work.
    fn wake(&self, state: MutexGuard<'_, State>) {
        let may_ask = state.may_ask && !state.is_asking && state.has_task(self.rdma.is_sterna());
        let may_register = state.own.has_step();
        drop(state);
        if may_ask {
            self.asker.notify_one();
        }
        if may_register {
            self.memory.notify_one();
        }
    }
}

impl State {
    /// Adds runs of pages that are to be written.
    pub(super) fn add(&mut self, runs: &[BlockRange]) -> Result<(), MigrationError> {
        let wire = MigrationError::wire("RDMA memory");
        self.own.add(runs.iter().copied()).map_err(&wire)?;
        match &mut self.remote {
            Remote::Known(remote) => remote.add(runs.iter().copied()).map_err(&wire),
            Remote::Probing(_, waiting) => {
                waiting.extend(runs);
                Ok(())
            }
        }
    }

    /// Whether all added ranges have been written, and all zero ranges have been sent.
    pub(super) fn is_done(&self) -> bool {
        let is_written = match &self.remote {
            Remote::Probing(_, runs) => runs.is_empty(),
            Remote::Known(remote) => remote.is_done(),
        };
        is_written && self.own.is_done() && self.zeros.is_empty() && !self.is_asking
    }

    /// Whether the next WRITE can be posted.
    fn may_write(&self) -> bool {
        let is_ready = |remote: &Lookahead| self.own.ready().is_some() && remote.ready().is_some();
        matches!(&self.remote, Remote::Known(remote) if is_ready(remote))
    }

    /// The number of zero ranges that wait.
    pub(super) fn waiting_zeros(&self) -> usize {
        self.zeros.len()
    }

    /// The unit in which requests name windows.
    pub(super) fn unit(&self) -> ChunkSize {
        self.unit
    }

    /// Records the key in the destination's answer to a probe. The last answer determines the windows of the
    /// plan.
    pub(super) fn probed(
        &mut self,
        key: u32,
        rdma: &RdmaSource,
        ram: &GuestRam,
    ) -> Result<(), MigrationError> {
        let Remote::Probing(probe, runs) = &mut self.remote else { return Ok(()) };
        probe.answered(key);
        self.unit = probe.unit();
        if probe.next_ask().is_some() {
            return Ok(());
        }
        let blocks: Vec<u64> = ram.blocks().iter().map(|block| block.len_bytes()).collect();
        let most_message = u64::from(rdma.adapter().max_message_bytes());
        let limits = PlanLimits { own_chunk: rdma.chunk, most_message, pinned: None };
        let plan = RegistrationPlan::new(&blocks, Destination::Qemu(self.unit.window()), limits);
        let mut plan = plan.map_err(MigrationError::wire("RDMA memory"))?;
        rdma.qemu_chunk.set(self.unit).ok();
        for (window, key) in probe.windows() {
            rdma.counts.window(window.length);
            plan.registered(window);
            self.keys.insert((window.block, window.start), (key, window.length));
        }
        let mut remote = Lookahead::new(plan, Lookahead::MOST_AHEAD);
        remote.add(runs.drain(..)).map_err(MigrationError::wire("RDMA memory"))?;
        self.remote = Remote::Known(remote);
        Ok(())
    }

    /// Records the keys of windows that the destination has registered.
    pub(super) fn granted(&mut self, windows: &[BlockRange], keys: &[u32]) -> Result<(), MigrationError> {
        for (window, key) in windows.iter().zip(keys) {
            self.keys.insert((window.block, window.start), (*key, window.length));
        }
        match &mut self.remote {
            Remote::Known(remote) => {
                remote.registered(windows.len()).map_err(MigrationError::wire("RDMA memory"))
            }
            Remote::Probing(..) => Ok(()),
        }
    }

    /// Removes windows that the destination has deregistered.
    pub(super) fn taken_back(&mut self, windows: &[BlockRange]) {
        for window in windows {
            self.keys.remove(&(window.block, window.start));
        }
    }

    fn is_registered(&self, range: &BlockRange) -> bool {
        self.key(range).is_some()
    }

    /// The key of the window that contains this range.
    fn key(&self, range: &BlockRange) -> Option<u32> {
        let (&(_, start), &(key, length)) = before(&self.keys, range)?;
        (range.end() <= start + length).then_some(key)
    }

    /// How many bytes of a range one WRITE can carry.
    ///
    /// A WRITE must stay within one registration of each side.
    fn one_write(&self, range: &BlockRange) -> u64 {
        let of_own = self.own.plan().window(range.block, range.start);
        let of_remote = match &self.remote {
            Remote::Known(remote) => remote.plan().window(range.block, range.start),
            Remote::Probing(..) => None,
        };
        let ends = [of_own, of_remote].into_iter().flatten().map(|window| window.end());
        ends.min().map_or(range.length, |end| end.saturating_sub(range.start))
    }

    fn write(
        &self,
        range: BlockRange,
        registration: rdma::Registration,
        places: &rdma::BlockPlaces,
    ) -> Option<Write> {
        let (&(_, start), own) = before(&self.registrations, &range)?;
        let from = own.piece((range.start - start) as usize, u32::try_from(range.length).ok()?)?;
        let rkey = match registration {
            rdma::Registration::PinAll => places.blocks().get(range.block)?.key,
            rdma::Registration::Dynamic => self.key(&range)?,
        };
        Some(Write { from, address: places.address(range).ok()?, rkey })
    }

    /// Whether a command is to be sent.
    fn has_task(&self, is_sterna: bool) -> bool {
        let has_window = match &self.remote {
            Remote::Probing(_, runs) => !runs.is_empty(),
            Remote::Known(remote) => remote.has_step(),
        };
        has_window || self.zeros.len() >= self.least_zeros(is_sterna)
    }

    /// The least number of zero ranges in a message.
    fn least_zeros(&self, is_sterna: bool) -> usize {
        if is_sterna && !self.is_last_zeros { ZEROS_AT_ONCE } else { 1 }
    }

    /// The next command. Windows and zero ranges alternate, so that neither delays the other.
    fn pick(&mut self, is_sterna: bool) -> Option<Task> {
        let may_clear = self.zeros.len() >= self.least_zeros(is_sterna);
        if (!may_clear || self.was_clearing)
            && let Some(task) = self.next_window(is_sterna)
        {
            self.was_clearing = false;
            return Some(task);
        }
        self.was_clearing = may_clear;
        may_clear.then(|| {
            let most = if is_sterna { MOST_REPEATED as usize } else { 1 };
            let count = self.zeros.len().min(most);
            Task::Clear(self.zeros.drain(..count).collect())
        })
    }

    fn next_window(&mut self, is_sterna: bool) -> Option<Task> {
        let most = if is_sterna { MOST_REPEATED as usize } else { 1 };
        match &mut self.remote {
            Remote::Probing(probe, runs) => probe.next_ask().filter(|_| !runs.is_empty()).map(Task::Probe),
            Remote::Known(remote) => match remote.next_step(most) {
                Step::Register(windows) => Some(Task::Register(windows)),
                Step::GiveBack(windows) => Some(Task::GiveBack(windows)),
                Step::Wait => None,
            },
        }
    }
}

/// The last entry that begins at or before the range, in its block.
fn before<'a, T>(
    map: &'a BTreeMap<(usize, u64), T>,
    range: &BlockRange,
) -> Option<(&'a (usize, u64), &'a T)> {
    map.range((range.block, 0)..=(range.block, range.start)).next_back()
}

/// The most bytes of this side's memory that may be pinned at the same time.
///
/// The limit is the smaller of the operator's and the process's limit. Windows are given back below a limit, so a
/// small limit only reduces speed. An adapter that may work without pinning is not refused here.
fn own_limit(rdma: &RdmaSource, may_follow: bool) -> Result<Option<u64>, MigrationError> {
    let locked = rdma.adapter().locked_memory();
    let Some(limit) = locked.limit_bytes else { return Ok(rdma.pinned_limit) };
    let (pinned, least) = (locked.pinned_bytes, 2 * ChunkSize::LEAST.bytes());
    let mut room = limit.saturating_sub(pinned);
    if may_follow {
        room = room.max(least);
    }
    if room < least {
        let error = RdmaError::LockedMemory { wanted: least, pinned, limit };
        return Err(rdma.failed()(error.into()));
    }
    Ok(Some(rdma.pinned_limit.map_or(room, |wanted| wanted.min(room))))
}
