//! The state of a standby: the held checkpoint, and the transition by which a checkpoint becomes held.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use sterna::error::{BadProtection, MigrationError};
use sterna::internals::Follower;
use sterna::internals::RamSink;
use sterna::internals::threads::call;
use sterna_image::Shape;
use sterna_ram::GuestRam;
use sterna_wire::colo::{CheckpointDevices, DeviceList};
use sterna_wire::replica::{CheckpointSummary, EpochSection};

use super::disk::Disks;
use super::gate::{Gate, Phase};
use super::hang::typical_interval;
use super::journal::{Brought, Journal};
use super::stream_sink::StreamSink;
use super::witness::Witness;

const CHANNEL: &str = "main channel";

/// RAM of the guest, and the objects through which pages reach it.
pub(super) struct Pages {
    pub(super) ram: GuestRam,
    pub(super) seed: Arc<RamSink>,
    pub(super) journal: Journal,
    pub(super) gate: Arc<Gate>,
    /// Receives the bytes of devices' streams.
    pub(super) streams: Arc<dyn StreamSink>,
    /// Whether the primary has announced differences over multifd channels (`specs/extension.md §10`).
    pub(super) takes_differences: bool,
}

/// The machine at a checkpoint, without its pages.
#[derive(Clone)]
pub(super) struct Devices {
    /// Sections and EOF.
    pub(super) bytes: Vec<u8>,
    pub(super) found: CheckpointDevices,
}

/// Results of a complete seeding.
pub(super) struct Seeded {
    pub(super) pages: Arc<Pages>,
    /// Configuration, block list and description.
    pub(super) shape: Arc<Shape>,
    pub(super) list: Arc<DeviceList>,
}

/// Counters of checkpoints.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) last: Brought,
    pub(super) device_bytes: u64,
    pub(super) most_journal_bytes: u64,
    /// Time from REPLY until the checkpoint was held.
    pub(super) took: Duration,
    pub(super) held_at: Option<Instant>,
    /// Typical time from one held checkpoint to the next.
    pub(super) interval: Option<Duration>,
}

/// Progress of a standby. See [`super::StandbyState`].
pub(super) enum Stage {
    Seeding,
    Following,
    /// No more checkpoints are received, for this reason.
    Lost(MigrationError),
    TakenOver,
    /// The guest never runs here, and no checkpoint is held any more.
    Discarded,
}

pub(super) struct Store {
    pub(super) gate: Arc<Gate>,
    pub(super) disks: Arc<Disks>,
    /// The contact with the primary, if the standby accepts one.
    pub(super) witness: OnceLock<Arc<dyn Witness>>,
    state: Mutex<State>,
    changed: Condvar,
}

pub(super) struct State {
    pub(super) stage: Stage,
    pub(super) seeded: Option<Seeded>,
    /// Devices of the last held checkpoint.
    pub(super) devices: Option<Arc<Devices>>,
    /// Number of the last held checkpoint. The seeding is number 0.
    pub(super) number: u64,
    /// Whether the journal contains the pages of the last held checkpoint. Some of them may not be in RAM yet.
    pub(super) is_in_journal: bool,
    /// Set while a takeover is decided about the last held checkpoint: no further checkpoint may become held.
    is_frozen: bool,
    pub(super) counts: Counts,
    opened_at: Option<Instant>,
}

impl Store {
    pub(super) fn new(disks: Disks) -> Self {
        let state = State {
            stage: Stage::Seeding,
            seeded: None,
            devices: None,
            number: 0,
            is_in_journal: false,
            is_frozen: false,
            counts: Counts::default(),
            opened_at: None,
        };
        Self {
            gate: Arc::new(Gate::new()),
            disks: Arc::new(disks),
            witness: OnceLock::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Records the complete seeding.
    pub(super) fn seeded(&self, seeded: Seeded, devices: Devices) {
        // Set first, so that pages that arrive from now on are not written into RAM.
        self.gate.set(Phase::Closed);
        let mut state = self.state.lock();
        state.counts.held_at = Some(Instant::now());
        state.seeded = Some(seeded);
        state.devices = Some(Arc::new(devices));
    }

    /// Prevents checkpoints from becoming held, until [`thaw`](Self::thaw).
    pub(super) fn freeze(&self) {
        self.state.lock().is_frozen = true;
    }

    pub(super) fn thaw(&self) {
        self.state.lock().is_frozen = false;
        self.changed.notify_all();
    }

    /// Compares the checkpoint with its summary, if the seeding has announced summaries (`specs/replica.md §7`).
    fn check_summary(
        &self,
        list: &DeviceList,
        bytes: &[u8],
        found: &CheckpointDevices,
        journal: &Journal,
    ) -> Result<(), MigrationError> {
        let number = self.state.lock().number + 1;
        let (name, instance) = (CheckpointSummary::SECTION_NAME, CheckpointSummary::SECTION_INSTANCE);
        let Some((section, body)) = list.find(name, instance).map(|index| &found.sections[index]) else {
            return Ok(());
        };
        // Only the EOF byte may follow the summary's section.
        if section.end + 1 != bytes.len() {
            return Err(BadProtection::SummaryNotLast { number, section: name }.into());
        }
        // The body begins with its length, 4 bytes, which was already checked.
        let said = CheckpointSummary::decode(&bytes[body.start + 4..body.end])
            .map_err(|error| MigrationError::wire(CHANNEL)(error.about(format!("checkpoint {number}"))))?;
        let came = CheckpointSummary::of(number, journal.sums(), &bytes[..section.start]);
        match said.difference(&came) {
            Some(difference) => Err(MigrationError::CheckpointDiffers { number, difference }),
            None => Ok(()),
        }
    }

    /// Waits while a takeover is being decided, then marks the checkpoint as held.
    fn hold_unless_frozen(&self, devices: Devices, brought: Brought) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        loop {
            // Checked after every wait, because a takeover ends the reception before it thaws the store.
            if !matches!(state.stage, Stage::Following) {
                return Err(MigrationError::Cancelled);
            }
            if !state.is_frozen {
                break;
            }
            self.changed.wait(&mut state);
        }
        self.disks.check()?;
        // The steps from here on cannot fail.
        if self.witness.get().is_some_and(|witness| !witness.may_hold(state.number + 1)) {
            return Err(MigrationError::Cancelled);
        }
        // The primary's guest is paused, so it has not written anything in the next epoch.
        self.disks.end_epoch();
        let now = Instant::now();
        let since_last = state.counts.held_at.map(|at| now - at);
        let interval = since_last.map(|since| typical_interval(state.counts.interval, since));
        state.counts = Counts {
            last: brought,
            device_bytes: devices.bytes.len() as u64,
            most_journal_bytes: state.counts.most_journal_bytes.max(brought.bytes),
            took: state.opened_at.map_or(Duration::ZERO, |opened| now - opened),
            held_at: Some(now),
            interval,
        };
        state.devices = Some(Arc::new(devices));
        state.is_in_journal = true;
        state.number += 1;
        Ok(())
    }

    fn pages(&self) -> Result<Arc<Pages>, MigrationError> {
        let state = self.state.lock();
        let missing = || MigrationError::Internal("a checkpoint came before the seeding".to_owned());
        state.seeded.as_ref().map(|seeded| Arc::clone(&seeded.pages)).ok_or_else(missing)
    }

    /// Completes [`Follower::apply`], if the reception ended before it was complete.
    pub(super) fn apply_held(&self) -> Result<(), MigrationError> {
        if !self.state.lock().is_in_journal {
            return Ok(());
        }
        let pages = self.pages()?;
        pages.journal.apply(&pages.ram)?;
        self.apply_streams(pages.streams.as_ref())?;
        pages.journal.clear();
        self.disks.commit()?;
        self.state.lock().is_in_journal = false;
        Ok(())
    }

    /// Passes the last held checkpoint's bytes of devices' streams to their devices.
    fn apply_streams(&self, streams: &dyn StreamSink) -> Result<(), MigrationError> {
        let (list, devices) = {
            let state = self.state.lock();
            let Some((seeded, devices)) = state.seeded.as_ref().zip(state.devices.clone()) else {
                return Ok(());
            };
            (Arc::clone(&seeded.list), devices)
        };
        for (device, instance, bytes) in epochs(&list, &devices.bytes, &devices.found) {
            call("Survivor::write_stream", || streams.write(device, instance, bytes))?;
        }
        Ok(())
    }

    /// Drops everything: the guest never runs here.
    pub(super) fn discard(&self) {
        let mut state = self.state.lock();
        state.stage = Stage::Discarded;
        (state.seeded, state.devices, state.is_in_journal) = (None, None, false);
        drop(state);
        self.disks.discard();
        self.gate.set(Phase::Ended);
        self.changed.notify_all();
    }

    /// Ends the reception; the first reason counts.
    fn ended(&self, why: MigrationError) {
        let mut state = self.state.lock();
        if matches!(state.stage, Stage::Seeding | Stage::Following) {
            state.stage = Stage::Lost(why);
        }
        drop(state);
        self.disks.close();
        self.gate.set(Phase::Ended);
        self.changed.notify_all();
    }
}

impl Follower for Store {
    fn begin(&self) {
        let mut state = self.state.lock();
        if matches!(state.stage, Stage::Seeding) {
            state.stage = Stage::Following;
        }
        drop(state);
        self.changed.notify_all();
    }

    fn wait_until_begun(&self, most: Duration) {
        let mut state = self.state.lock();
        if matches!(state.stage, Stage::Seeding) {
            self.changed.wait_for(&mut state, most);
        }
    }

    fn has_begun(&self) -> bool {
        !matches!(self.state.lock().stage, Stage::Seeding)
    }

    fn open(&self) -> Result<(), MigrationError> {
        self.state.lock().opened_at = Some(Instant::now());
        self.gate.set(Phase::Open);
        Ok(())
    }

    fn close(&self) {
        self.gate.set(Phase::Closed);
    }

    fn hold(&self, devices: Vec<u8>) -> Result<(), MigrationError> {
        let (list, found, pages) = {
            let state = self.state.lock();
            let Some(seeded) = &state.seeded else {
                return Err(MigrationError::Internal("a checkpoint came before the seeding".to_owned()));
            };
            let found = seeded.list.check(&devices).map_err(MigrationError::wire(CHANNEL))?;
            (Arc::clone(&seeded.list), found, Arc::clone(&seeded.pages))
        };
        self.check_summary(&list, &devices, &found, &pages.journal)?;
        // A checkpoint is promised only if its streams can be written afterwards.
        for (device, instance, bytes) in epochs(&list, &devices, &found) {
            let check = || pages.streams.check(device, instance, bytes);
            call("Survivor::check_stream", check).map_err(|why| {
                let device = device.to_owned();
                BadProtection::Epoch { device, instance, why }
            })?;
        }
        // Pages on failed memory of this host cannot be promised.
        MigrationError::check_memory(&pages.ram)?;
        self.hold_unless_frozen(Devices { bytes: devices, found }, pages.journal.brought())
    }

    fn apply(&self) -> Result<(), MigrationError> {
        self.apply_held()
    }

    fn lost(&self, why: MigrationError) {
        let was_following = matches!(self.state.lock().stage, Stage::Following);
        self.ended(why.clone());
        // If this side ended the reception, the witness does not need the reason.
        if let Some(witness) = self.witness.get().filter(|_| was_following) {
            witness.lost(&why);
        }
    }

    fn wait_until_over(&self) {
        while !self.gate.wait_for_end(Duration::from_secs(3600)) {}
    }

    fn end(&self) {
        self.ended(MigrationError::Cancelled);
    }
}

/// Bytes of devices' streams in a checkpoint: device, instance and bytes. Empty ones are omitted.
fn epochs<'a>(
    list: &'a DeviceList,
    bytes: &'a [u8],
    found: &'a CheckpointDevices,
) -> impl Iterator<Item = (&'a str, u32, &'a [u8])> {
    list.devices().iter().zip(&found.sections).filter_map(|(known, (_, body))| {
        let device = EpochSection::device_of(&known.name)?;
        // The body begins with its length, 4 bytes, which was already checked.
        let bytes = bytes.get(body.start + 4..body.end).filter(|bytes| !bytes.is_empty())?;
        Some((device, known.instance, bytes))
    })
}
