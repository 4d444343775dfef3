//! Devices' streams at the source: one save thread per device reads chunks, lanes write them.
//!
//! Where a peer understands it, chunks move while the guest still runs: the initial bytes at once, what changes in
//! them once a round. The rest is read when all devices have stopped. Without multifd channels (the main channel
//! alone, a file) the streams follow each other on the main channel, behind RAM.
//!
//! All the devices' steps are orders to the save threads ([`Order`]), so that no call to a device meets another.

mod outbox;
mod saver;
mod serial;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sterna_transport::Address;
use sterna_wire::extension::{self, Features};
use sterna_wire::main::Command;

use super::control::Control;
use super::pace::LONGEST;
use super::shared::lock;
use crate::device_stream::PendingState;
use crate::driver::Waited;
use crate::error::MigrationError;
use crate::events::SwitchoverStep;
use crate::stats::StreamStatistics;
use crate::streams::{Streamed, failed_in_parallel, in_parallel};

pub(super) use outbox::{Chunk, Outbox};

/// How long the control thread waits before it looks up.
const PATIENCE: Duration = Duration::from_millis(20);

/// The streams of one migration.
pub(super) struct Streams {
    devices: Vec<Streamed>,
    pub outbox: Outbox,
    /// Chunks may move while the guest runs.
    while_running: bool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    order: Order,
    savers: Vec<Progress>,
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
    pending: PendingState,
    /// Bytes per second that reading and sending were seen to reach, or that the device expects.
    bytes_per_second: Option<u64>,
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
    fn new(devices: Vec<Streamed>, way: Way, lanes: usize) -> Self {
        let has_credit = way == Way::Packets { has_credit: true };
        let savers = devices.iter().map(|device| Progress {
            statistics: StreamStatistics::of(&device.name, device.instance),
            ..Progress::default()
        });
        let order = if has_credit { Order::Run(0) } else { Order::Park };
        Self {
            state: Mutex::new(State { order, savers: savers.collect() }),
            changed: Condvar::new(),
            outbox: Outbox::new(devices.len(), lanes, has_credit),
            while_running: has_credit,
            devices,
        }
    }

    /// A grant of the destination.
    pub fn grant(&self, name: &str, instance: u32, bytes: u64) -> Result<(), MigrationError> {
        let device =
            self.devices.iter().position(|device| device.name == name && device.instance == instance);
        let Some(device) = device.filter(|_| self.while_running) else {
            return Err(MigrationError::PeerMisbehaved {
                what: format!(
                    "it grants room to the stream of device {name:?}, instance {instance}, which asked for none"
                ),
            });
        };
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
        drop(state);
        self.changed.notify_all();
        self.outbox.wake();
    }

    /// Bytes that are still to be read, and the longest that reading any one device is expected to take.
    fn left(&self) -> (u64, Duration) {
        let state = self.lock();
        // What a device says of itself may be anything.
        let bytes = state.savers.iter().map(|saver| saver.pending.total_bytes()).fold(0, u64::saturating_add);
        let longest = state.savers.iter().map(|saver| {
            let speed = saver.bytes_per_second.filter(|speed| *speed > 0);
            let time = |speed| saver.pending.total_bytes() as f64 / speed as f64;
            speed.map_or(Duration::ZERO, |speed| Duration::from_secs_f64(time(speed).min(LONGEST)))
        });
        (bytes, longest.max().unwrap_or_default())
    }

    /// Waits for an order that lets a save thread work: the end, or another round than `round`.
    fn await_order(&self, round: Option<u64>) -> Order {
        let mut state = self.lock();
        loop {
            match state.order {
                Order::Park => {}
                Order::Run(number) if round == Some(number) => {}
                order => return order,
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether save thread `index` may make a call to its device now. If so it must say when it has returned.
    fn begin_call(&self, index: usize) -> bool {
        let mut state = self.lock();
        let may = matches!(state.order, Order::Run(_) | Order::Finish);
        state.savers[index].is_calling = may;
        may
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
        let lanes = usize::from(shared.params().multifd_channels);
        let streams = Arc::new(Streams::new(devices.clone(), way, lanes));
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
    pub(super) fn send_streams_in_turn(&mut self) -> Result<(), MigrationError> {
        let Some((streams, Way::Serial)) = self.streams.clone() else { return Ok(()) };
        serial::send(self, &streams)?;
        self.step(SwitchoverStep::Streams);
        Ok(())
    }

    /// The expected pause that devices add: bytes that lanes have to carry, and the slowest device's own time.
    pub(super) fn streams_left(&self) -> (u64, Duration) {
        self.streams.as_ref().map_or((0, Duration::ZERO), |(streams, _)| streams.left())
    }

    /// Nothing is read any more; save threads have ended.
    pub(super) fn end_streams(&mut self) {
        let Some((streams, _)) = self.streams.take() else { return };
        if let Err(error) = in_parallel(&streams.devices, "end saving", |device| device.end_save()) {
            tracing::warn!(%error, "a device's stream");
            self.shared.tell(&crate::events::Event::Warning(error.to_string()));
        }
    }

    /// The guest runs on: so do its devices, before its vCPUs. One that is dead or hangs cannot: a guest without it is
    /// better off than one that stands still.
    pub(super) fn run_devices(&self) {
        let devices = Streamed::of(&self.shared.vm.devices());
        for error in failed_in_parallel(&devices, "run", |device| device.run()) {
            let text = format!("the guest runs on without one of its devices: {error}");
            self.shared.tell(&crate::events::Event::Warning(text));
        }
    }
}
