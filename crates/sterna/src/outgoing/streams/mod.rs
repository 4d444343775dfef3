//! Devices' streams at the source: one save thread per device reads chunks, lanes write them.
//!
//! Where a peer understands it, chunks move while the guest still runs: the initial bytes at once, what changes in
//! them once a round. What remains is read when all devices have stopped, and save threads write it themselves. Without
//! multifd channels (the main channel alone, a file) the streams follow each other on the main channel: after RAM, or in
//! postcopy before the guest's pages follow it.
//!
//! A save thread calls its device only as far as the order of the moment ([`Order`]) lets it. The control thread, which
//! makes all other calls, waits until they have left their devices: so no call to a device meets another.

mod direct;
mod outbox;
mod saver;
mod serial;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_transport::{Address, Channel};
use sterna_wire::extension::{self, Features};
use sterna_wire::main::Command;

use super::main_channel::MainChannel;
use super::running_streams::RunningStreams;
use super::shared::Shared;
use super::waits::Waits;
use super::workers::Workers;
use crate::device_stream::RemainingState;
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::params::MigrationMode;
use crate::precopy::{LONGEST, StreamsRemaining};
use crate::stats::StreamStatistics;
use crate::streams::{Streamed, failed_in_parallel, in_parallel};
use crate::threads::caught;

use direct::Channels;
pub(super) use outbox::{Chunk, Outbox};

/// How old an answer to what a device has remaining may be.
const ASK_INTERVAL: Duration = Duration::from_millis(50);
/// So little need not be read once more while a device runs.
const LITTLE_BYTES: u64 = 1 << 20;
/// Less than this says nothing of a device's speed.
const TELLING_BYTES: u64 = 8 << 20;

/// The streams of one migration.
pub(super) struct Streams {
    devices: Vec<Streamed>,
    pub outbox: Outbox,
    channels: Channels,
    /// Chunks may move while the guest runs.
    while_running: bool,
    /// They follow each other on the main channel.
    is_serial: bool,
    state: Mutex<SaveThreads>,
    changed: Condvar,
}

struct SaveThreads {
    order: Order,
    savers: Vec<Progress>,
    /// When the order to finish was given.
    finish_began: Option<Instant>,
}

/// What save threads are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// The guest runs: read what has changed. Counted up once a round.
    Run(u64),
    /// Make no call until told otherwise.
    Park,
    /// The devices have stopped: read what remains.
    Finish,
    /// All is over.
    End,
}

/// What a save thread has done.
#[derive(Debug, Clone, Default)]
struct Progress {
    /// Inside a call to its device.
    is_calling: bool,
    is_done: bool,
    /// What remains, as of the device's last answer; `None` before the first.
    remaining: Option<RemainingState>,
    /// What could be read while the device ran was read once.
    is_tried: bool,
    /// The last time so much less was left than before that reading once more leaves less.
    is_shrinking: bool,
    /// Bytes per second that the device was seen to be read and loaded at, or that it expects.
    bytes_per_second: Option<u64>,
    /// By what it was seen: bytes, and the time that the device took for them on either side. Older ones count less.
    seen: (u64, Duration),
    statistics: StreamStatistics,
    point: Point,
}

/// How far a stream was read while its device ran.
#[derive(Debug, Clone, Copy, Default)]
struct Point {
    /// Index of the next chunk.
    next: u32,
    data_bytes: u64,
    /// The end of the initial bytes was told.
    initial_is_told: bool,
}

/// Streams of a session that was lost. Their devices go on saving.
pub(super) struct Suspended {
    devices: Vec<Streamed>,
    savers: Vec<Progress>,
    queues: Vec<outbox::Queue>,
}

impl Suspended {
    /// They do not go on.
    pub(super) fn end(&self, shared: &Shared) {
        end_saving(shared, &self.devices);
    }
}

impl Progress {
    /// What remains; `None` as long as nothing can be said of how long it takes: the device was not asked, or nobody has seen
    /// yet how fast it is, though much of it can be read while it runs.
    fn known_remaining(&self) -> Option<u64> {
        let remaining = self.remaining?;
        let will_tell = !self.is_tried && remaining.running_bytes() >= TELLING_BYTES;
        (self.bytes_per_second.is_some() || !will_tell).then(|| remaining.total_bytes())
    }
}

/// How chunks travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// In packets of the multifd channels; with credit if the peer grants it.
    Packets { has_credit: bool },
    /// One after the other on the main channel.
    Serial,
}

impl Streams {
    fn new(devices: Vec<Streamed>, way: Way, channels: Channels) -> Self {
        let has_credit = way == Way::Packets { has_credit: true };
        let savers = devices.iter().map(|device| Progress {
            statistics: StreamStatistics::of(&device.name, device.instance),
            ..Progress::default()
        });
        Self {
            state: Mutex::new(SaveThreads {
                order: Order::Run(0),
                savers: savers.collect(),
                finish_began: None,
            }),
            changed: Condvar::new(),
            outbox: Outbox::new(devices.len(), channels.count(), has_credit),
            channels,
            while_running: has_credit,
            is_serial: way == Way::Serial,
            devices,
        }
    }

    /// Goes on where the session before was lost.
    fn resumed(suspended: Suspended, channels: Channels) -> Self {
        let Suspended { devices, savers, queues } = suspended;
        let outbox = Outbox::resumed(queues, channels.count());
        let streams = Self::new(devices, Way::Packets { has_credit: true }, channels);
        streams.state.lock().savers = savers;
        Self { outbox, ..streams }
    }

    /// Where save thread `index` begins.
    fn point(&self, index: usize) -> Point {
        self.state.lock().savers[index].point
    }

    fn give(&self, order: Order) {
        let mut state = self.state.lock();
        if state.order != Order::End {
            state.order = order;
        }
        if order == Order::Finish {
            state.finish_began.get_or_insert_with(Instant::now);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Bytes that are still to be read, and how long reading them is expected to take; `None` before that is known of every
    /// device.
    fn remaining(&self, way: Way) -> Option<StreamsRemaining> {
        let state = self.state.lock();
        let remaining: Option<Vec<u64>> = state.savers.iter().map(Progress::known_remaining).collect();
        let remaining = remaining?;
        // What a device says of itself may be anything.
        let bytes = remaining.iter().copied().fold(0, u64::saturating_add);
        let times = state.savers.iter().zip(remaining).enumerate().map(|(index, (saver, bytes))| {
            let speed = saver.bytes_per_second.filter(|speed| *speed > 0);
            // What was sent and waits at the destination is loaded first.
            let bytes = bytes.saturating_add(self.outbox.unloaded(index));
            speed.map_or(0.0, |speed| bytes as f64 / speed as f64)
        });
        // In parallel the slowest counts, else all of them.
        let time = if self.is_serial { times.sum() } else { times.fold(0.0, f64::max) };
        Some(StreamsRemaining {
            bytes,
            slowest: Duration::from_secs_f64(time.min(LONGEST)),
            moves_in_downtime: way == Way::Serial,
        })
    }

    /// Waits for an order that lets a save thread work: the end, or another round than `round`. `None`: it is time to
    /// ask how much remains.
    fn await_order(&self, round: Option<u64>) -> Option<Order> {
        let mut state = self.state.lock();
        loop {
            let is_running = match state.order {
                Order::Park => false,
                Order::Run(number) if round == Some(number) => true,
                order => return Some(order),
            };
            let timeout = self.changed.wait_for(&mut state, ASK_INTERVAL);
            if timeout.timed_out() && is_running && matches!(state.order, Order::Run(_)) {
                return None;
            }
        }
    }

    /// Whether save thread `index` may make a call to its device now, and if so, whether the device runs. It must say
    /// when the call has returned.
    fn begin_call(&self, index: usize) -> Option<bool> {
        let mut state = self.state.lock();
        let runs = match state.order {
            Order::Run(_) => Some(true),
            Order::Finish => Some(false),
            Order::Park | Order::End => None,
        };
        state.savers[index].is_calling = runs.is_some();
        runs
    }

    /// Since the order to finish.
    fn finishing(&self) -> Duration {
        self.state.lock().finish_began.map(|began| began.elapsed()).unwrap_or_default()
    }

    fn is_read(&self, index: usize) -> bool {
        self.state.lock().savers[index].is_done
    }

    /// The call has returned. Whether somebody waits for that.
    fn end_call(&self, index: usize) -> bool {
        let mut state = self.state.lock();
        state.savers[index].is_calling = false;
        state.order == Order::Park
    }

    fn are_parked(&self) -> bool {
        let state = self.state.lock();
        state.order == Order::Park && state.savers.iter().all(|saver| !saver.is_calling)
    }

    fn are_read(&self) -> bool {
        self.state.lock().savers.iter().all(|saver| saver.is_done)
    }
}

impl RunningStreams for Streams {
    fn grant(&self, name: &str, instance: u32, bytes: u64) -> Result<(), MigrationError> {
        let device =
            self.devices.iter().position(|device| device.name == name && device.instance == instance);
        let Some(device) = device else {
            return Err(MigrationError::PeerIncompatible {
                what: format!(
                    "the destination has a device {name:?}, instance {instance}, with large state, but this side has \
                     not: give both machines the same devices"
                ),
            });
        };
        if !self.while_running {
            let what = format!("it grants room to {} without a request", self.devices[device]);
            return Err(MigrationError::PeerMisbehaved { what });
        }
        self.outbox.grant(device, bytes)
    }

    fn all_granted(&self) -> Result<(), MigrationError> {
        match self.outbox.without_grant() {
            Some(device) if self.while_running => Err(MigrationError::PeerIncompatible {
                what: format!(
                    "the destination has no counterpart with large state for {}: give both machines the same devices",
                    self.devices[device]
                ),
            }),
            _ => Ok(()),
        }
    }

    fn statistics(&self) -> Vec<StreamStatistics> {
        self.state.lock().savers.iter().map(|saver| saver.statistics.clone()).collect()
    }

    fn close(&self) {
        self.give(Order::End);
        self.outbox.close();
    }
}

/// The streams of a migration, as its control thread has them.
pub(super) struct DeviceStreams {
    shared: Arc<Shared>,
    streams: Arc<Streams>,
    way: Way,
    begin: Begin,
    /// Devices were stopped, or about to be.
    has_stopped: bool,
}

/// How the streams of a session begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// For the first time.
    First,
    /// Once more, after others were lost in the switchover.
    Anew,
    /// Where others were lost.
    GoOn,
}

impl DeviceStreams {
    /// The devices begin to save. `None`: no device has a stream.
    pub(super) fn begin(
        shared: &Arc<Shared>,
        channels: &[Arc<Channel>],
    ) -> Result<Option<Self>, MigrationError> {
        let devices = Streamed::of(&shared.vm.devices());
        if devices.is_empty() {
            return Ok(None);
        }
        let is_file = matches!(shared.to, Address::File { .. });
        let peer = shared.driver.inspect(sterna_proto::source::Source::peer);
        let has_credit = Features(peer.features).contains(Features::DEVICE_STREAMS);
        let way = match shared.capabilities.multifd && !is_file {
            true => Way::Packets { has_credit },
            false => Way::Serial,
        };
        let mut streams = Streams::new(devices, way, Channels::new(channels.to_vec()));
        streams.outbox = streams.outbox.keeping(shared.unconfirmed.get().is_some());
        Ok(Some(Self::with(shared, streams, way, Begin::First)))
    }

    /// In a session that takes the place of a lost one, of which these are left.
    pub(super) fn begin_again(
        shared: &Arc<Shared>,
        channels: &[Arc<Channel>],
        suspended: Option<Suspended>,
    ) -> Result<Option<Self>, MigrationError> {
        let Some(suspended) = suspended else {
            let anew = Self::begin(shared, channels)?;
            return Ok(anew.map(|streams| Self { begin: Begin::Anew, ..streams }));
        };
        let streams = Streams::resumed(suspended, Channels::new(channels.to_vec()));
        Ok(Some(Self::with(shared, streams, Way::Packets { has_credit: true }, Begin::GoOn)))
    }

    fn with(shared: &Arc<Shared>, streams: Streams, way: Way, begin: Begin) -> Self {
        let streams = Arc::new(streams);
        *shared.streams.lock() = Some(Arc::clone(&streams) as Arc<dyn RunningStreams>);
        Self { shared: Arc::clone(shared), streams, way, begin, has_stopped: false }
    }

    /// Starts the save threads.
    pub(super) fn start(&self, main: &MainChannel, workers: &mut Workers) -> Result<(), MigrationError> {
        if self.begin != Begin::GoOn {
            let hands_over = self.shared.params().mode == MigrationMode::CprTransfer;
            in_parallel(&self.streams.devices, "begin to save", |device| match hands_over {
                true => device.begin_hand_over(),
                false => device.begin_save(),
            })?;
        }
        if self.way == (Way::Packets { has_credit: true }) {
            let ping = match self.begin {
                Begin::First | Begin::GoOn => extension::DEVICE_STREAMS_PING,
                Begin::Anew => extension::STREAMS_ANEW_PING,
            };
            main.commands(&[Command::Ping(ping)])?;
        }
        for (index, device) in self.streams.devices.iter().cloned().enumerate() {
            let (shared, streams) = (Arc::clone(&self.shared), Arc::clone(&self.streams));
            workers.spawn(&format!("save {}", device.name), move || {
                saver::run(&shared, &streams, index, &device)
            })?;
        }
        Ok(())
    }

    /// The streams, if lanes carry them.
    pub(super) fn on_lanes(&self) -> Option<Arc<Streams>> {
        (self.way != Way::Serial).then(|| Arc::clone(&self.streams))
    }

    /// A round has begun: what changed in the devices meanwhile goes out with it.
    pub(super) fn enter_round(&self, number: u64) {
        if matches!(self.streams.state.lock().order, Order::Run(_)) {
            // The last round finds other orders.
            self.streams.give(Order::Run(number));
        }
    }

    /// vCPUs have stopped: quiesces all devices, then stops them. Every write of their DMA is to be found by a sync
    /// after this.
    pub(super) fn stop(&mut self, waits: &mut Waits) -> Result<(), MigrationError> {
        self.has_stopped = true;
        self.streams.give(Order::Park);
        match waits.until(|| self.streams.are_parked().then_some(())) {
            Ok(()) => {}
            // For whoever called: nothing was done to a device yet.
            Err(Break::Interrupted) => return Ok(()),
            Err(Break::Failed(error)) => return Err(error),
        }
        in_parallel(&self.streams.devices, "quiesce", |device| device.quiesce())?;
        in_parallel(&self.streams.devices, "stop", |device| device.stop())
    }

    /// A device of which more is worth reading while it runs: it was not read yet, or much less was left after the last time than
    /// before.
    pub(super) fn unread(&self) -> Option<String> {
        let state = self.streams.state.lock();
        let index = state.savers.iter().position(|saver| !saver.is_tried || saver.is_shrinking)?;
        Some(self.streams.devices[index].to_string())
    }

    /// Lets the save threads read what remains; it is sent beside the last pages, if any come.
    pub(super) fn finish(&self) {
        self.streams.give(Order::Finish);
    }

    /// Where lanes carry the streams: waits until all of them is with the lanes.
    pub(super) fn await_lanes(&self, waits: &mut Waits) -> Result<(), Break> {
        waits.until(|| (self.streams.are_read() && self.streams.outbox.is_empty()).then_some(()))
    }

    /// Where lanes do not carry them: sends them on the main channel, one device after the other.
    pub(super) fn send_in_turn(&self, waits: &mut Waits, main: &MainChannel) -> Result<(), Break> {
        serial::send(&self.streams, waits, main)
    }

    /// What remains of the streams; `None` before every device was asked.
    pub(super) fn remaining(&self) -> Option<StreamsRemaining> {
        self.streams.remaining(self.way)
    }

    /// The connection is lost; save threads have ended. What can go on over another one is left. Of a device that has stopped
    /// nothing is: what was read of it is not true any more when it runs again.
    pub(super) fn suspend(self) -> Option<Suspended> {
        // The destination may not have heard that the streams begin anew.
        let is_known = self.begin != Begin::Anew || self.streams.outbox.without_grant().is_none();
        if self.has_stopped || !is_known || self.way != (Way::Packets { has_credit: true }) {
            self.end();
            return None;
        }
        let mut savers = std::mem::take(&mut self.streams.state.lock().savers);
        for saver in &mut savers {
            (saver.is_calling, saver.is_done) = (false, false);
        }
        let queues = self.streams.outbox.take_queues();
        Some(Suspended { devices: self.streams.devices.clone(), savers, queues })
    }

    /// Nothing is read any more; save threads have ended.
    pub(super) fn end(self) {
        end_saving(&self.shared, &self.streams.devices);
    }
}

fn end_saving(shared: &Shared, devices: &[Streamed]) {
    if let Err(error) = in_parallel(devices, "end saving", |device| device.end_save()) {
        tracing::warn!(%error, "a device's stream");
        shared.tell(&crate::events::Event::Warning(error.to_string()));
    }
}

impl Shared {
    /// The guest runs on: so do its devices, before its vCPUs. One that is dead or hangs cannot: a guest without it is
    /// better off than one that stands still.
    pub(super) fn run_devices(&self) {
        let devices = caught("Vm::devices", || Streamed::of(&self.vm.devices()));
        let failed = match devices {
            Ok(devices) => failed_in_parallel(&devices, "run", |device| device.run()),
            Err(error) => vec![error],
        };
        for error in failed {
            let text = format!("the guest runs on without one of its devices: {error}");
            self.tell(&crate::events::Event::Warning(text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_whose_speed_nobody_has_seen_yet_is_waited_for() {
        let large = RemainingState { dirty_bytes: 1 << 30, ..RemainingState::default() };
        let asked = Progress { remaining: Some(large), ..Progress::default() };
        assert_eq!(asked.known_remaining(), None);
        let seen = Progress { bytes_per_second: Some(1 << 20), ..asked };
        assert_eq!(seen.known_remaining(), Some(1 << 30));
        let tried = Progress { remaining: Some(large), is_tried: true, ..Progress::default() };
        assert_eq!(tried.known_remaining(), Some(1 << 30), "it gave nothing while it ran");
        let stopped = RemainingState { stopped_bytes: 1 << 30, ..RemainingState::default() };
        let unreadable = Progress { remaining: Some(stopped), ..Progress::default() };
        assert_eq!(unreadable.known_remaining(), Some(1 << 30), "it can only be read in the pause");
        let small = RemainingState { initial_bytes: 100, ..RemainingState::default() };
        let quick = Progress { remaining: Some(small), ..Progress::default() };
        assert_eq!(quick.known_remaining(), Some(100));
    }
}
