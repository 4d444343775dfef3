//! Devices' streams at the source: one save thread per device reads chunks, lanes write them.
//!
//! Where a peer understands it, chunks move while the guest still runs: the initial bytes at once, what changes in
//! them once a round. The rest is read when all devices have stopped, and save threads write it themselves. Without multifd channels (the main channel
//! alone, a file) the streams follow each other on the main channel, behind RAM.
//!
//! A save thread calls its device only as far as the order of the moment ([`Order`]) lets it. The control thread, which
//! makes all other calls, waits until they have left their devices: so no call to a device meets another.

mod direct;
mod outbox;
mod saver;
mod serial;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_transport::Address;
use sterna_wire::extension::{self, Features};
use sterna_wire::main::Command;

use super::control::Control;
use super::pace::LONGEST;
use super::shared::{Shared, lock};
use crate::device_stream::PendingState;
use crate::driver::Waited;
use crate::error::MigrationError;
use crate::events::SwitchoverStep;
use crate::stats::StreamStatistics;
use crate::streams::{Streamed, failed_in_parallel, in_parallel};
use crate::threads::caught;

use direct::Channels;
pub(super) use outbox::{Chunk, Outbox};

/// How long the control thread waits before it looks up.
const PATIENCE: Duration = Duration::from_millis(20);
/// How old the last look at what a device has left may be.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The streams of one migration.
pub(super) struct Streams {
    devices: Vec<Streamed>,
    pub outbox: Outbox,
    channels: Channels,
    /// Chunks may move while the guest runs.
    while_running: bool,
    /// They follow each other on the main channel.
    is_serial: bool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
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
    /// The devices have stopped: read what is left.
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
    /// What is left, as of the last look; `None` before the first.
    pending: Option<PendingState>,
    /// Bytes per second that the device was seen to be read and loaded at, or that it expects.
    bytes_per_second: Option<u64>,
    /// By what it was seen: bytes, and the time that the device took for them on either side. Older ones count less.
    seen: (u64, Duration),
    statistics: StreamStatistics,
}

/// How chunks travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// In packets of the multifd channels; with credit if the peer grants it.
    Packets { has_credit: bool },
    /// Behind each other on the main channel.
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
            state: Mutex::new(State { order: Order::Run(0), savers: savers.collect(), finish_began: None }),
            changed: Condvar::new(),
            outbox: Outbox::new(devices.len(), channels.count(), has_credit),
            channels,
            while_running: has_credit,
            is_serial: way == Way::Serial,
            devices,
        }
    }

    /// A grant of the destination.
    pub fn grant(&self, name: &str, instance: u32, bytes: u64) -> Result<(), MigrationError> {
        let device =
            self.devices.iter().position(|device| device.name == name && device.instance == instance);
        let Some(device) = device else {
            return Err(MigrationError::PeerIncompatible {
                what: format!(
                    "the destination has a device {name:?}, instance {instance}, with large state, and this side has \
                     not: give both machines the same devices"
                ),
            });
        };
        if !self.while_running {
            let what = format!("it grants room to {}, and was not asked", self.devices[device]);
            return Err(MigrationError::PeerMisbehaved { what });
        }
        self.outbox.grant(device, bytes);
        Ok(())
    }

    /// Nobody waits any more: save threads end.
    pub fn close(&self) {
        self.give(Order::End);
        self.outbox.close();
    }

    /// The figures of each.
    pub fn statistics(&self) -> Vec<StreamStatistics> {
        self.lock().savers.iter().map(|saver| saver.statistics.clone()).collect()
    }

    fn give(&self, order: Order) {
        let mut state = self.lock();
        if state.order != Order::End {
            state.order = order;
        }
        if order == Order::Finish {
            state.finish_began.get_or_insert_with(Instant::now);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Bytes that are still to be read, and how long reading them is expected to take; `None` before every device was
    /// looked at.
    fn left(&self) -> Option<(u64, Duration)> {
        let state = self.lock();
        let pending: Option<Vec<u64>> =
            state.savers.iter().map(|saver| saver.pending.map(|pending| pending.total_bytes())).collect();
        let pending = pending?;
        // What a device says of itself may be anything.
        let bytes = pending.iter().copied().fold(0, u64::saturating_add);
        let times = state.savers.iter().zip(pending).enumerate().map(|(index, (saver, bytes))| {
            let speed = saver.bytes_per_second.filter(|speed| *speed > 0);
            // What was sent and waits at the destination is loaded first.
            let bytes = bytes.saturating_add(self.outbox.unloaded(index));
            speed.map_or(0.0, |speed| bytes as f64 / speed as f64)
        });
        // In parallel the slowest counts, else all of them.
        let time = if self.is_serial { times.sum() } else { times.fold(0.0, f64::max) };
        Some((bytes, Duration::from_secs_f64(time.min(LONGEST))))
    }

    /// Every device has a counterpart that grants it room.
    pub fn all_granted(&self) -> Result<(), MigrationError> {
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

    /// Waits for an order that lets a save thread work: the end, or another round than `round`. `None`: it is time to
    /// look how much is left.
    fn await_order(&self, round: Option<u64>) -> Option<Order> {
        let mut state = self.lock();
        loop {
            let is_running = match state.order {
                Order::Park => false,
                Order::Run(number) if round == Some(number) => true,
                order => return Some(order),
            };
            let waited = self.changed.wait_timeout(state, LOOK_INTERVAL);
            let timeout;
            (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() && is_running && matches!(state.order, Order::Run(_)) {
                return None;
            }
        }
    }

    /// Whether save thread `index` may make a call to its device now, and if so, whether the device runs. It must say
    /// when the call has returned.
    fn begin_call(&self, index: usize) -> Option<bool> {
        let mut state = self.lock();
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
        self.lock().finish_began.map(|began| began.elapsed()).unwrap_or_default()
    }

    fn is_read(&self, index: usize) -> bool {
        self.lock().savers[index].is_done
    }

    /// The call has returned. Whether somebody waits for that.
    fn end_call(&self, index: usize) -> bool {
        let mut state = self.lock();
        state.savers[index].is_calling = false;
        state.order == Order::Park
    }

    fn are_parked(&self) -> bool {
        let state = self.lock();
        state.order == Order::Park && state.savers.iter().all(|saver| !saver.is_calling)
    }

    fn are_read(&self) -> bool {
        self.lock().savers.iter().all(|saver| saver.is_done)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Control {
    /// Starts the save threads, if any device has a stream.
    pub(super) fn begin_streams(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let devices = Streamed::of(&shared.vm.devices());
        if devices.is_empty() {
            return Ok(());
        }
        let is_file = matches!(shared.to, Address::File { .. });
        let peer = shared.driver.look(sterna_proto::source::Source::peer);
        let has_credit = Features(peer.features).contains(Features::DEVICE_STREAMS);
        let way = match shared.capabilities.multifd && !is_file {
            true => Way::Packets { has_credit },
            false => Way::Serial,
        };
        let streams = Arc::new(Streams::new(devices.clone(), way, Channels::new(self.multifd.clone())));
        *lock(&shared.streams) = Some(Arc::clone(&streams));
        self.streams = Some((Arc::clone(&streams), way));
        in_parallel(&devices, "begin to save", |device| device.begin_save())?;
        if way == (Way::Packets { has_credit: true }) {
            self.commands(&[Command::Ping(extension::DEVICE_STREAMS_PING)])?;
        }
        for (index, device) in devices.into_iter().enumerate() {
            let (shared, streams) = (Arc::clone(&shared), Arc::clone(&streams));
            self.spawn(&format!("save {}", device.name), move || {
                saver::run(&shared, &streams, index, &device)
            })?;
        }
        Ok(())
    }

    /// The streams, if lanes carry them.
    pub(super) fn streams_on_lanes(&self) -> Option<Arc<Streams>> {
        match &self.streams {
            Some((streams, Way::Packets { .. })) => Some(Arc::clone(streams)),
            _ => None,
        }
    }

    /// A round has begun: what changed in the devices meanwhile goes out with it.
    pub(super) fn streams_enter_round(&self, number: u64) {
        if let Some((streams, _)) = &self.streams
            && matches!(streams.lock().order, Order::Run(_))
        {
            // The last round finds other orders.
            streams.give(Order::Run(number));
        }
    }

    /// vCPUs have stopped: quiesces all devices, then stops them. Every write of their DMA is to be harvested after.
    pub(super) fn stop_devices(&mut self) -> Result<(), MigrationError> {
        let Some((streams, _)) = self.streams.clone() else { return Ok(()) };
        streams.give(Order::Park);
        while !streams.are_parked() {
            // An interruption is for whoever called: nothing was done to a device yet.
            match self.shared.driver.wait(PATIENCE, || streams.are_parked().then_some(())) {
                Waited::Got(()) => break,
                Waited::Interrupted => return Ok(()),
                Waited::TimedOut => self.idle(),
            }
        }
        in_parallel(&streams.devices, "quiesce", |device| device.quiesce())?;
        in_parallel(&streams.devices, "stop", |device| device.stop())
    }

    /// Lets the save threads read what is left; it goes out beside the last pages.
    pub(super) fn finish_streams(&self) {
        if let Some((streams, _)) = &self.streams {
            streams.give(Order::Finish);
        }
    }

    /// Sends what is left of the streams, behind RAM's last page. False: the machine wants something else done.
    pub(super) fn send_streams(&mut self) -> Result<bool, MigrationError> {
        let Some((streams, way)) = self.streams.clone() else { return Ok(true) };
        if way == Way::Serial {
            return Ok(true);
        }
        if !self.until(|| (streams.are_read() && streams.outbox.is_empty()).then_some(())) {
            return Ok(false);
        }
        self.step(SwitchoverStep::Streams);
        // One more barrier on every lane: when the destination has seen its flush, every chunk has come.
        self.next_pass();
        let Some(pass) = self.running_pass() else { return Ok(false) };
        self.run_dry(&pass)
    }

    /// Sends the streams on the main channel, one device behind the other.
    /// False: the machine wants something else done.
    pub(super) fn send_streams_in_turn(&mut self) -> Result<bool, MigrationError> {
        let Some((streams, Way::Serial)) = self.streams.clone() else { return Ok(true) };
        let is_sent = serial::send(self, &streams)?;
        self.step(SwitchoverStep::Streams);
        Ok(is_sent)
    }

    /// The expected pause that devices add: bytes to be carried, and the devices' own time. `None`: not known yet.
    pub(super) fn streams_left(&self) -> Option<(u64, Duration)> {
        self.streams.as_ref().map_or(Some((0, Duration::ZERO)), |(streams, _)| streams.left())
    }

    /// Nothing is read any more; save threads have ended.
    pub(super) fn end_streams(&mut self) {
        let Some((streams, _)) = self.streams.take() else { return };
        if let Err(error) = in_parallel(&streams.devices, "end saving", |device| device.end_save()) {
            tracing::warn!(%error, "a device's stream");
            self.shared.tell(&crate::events::Event::Warning(error.to_string()));
        }
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
