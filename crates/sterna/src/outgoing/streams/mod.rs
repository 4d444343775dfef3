//! Device streams at the source: save threads read chunks, and lanes write them.
//!
//! There is one save thread per device.
//!
//! If the peer supports it, chunks are sent while the guest still runs: first the initial bytes, then the changes
//! once per round. The rest is read after all devices have stopped, and save threads write it themselves. Without
//! multifd channels (the main channel alone, or a file) the streams follow each other on the main channel. They
//! come after RAM, or in postcopy before the pages that follow the guest.
//!
//! A save thread calls its device only as the present [`Order`] permits. The control thread makes all other
//! calls. It waits until no save thread is inside a call, so that two calls to a device never overlap.

mod direct;
mod outbox;
mod saver;
mod serial;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_transport::Channel;
use sterna_wire::extension::{self, Features};
use sterna_wire::main::Command;

use super::main_channel::MainChannel;
use super::running_streams::RunningStreams;
use super::shared::Shared;
use super::waits::Waits;
use super::workers::Workers;
use crate::device_stream::RemainingState;
use crate::error::{BadGrant, MachineDifference, MigrationError};
use crate::interruption::Break;
use crate::params::MigrationMode;
use crate::precopy::{LONGEST, StreamsRemaining};
use crate::stats::StreamStatistics;
use crate::streams::{Streamed, failed_in_parallel, in_parallel};
use crate::threads::{ThreadRole, caught};

use direct::Channels;
pub(super) use outbox::{Chunk, Outbox};

/// The longest age of a device's answer about its remaining bytes.
const ASK_INTERVAL: Duration = Duration::from_millis(50);
/// A device with less than this remaining need not be read again while it runs.
const LITTLE_BYTES: u64 = 1 << 20;
/// Fewer bytes do not show a device's speed.
const TELLING_BYTES: u64 = 8 << 20;

/// The device streams of one migration.
pub(super) struct Streams {
    devices: Vec<Streamed>,
    pub outbox: Outbox,
    channels: Channels,
    /// Whether chunks may be sent while the guest runs.
    while_running: bool,
    /// Whether the streams follow each other on the main channel.
    is_serial: bool,
    state: Mutex<SaveThreads>,
    changed: Condvar,
}

struct SaveThreads {
    order: Order,
    savers: Vec<Progress>,
    /// The time at which the order to finish was given.
    finish_began: Option<Instant>,
}

/// The work that save threads are ordered to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// The guest runs: read the changes. The number increases once per round.
    Run(u64),
    /// Make no call until the next order.
    Park,
    /// The devices have stopped: read the rest.
    Finish,
    /// End the save thread.
    End,
}

/// The progress of a save thread.
#[derive(Debug, Clone, Default)]
struct Progress {
    /// The thread is inside a call to its device.
    is_calling: bool,
    is_done: bool,
    /// The remaining bytes in the device's last answer; `None` before the first.
    remaining: Option<RemainingState>,
    /// The bytes that could be read while the device ran were read once.
    is_tried: bool,
    /// The last reading left so much less that a further reading pays off.
    is_shrinking: bool,
    /// Bytes per second of reading and loading, measured or as the device expects.
    bytes_per_second: Option<u64>,
    /// The measurement: bytes, and the time that the device took on either side. Older values have less weight.
    seen: (u64, Duration),
    statistics: StreamStatistics,
    point: Point,
}

/// The position up to which a stream was read while its device ran.
#[derive(Debug, Clone, Copy, Default)]
struct Point {
    /// The index of the next chunk.
    next: u32,
    data_bytes: u64,
    /// The end of the initial bytes was sent.
    initial_is_told: bool,
}

/// Streams of a session that was lost. Their devices continue to save.
#[cfg(feature = "reconnect")]
pub(super) struct Suspended {
    devices: Vec<Streamed>,
    savers: Vec<Progress>,
    queues: Vec<outbox::Queue>,
}

#[cfg(feature = "reconnect")]
impl Suspended {
    /// Ends saving: the streams do not continue in another session.
    pub(super) fn end(&self, shared: &Shared) {
        end_saving(shared, &self.devices);
    }
}

impl Progress {
    /// The remaining bytes; `None` as long as their time cannot be estimated.
    ///
    /// That is so if the device was not asked yet, or if its speed is unknown although many bytes can be read
    /// while it runs.
    fn known_remaining(&self) -> Option<u64> {
        let remaining = self.remaining?;
        let will_tell = !self.is_tried && remaining.running_bytes() >= TELLING_BYTES;
        (self.bytes_per_second.is_some() || !will_tell).then(|| remaining.total_bytes())
    }
}

/// How chunks are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// In packets of the multifd channels, with credit if the peer grants it.
    Packets { has_credit: bool },
    /// One stream after the other on the main channel.
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

    /// The streams of a new session, which continue from the lost session.
    #[cfg(feature = "reconnect")]
    fn resumed(suspended: Suspended, channels: Channels) -> Self {
        let Suspended { devices, savers, queues } = suspended;
        let outbox = Outbox::resumed(queues, channels.count());
        let streams = Self::new(devices, Way::Packets { has_credit: true }, channels);
        streams.state.lock().savers = savers;
        Self { outbox, ..streams }
    }

    /// The position at which save thread `index` begins.
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

    /// The unread bytes, and the expected time for them; `None` before both are known.
    fn remaining(&self, way: Way) -> Option<StreamsRemaining> {
        let state = self.state.lock();
        let remaining: Option<Vec<u64>> = state.savers.iter().map(Progress::known_remaining).collect();
        let remaining = remaining?;
        // A device may report any number, so the sum must not overflow.
        let bytes = remaining.iter().copied().fold(0, u64::saturating_add);
        let times = state.savers.iter().zip(remaining).enumerate().map(|(index, (saver, bytes))| {
            let speed = saver.bytes_per_second.filter(|speed| *speed > 0);
            // The destination first loads the bytes that it has received already.
            let bytes = bytes.saturating_add(self.outbox.unloaded(index));
            speed.map_or(0.0, |speed| bytes as f64 / speed as f64)
        });
        // In parallel the slowest stream counts, otherwise the sum of all.
        let time = if self.is_serial { times.sum() } else { times.fold(0.0, f64::max) };
        Some(StreamsRemaining {
            bytes,
            slowest: Duration::from_secs_f64(time.min(LONGEST)),
            moves_in_downtime: way == Way::Serial,
        })
    }

    /// Waits for an order to work: the end, or another round than `round`.
    ///
    /// `None`: it is time to ask the device for its remaining bytes.
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

    /// Begins a call of save thread `index` to its device, if one is permitted now. Gives whether the device
    /// runs.
    ///
    /// The thread calls [`Streams::end_call`] after the call has returned.
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

    /// The time since the order to finish.
    fn finishing(&self) -> Duration {
        self.state.lock().finish_began.map(|began| began.elapsed()).unwrap_or_default()
    }

    fn is_read(&self, index: usize) -> bool {
        self.state.lock().savers[index].is_done
    }

    /// Ends a call. Gives whether a thread waits for that.
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
            return Err(MachineDifference::StreamOnlyThere { device: name.to_owned(), instance }.into());
        };
        if !self.while_running {
            return Err(BadGrant::Unasked { device: name.to_owned(), instance }.into());
        }
        self.outbox.grant(device, bytes)
    }

    fn all_granted(&self) -> Result<(), MigrationError> {
        match self.outbox.without_grant() {
            Some(device) if self.while_running => {
                let Streamed { name, instance, .. } = &self.devices[device];
                let (device, instance) = (name.clone(), *instance);
                Err(MachineDifference::StreamOnlyHere { device, instance }.into())
            }
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

/// The streams of a migration, for its control thread.
pub(super) struct DeviceStreams {
    shared: Arc<Shared>,
    streams: Arc<Streams>,
    way: Way,
    begin: Begin,
    /// The devices were stopped, or are about to be.
    has_stopped: bool,
}

/// How the streams of a session begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// The streams begin for the first time.
    First,
    /// The streams begin again from their beginning, after they were lost in the switchover.
    #[cfg(feature = "reconnect")]
    Anew,
    /// The streams continue at the position at which they were lost.
    GoOn,
}

impl DeviceStreams {
    /// Begins saving at all devices. `None`: no device has a stream.
    pub(super) fn begin(
        shared: &Arc<Shared>,
        channels: &[Arc<Channel>],
    ) -> Result<Option<Self>, MigrationError> {
        let devices = Streamed::of(&shared.guest.vm.devices());
        if devices.is_empty() {
            return Ok(None);
        }
        let takes_packets = shared.session.facts.takes_device_packets;
        let peer = shared.driver.inspect(sterna_proto::source::Source::peer);
        let has_credit = Features(peer.features).contains(Features::DEVICE_STREAMS);
        let way = match shared.capabilities.multifd && takes_packets {
            true => Way::Packets { has_credit },
            false => Way::Serial,
        };
        let mut streams = Streams::new(devices, way, Channels::new(channels.to_vec()));
        streams.outbox = streams.outbox.keeping(shared.reconnection.confirms_rounds());
        Ok(Some(Self::with(shared, streams, way, Begin::First)))
    }

    /// Begins the streams of a session that replaces a lost one.
    ///
    /// They continue with the rest of the lost streams.
    #[cfg(feature = "reconnect")]
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
        *shared.session.streams.lock() = Some(Arc::clone(&streams) as Arc<dyn RunningStreams>);
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
                #[cfg(feature = "reconnect")]
                Begin::Anew => extension::STREAMS_ANEW_PING,
            };
            main.commands(&[Command::Ping(ping)])?;
        }
        for (index, device) in self.streams.devices.iter().cloned().enumerate() {
            let (shared, streams) = (Arc::clone(&self.shared), Arc::clone(&self.streams));
            workers.spawn(ThreadRole::SaveDevice.of(&device.name), move || {
                saver::run(&shared, &streams, index, &device)
            })?;
        }
        Ok(())
    }

    /// The streams, if lanes send them.
    pub(super) fn on_lanes(&self) -> Option<Arc<Streams>> {
        (self.way != Way::Serial).then(|| Arc::clone(&self.streams))
    }

    /// Call it at the begin of a round: the devices' changes are sent with it.
    pub(super) fn enter_round(&self, number: u64) {
        if matches!(self.streams.state.lock().order, Order::Run(_)) {
            // The last round has other orders.
            self.streams.give(Order::Run(number));
        }
    }

    /// Quiesces all devices, then stops them. vCPUs have stopped before.
    ///
    /// A later sync finds every write of the devices' DMA.
    pub(super) fn stop(&mut self, waits: &mut Waits) -> Result<(), MigrationError> {
        self.has_stopped = true;
        self.streams.give(Order::Park);
        match waits.until(|| self.streams.are_parked().then_some(())) {
            Ok(()) => {}
            // The caller handles the interruption. No call to a device was made yet.
            Err(Break::Interrupted) => return Ok(()),
            Err(Break::Failed(error)) => return Err(error),
        }
        in_parallel(&self.streams.devices, "quiesce", |device| device.quiesce())?;
        in_parallel(&self.streams.devices, "stop", |device| device.stop())
    }

    /// A device that is worth reading again while it runs; `None` if there is none.
    ///
    /// It was not read yet, or its last reading left much less than the one before.
    #[cfg(feature = "postcopy")]
    pub(super) fn unread(&self) -> Option<String> {
        let state = self.streams.state.lock();
        let index = state.savers.iter().position(|saver| !saver.is_tried || saver.is_shrinking)?;
        Some(self.streams.devices[index].to_string())
    }

    /// Orders the save threads to read the rest. It is sent in parallel with the last pages, if there are any.
    pub(super) fn finish(&self) {
        self.streams.give(Order::Finish);
    }

    /// Waits until lanes have written all of the streams, if lanes send them.
    pub(super) fn await_lanes(&self, waits: &mut Waits) -> Result<(), Break> {
        waits.until(|| (self.streams.are_read() && self.streams.outbox.is_empty()).then_some(()))
    }

    /// Sends the streams in turn on the main channel, if lanes do not send them.
    pub(super) fn send_in_turn(&self, waits: &mut Waits, main: &MainChannel) -> Result<(), Break> {
        serial::send(&self.streams, waits, main)
    }

    /// The bytes of the streams that delay the stop; `None` before every device has answered.
    pub(super) fn remaining(&self) -> Option<StreamsRemaining> {
        if self.shared.session.facts.stores {
            // A stored guest stays stopped, and its streams are read only then: the stop gains nothing by a delay.
            return Some(StreamsRemaining::default());
        }
        self.streams.remaining(self.way)
    }

    /// Ends the streams of a lost session. Gives the part that can continue in another one.
    ///
    /// Save threads have ended. Nothing of a stopped device can continue: its data become outdated when the
    /// device runs again.
    #[cfg(feature = "reconnect")]
    pub(super) fn suspend(self) -> Option<Suspended> {
        // The destination may not have received the message that the streams begin again.
        let is_known = self.begin != Begin::Anew || self.streams.outbox.without_grant().is_none();
        let can_go_on = is_known && self.streams.outbox.keeps_all();
        if self.has_stopped || !can_go_on || self.way != (Way::Packets { has_credit: true }) {
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

    /// Ends saving at all devices. Save threads have ended.
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
    /// Resumes the devices, before the vCPUs. A device that does not respond cannot resume.
    ///
    /// The guest then runs without it, which is better than a guest that stays paused.
    pub(super) fn run_devices(&self) {
        let devices = caught("Vm::devices", || Streamed::of(&self.guest.vm.devices()));
        let failed = match devices {
            Ok(devices) => failed_in_parallel(&devices, "run", |device| device.run()),
            Err(error) => vec![error],
        };
        for error in failed {
            let text = format!("the guest continues to run without one of its devices: {error}");
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
