//! What a standby holds, and the moment from which it holds a checkpoint.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use sterna_image::Shape;
use sterna_ram::GuestRam;
use sterna_wire::colo::{CheckpointDevices, DeviceList};
use sterna_wire::replica::{CheckpointSummary, EpochSection};

use super::disk::Disks;
use super::gate::{Gate, Phase};
use super::journal::{Brought, Journal};
use super::stream_sink::StreamSink;
use super::witness::Witness;
use crate::error::MigrationError;
use crate::incoming::follower::Follower;
use crate::pages::RamSink;
use crate::threads::call;

const CHANNEL: &str = "main channel";

/// RAM, and the way of pages there.
pub(super) struct Pages {
    pub(super) ram: GuestRam,
    pub(super) seed: Arc<RamSink>,
    pub(super) journal: Journal,
    pub(super) gate: Arc<Gate>,
    /// Has the devices' streams.
    pub(super) streams: Arc<dyn StreamSink>,
    /// The primary has announced differences over multifd channels (`specs/extension.md §10`).
    pub(super) takes_differences: bool,
}

/// A machine at a checkpoint: all of it but the pages.
#[derive(Clone)]
pub(super) struct Devices {
    /// Sections, and EOF.
    pub(super) bytes: Vec<u8>,
    pub(super) found: CheckpointDevices,
}

/// What a seeding has brought.
pub(super) struct Seeded {
    pub(super) pages: Arc<Pages>,
    /// Configuration, blocks, description.
    pub(super) shape: Arc<Shape>,
    pub(super) list: Arc<DeviceList>,
}

/// What is counted of checkpoints.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) last: Brought,
    pub(super) device_bytes: u64,
    pub(super) most_journal_bytes: u64,
    /// From REPLY until it was held.
    pub(super) took: Duration,
    pub(super) held_at: Option<Instant>,
}

/// Where a standby stands. See [`super::StandbyState`].
pub(super) enum Stage {
    Seeding,
    Following,
    /// No more checkpoints come.
    Lost(MigrationError),
    TakenOver,
    /// The guest never runs here: nothing is held any more.
    Discarded,
}

pub(super) struct Store {
    pub(super) gate: Arc<Gate>,
    pub(super) disks: Arc<Disks>,
    /// The contact with the primary, where there may be one.
    pub(super) witness: OnceLock<Arc<dyn Witness>>,
    state: Mutex<State>,
    changed: Condvar,
}

pub(super) struct State {
    pub(super) stage: Stage,
    pub(super) seeded: Option<Seeded>,
    /// Of the last held checkpoint.
    pub(super) devices: Option<Arc<Devices>>,
    /// Checkpoints that were held since the seeding, which is number 0.
    pub(super) number: u64,
    /// The pages of the last held checkpoint are in the journal, and perhaps not all in RAM.
    pub(super) is_in_journal: bool,
    /// Whoever decides on a takeover looks at the last held checkpoint: none may follow.
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

    /// The seeding has come whole.
    pub(super) fn seeded(&self, seeded: Seeded, devices: Devices) {
        // A packet that comes from now on is none of the seeding's.
        self.gate.set(Phase::Closed);
        let mut state = self.state.lock();
        state.counts.held_at = Some(Instant::now());
        state.seeded = Some(seeded);
        state.devices = Some(Arc::new(devices));
    }

    /// No checkpoint becomes held until [`thaw`](Self::thaw).
    pub(super) fn freeze(&self) {
        self.state.lock().is_frozen = true;
    }

    pub(super) fn thaw(&self) {
        self.state.lock().is_frozen = false;
        self.changed.notify_all();
    }

    /// Where the seeding has announced it: all of the checkpoint is as its primary says at its end (`specs/replica.md §7`).
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
        // Only EOF stands behind the last section.
        if section.end + 1 != bytes.len() {
            let what =
                format!("checkpoint {number}: section {name:?} is not the last one (specs/replica.md §7)");
            return Err(MigrationError::PeerMisbehaved { what });
        }
        // Behind the length, which says where the section ends: it was checked.
        let said = CheckpointSummary::decode(&bytes[body.start + 4..body.end])
            .map_err(|error| MigrationError::wire(CHANNEL)(error.about(format!("checkpoint {number}"))))?;
        let came = CheckpointSummary::of(number, journal.sums(), &bytes[..section.start]);
        match said.difference(&came) {
            Some(difference) => Err(MigrationError::CheckpointDiffers { number, difference }),
            None => Ok(()),
        }
    }

    /// Waits as long as somebody decides on a takeover, and then holds.
    fn hold_unless_frozen(&self, devices: Devices, brought: Brought) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        loop {
            // Looked at after every wait: the takeover ends the following before it thaws.
            if !matches!(state.stage, Stage::Following) {
                return Err(MigrationError::Cancelled);
            }
            if !state.is_frozen {
                break;
            }
            self.changed.wait(&mut state);
        }
        self.disks.check()?;
        // From here on nothing fails.
        if self.witness.get().is_some_and(|witness| !witness.may_hold(state.number + 1)) {
            return Err(MigrationError::Cancelled);
        }
        // The primary's guest stands: nothing of the next epoch was written yet.
        self.disks.end_epoch();
        let now = Instant::now();
        state.counts = Counts {
            last: brought,
            device_bytes: devices.bytes.len() as u64,
            most_journal_bytes: state.counts.most_journal_bytes.max(brought.bytes),
            took: state.opened_at.map_or(Duration::ZERO, |opened| now - opened),
            held_at: Some(now),
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

    /// Finishes what [`Follower::apply`] has begun, if the following ended in it.
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

    /// What the last held checkpoint brought of devices' streams goes to where they are.
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

    /// The guest never runs here.
    pub(super) fn discard(&self) {
        let mut state = self.state.lock();
        state.stage = Stage::Discarded;
        (state.seeded, state.devices, state.is_in_journal) = (None, None, false);
        drop(state);
        self.disks.discard();
        self.gate.set(Phase::Ended);
        self.changed.notify_all();
    }

    /// Nothing more comes; the first reason counts.
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
        // Nothing is promised that could not be written when it is held.
        for (device, instance, bytes) in epochs(&list, &devices, &found) {
            let check = || pages.streams.check(device, instance, bytes);
            call("Survivor::check_stream", check).map_err(|error| {
                let what =
                    format!("what a checkpoint brings of device {device:?}, instance {instance}: {error}");
                MigrationError::PeerMisbehaved { what }
            })?;
        }
        // What lies on memory of this host that has failed is not held.
        MigrationError::check_memory(&pages.ram)?;
        self.hold_unless_frozen(Devices { bytes: devices, found }, pages.journal.brought())
    }

    fn apply(&self) -> Result<(), MigrationError> {
        self.apply_held()
    }

    fn lost(&self, why: MigrationError) {
        let was_following = matches!(self.state.lock().stage, Stage::Following);
        self.ended(why.clone());
        // What this side has ended is no news.
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

/// What a checkpoint brings of devices' streams: whose, and the bytes, if there are any.
fn epochs<'a>(
    list: &'a DeviceList,
    bytes: &'a [u8],
    found: &'a CheckpointDevices,
) -> impl Iterator<Item = (&'a str, u32, &'a [u8])> {
    list.devices().iter().zip(&found.sections).filter_map(|(known, (_, body))| {
        let device = EpochSection::device_of(&known.name)?;
        // Behind the length, which says where the section ends: it was checked.
        let bytes = bytes.get(body.start + 4..body.end).filter(|bytes| !bytes.is_empty())?;
        Some((device, known.instance, bytes))
    })
}
