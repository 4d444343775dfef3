//! The seeding: receives an opaque machine into memory, so that checkpoints can follow.

use std::sync::Arc;

use parking_lot::Mutex;
use sterna::error::{
    BadProtection, MachineDifference, MigrationError, ProtectionDifference, Untimely, VmError,
};
use sterna::hooks::Hook;
use sterna::internals::Follower;
use sterna::internals::streams::{self, MOST_CHUNK_BYTES};
use sterna::internals::threads::call;
use sterna::internals::{Layout, RamStart, RamStarted, Section, Target};
use sterna::internals::{PageSink, RamSink};
use sterna::params::Capabilities;
use sterna::vm::Device;
use sterna_image::{OPAQUE_BYTES, Shape};
use sterna_opaque::RAM_BYTES;
use sterna_opaque::internals::{Gathered, knowledge};
use sterna_ram::{Backing, GuestRam, RamBlock};
use sterna_transport::Channel;
use sterna_wire::colo::{DeviceList, KnownDevice};
use sterna_wire::main::{
    BodyKind, Configuration, Expectations, SectionKind, SectionKnowledge, Tail, TailEnd,
};
use sterna_wire::replica::{CheckpointSummary, EpochSection};

use super::held::devices_of;
use super::journal::Journal;
use super::lane::StandbyLane;
use super::protected::Contacts;
use super::store::{Devices, Pages, Seeded, Store};
use super::stream_sink::StreamSink;
use super::survivor::Survivor;

const CHANNEL: &str = "main channel";

/// Receives a seeding, as the engine's [`Target`].
pub(super) struct StandbyTarget {
    store: Arc<Store>,
    /// Limit of the journal, in bytes.
    journal_limit: u64,
    contacts: Arc<Contacts>,
    seeding: Mutex<Seeding>,
}

struct Seeding {
    machine: Gathered,
    list: DeviceList,
    /// Set when the block list has arrived.
    pages: Option<Arc<Pages>>,
    /// Devices whose streams have begun, and whether each stream has ended.
    streams: Vec<((String, u32), bool)>,
}

impl Seeding {
    fn new() -> Self {
        Self { machine: Gathered::default(), list: DeviceList::new(), pages: None, streams: Vec::new() }
    }
}

impl StandbyTarget {
    pub(super) fn new(store: Arc<Store>, journal_limit: u64, contacts: Arc<Contacts>) -> Self {
        Self { store, journal_limit, contacts, seeding: Mutex::new(Seeding::new()) }
    }

    /// Bytes of the machine's RAM; 0 until its block list has arrived.
    pub(super) fn ram_bytes(&self) -> u64 {
        self.seeding.lock().machine.shape().ram_bytes()
    }

    /// Passes a part of a device's stream to the survivor.
    fn stream(
        &self,
        device: &str,
        instance: u32,
        kind: SectionKind,
        body: &[u8],
    ) -> Result<(), MigrationError> {
        let survivor = &self.contacts.survivor;
        if kind == SectionKind::Start {
            let (of, mut seeding) = ((device.to_owned(), instance), self.seeding.lock());
            if seeding.streams.iter().any(|(began, _)| *began == of) {
                return Err(BadProtection::StreamTwice { device: device.to_owned(), instance }.into());
            }
            seeding.streams.push((of, false));
            drop(seeding);
            call("Survivor::begin_stream", || survivor.begin_stream(device, instance))?;
        }
        if !body.is_empty() {
            call("Survivor::write_stream", || survivor.write_stream(device, instance, body))?;
        }
        if kind == SectionKind::End {
            let mut seeding = self.seeding.lock();
            let ended = seeding.streams.iter_mut().find(|(of, _)| of.0 == device && of.1 == instance);
            ended.into_iter().for_each(|(_, has_ended)| *has_ended = true);
        }
        Ok(())
    }

    fn pages(&self, start: &RamStart<'_>) -> Result<Pages, MigrationError> {
        let blocks: Vec<_> = start.table.iter().collect();
        let files = self.contacts.survivor.memory(&blocks)?;
        let mut files = files.into_iter();
        let block = |(name, length): (&str, u64)| match files.next().flatten() {
            Some(file) => RamBlock::of_file(name, length, file),
            None => RamBlock::new(name, length, Backing::Memfd),
        };
        let ram = GuestRam::new(blocks.into_iter().map(block).collect::<Result<_, _>>()?)?;
        ram.blocks().iter().for_each(RamBlock::declare_fresh);
        let seed = Arc::new(RamSink::new(&ram, vec![false; ram.blocks().len()])?);
        let journal = Journal::new(&ram, self.journal_limit, start.lanes + 1)?;
        let streams = Arc::new(Streams(Arc::clone(&self.contacts.survivor)));
        let takes_differences = self.contacts.current().is_some_and(|contact| contact.sends_differences());
        Ok(Pages { ram, seed, journal, gate: Arc::clone(&self.store.gate), streams, takes_differences })
    }
}

impl Target for StandbyTarget {
    fn follower(&self) -> Option<&dyn Follower> {
        Some(self.store.as_ref())
    }

    fn contact(&self, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        self.contacts.begin(channel, &self.store)
    }

    fn disk(&self, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        self.contacts.check_stream(channel)?;
        self.store.disks.serve(channel)
    }

    fn admits_stream(&self, channel: &Channel) -> Result<(), MigrationError> {
        self.contacts.check_stream(channel)
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        None
    }

    fn expectations(&self, capabilities: &Capabilities) -> Expectations {
        Expectations {
            multifd: capabilities.multifd,
            // The machine type's version is unknown here. A START without a flush identifies the legacy form.
            accept_legacy_flush: true,
            opaque_tail: true,
            device_state_bytes: OPAQUE_BYTES as u64,
            ..Expectations::default()
        }
    }

    fn knowledge(&self) -> Box<dyn SectionKnowledge + Send> {
        let machine = knowledge();
        Box::new(move |name: &str, instance: u32, version: u32, kind: SectionKind| {
            // A part of a device's stream, which is passed on without buffering.
            match streams::device_of_section(name).filter(|_| kind != SectionKind::Full) {
                Some(_) => BodyKind::Passing { most: MOST_CHUNK_BYTES },
                None => machine.body(name, instance, version, kind),
            }
        })
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }

    fn known_layout(&self, _: usize) -> Result<Option<Layout>, MigrationError> {
        Ok(None)
    }

    fn configuration(&self, configuration: &Configuration) -> Result<(), MigrationError> {
        self.seeding.lock().machine.configuration(configuration);
        Ok(())
    }

    fn command(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.seeding.lock().machine.command(bytes)
    }

    fn ram_starts(&self, start: &RamStart<'_>) -> Result<RamStarted, MigrationError> {
        // Checked again: the contact may have been lost since the first connection was accepted.
        self.contacts.check_contact()?;
        let total = start.table.total_bytes().filter(|total| *total <= RAM_BYTES);
        if total.is_none() {
            return Err(MachineDifference::TooMuchRam { most: RAM_BYTES }.into());
        }
        let pages = Arc::new(self.pages(start)?);
        let lane = |index| Arc::new(StandbyLane::new(Arc::clone(&pages), index)) as Arc<dyn PageSink>;
        let layout = Layout {
            ram: pages.ram.clone(),
            table: start.table.clone(),
            sinks: (0..=start.lanes).map(lane).collect(),
        };
        let mut seeding = self.seeding.lock();
        seeding.machine.ram_starts(start);
        seeding.machine.ram_has_started();
        seeding.pages = Some(pages);
        Ok(RamStarted { layout: Some(layout), warning: None })
    }

    fn ram_section_ended(&self, kind: SectionKind) {
        self.seeding.lock().machine.ram_section_ended(kind);
    }

    fn section(&self, section: &Section<'_>) -> Result<(), MigrationError> {
        let Section { id, name, instance, version, kind, body } = *section;
        if let Some(device) = streams::device_of_section(name).filter(|_| kind != SectionKind::Full) {
            return self.stream(device, instance, kind, body);
        }
        if kind != SectionKind::Full {
            return Err(ProtectionDifference::SentInParts { device: name.to_owned() }.into());
        }
        let mut seeding = self.seeding.lock();
        let (name, length_bytes) = (name.to_owned(), body.len());
        let known = KnownDevice { id, name, instance, version, length_bytes, is_early: true };
        seeding.list.push(known).map_err(MigrationError::wire(CHANNEL))?;
        seeding.machine.section(section)
    }

    fn tail(&self) -> Option<Tail> {
        Some(self.seeding.lock().machine.tail())
    }

    fn devices_came(&self, tail: &Tail, end: &TailEnd) -> Result<(), MigrationError> {
        let mut seeding = self.seeding.lock();
        let description = end.description.clone().map(|range| &tail.bytes()[range]);
        seeding
            .list
            .push_tail(&tail.bytes()[..end.devices_bytes], description)
            .map_err(MigrationError::wire(CHANNEL))?;
        seeding.machine.devices_came(tail, end)
    }

    fn finish_loading(&self) -> Result<bool, MigrationError> {
        let mut seeding = self.seeding.lock();
        let shape = seeding.machine.finish()?;
        let Some(pages) = seeding.pages.clone().filter(|_| shape.has_end) else {
            return Err(Untimely::EndBeforeRam.into());
        };
        pages.seed.finish()?;
        check_streams(&seeding.streams, &seeding.list)?;
        if announces_summaries(&seeding.list)? {
            pages.journal.sum_up();
        }
        let list = Arc::new(seeding.list.clone());
        let devices = as_checkpoint(&shape, &list)?;
        let survivor = &self.contacts.survivor;
        call("Survivor::check", || survivor.check(&shape, &devices_of(&list, &devices)))?;
        // No disk write is missed: the primary's guest is paused until READY.
        self.store.disks.begin_epochs()?;
        self.store.seeded(Seeded { pages, shape, list }, devices);
        Ok(true)
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        Vec::new()
    }

    fn start(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    fn runs_guests(&self) -> bool {
        false
    }

    fn take_over_paused(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    fn reset(&self) -> Vec<String> {
        *self.seeding.lock() = Seeding::new();
        self.store.disks.reset();
        self.contacts.seeding_failed();
        Vec::new()
    }

    fn cleared_pages(&self) -> u64 {
        0
    }
}

/// Passes streams to a survivor.
struct Streams(Arc<dyn Survivor>);

impl StreamSink for Streams {
    fn check(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError> {
        self.0.check_stream(device, instance, bytes)
    }

    fn write(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError> {
        self.0.write_stream(device, instance, bytes)
    }
}

/// Checks that every stream of the seeding is complete, and that checkpoints continue it.
fn check_streams(streams: &[((String, u32), bool)], list: &DeviceList) -> Result<(), MigrationError> {
    for ((device, instance), has_ended) in streams {
        let goes_on = list.find(&EpochSection::name_of(device), *instance).is_some();
        if !has_ended || !goes_on {
            let (device, instance) = (device.clone(), *instance);
            return Err(match has_ended {
                true => BadProtection::StreamWithoutEpochs { device, instance }.into(),
                false => BadProtection::StreamWithoutEnd { device, instance }.into(),
            });
        }
    }
    for device in list.devices() {
        let Some(name) = EpochSection::device_of(&device.name) else { continue };
        if !streams.iter().any(|((began, instance), _)| began == name && *instance == device.instance) {
            return Err(BadProtection::EpochsWithoutStream { section: device.name.clone() }.into());
        }
    }
    Ok(())
}

/// Whether each checkpoint ends with a summary (`specs/replica.md §7`).
fn announces_summaries(list: &DeviceList) -> Result<bool, MigrationError> {
    let (name, known) = (CheckpointSummary::SECTION_NAME, CheckpointSummary::SECTION_VERSION);
    let Some(index) = list.find(name, CheckpointSummary::SECTION_INSTANCE) else { return Ok(false) };
    let version = list.devices()[index].version;
    if version != known {
        return Err(ProtectionDifference::SummaryVersion { section: name, version, known }.into());
    }
    Ok(true)
}

/// The seeding's devices, in the form of a checkpoint.
fn as_checkpoint(shape: &Shape, list: &DeviceList) -> Result<Devices, MigrationError> {
    let bytes = [&shape.early[..], &shape.setup, &shape.devices, &[0]].concat();
    let found = list.check(&bytes).map_err(MigrationError::wire(CHANNEL))?;
    Ok(Devices { bytes, found })
}
