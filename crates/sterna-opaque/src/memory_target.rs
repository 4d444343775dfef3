//! Receives an opaque machine into memory.

use std::sync::Arc;

use parking_lot::Mutex;
use sterna::error::{MigrationError, Untimely};
use sterna::hooks::Hook;
use sterna::internals::emptied;
use sterna::internals::{Layout, RamStart, RamStarted, Section, Target};
use sterna::internals::{PageSink, RamSink};
use sterna::params::Capabilities;
use sterna::vm::Device;
use sterna_image::{OPAQUE_BYTES, Shape};
use sterna_ram::{GuestRam, RamError};
use sterna_wire::main::{Configuration, Expectations, SectionKind, SectionKnowledge, Tail, TailEnd};
use sterna_wire::multifd::BlockTable;

use super::gathered::{Gathered, knowledge};

/// Memory into which a machine is received.
pub(super) struct MemoryTarget {
    ram: GuestRam,
    sink: Arc<RamSink>,
    gathered: Mutex<Gathered>,
    /// Set to the machine's description when it has arrived.
    here: Arc<Mutex<Option<Shape>>>,
}

impl MemoryTarget {
    /// Creates a target for a machine with `ram`.
    ///
    /// # Errors
    /// There is no memory for pages of blocks that cannot be written.
    pub(super) fn new(ram: GuestRam, here: Arc<Mutex<Option<Shape>>>) -> Result<Self, RamError> {
        let sink = Arc::new(RamSink::new(&ram, vec![false; ram.blocks().len()])?);
        Ok(Self { ram, sink, gathered: Mutex::new(Gathered::default()), here })
    }

    fn blocks(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        self.ram.blocks().iter().map(|block| (block.name().to_owned(), block.len_bytes()))
    }
}

impl Target for MemoryTarget {
    fn is_in_memory(&self) -> bool {
        true
    }

    fn ram_sink(&self) -> Option<&RamSink> {
        Some(&self.sink)
    }

    fn guest(&self) -> Option<&GuestRam> {
        Some(&self.ram)
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        None
    }

    fn expectations(&self, capabilities: &Capabilities) -> Expectations {
        Expectations {
            blocks: Some(self.blocks().collect()),
            multifd: capabilities.multifd,
            // The machine type's version is unknown here. A START without a flush identifies the legacy form.
            accept_legacy_flush: true,
            opaque_tail: true,
            device_state_bytes: OPAQUE_BYTES as u64,
            ..Expectations::default()
        }
    }

    fn knowledge(&self) -> Box<dyn SectionKnowledge + Send> {
        knowledge()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }

    fn known_layout(&self, lanes: usize) -> Result<Option<Layout>, MigrationError> {
        let sink: Arc<dyn PageSink> = self.sink.clone();
        Ok(Some(Layout {
            ram: self.sink.ram().clone(),
            table: BlockTable::new(self.blocks()).map_err(MigrationError::wire("RAM of this side"))?,
            sinks: vec![sink; lanes + 1],
        }))
    }

    fn configuration(&self, configuration: &Configuration) -> Result<(), MigrationError> {
        self.gathered.lock().configuration(configuration);
        Ok(())
    }

    fn command(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.gathered.lock().command(bytes)
    }

    fn ram_starts(&self, start: &RamStart<'_>) -> Result<RamStarted, MigrationError> {
        let mut gathered = self.gathered.lock();
        gathered.ram_starts(start);
        gathered.ram_has_started();
        Ok(RamStarted::default())
    }

    fn ram_section_ended(&self, kind: SectionKind) {
        self.gathered.lock().ram_section_ended(kind);
    }

    fn section(&self, section: &Section<'_>) -> Result<(), MigrationError> {
        self.gathered.lock().section(section)
    }

    fn tail(&self) -> Option<Tail> {
        Some(self.gathered.lock().tail())
    }

    fn devices_came(&self, tail: &Tail, end: &TailEnd) -> Result<(), MigrationError> {
        self.gathered.lock().devices_came(tail, end)
    }

    fn end_came(&self, description: Option<Vec<u8>>) {
        self.gathered.lock().description(description);
    }

    fn finish_loading(&self) -> Result<bool, MigrationError> {
        let shape = self.gathered.lock().finish()?;
        if !shape.has_end {
            return Err(Untimely::EndBeforeRam.into());
        }
        self.sink.finish()?;
        Ok(true)
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        Vec::new()
    }

    fn start(&self) -> Result<(), MigrationError> {
        let shape = Shape::clone(self.gathered.lock().shape());
        *self.here.lock() = Some(shape);
        Ok(())
    }

    fn runs_guests(&self) -> bool {
        false
    }

    fn take_over_paused(&self) -> Result<(), MigrationError> {
        self.start()
    }

    fn reset(&self) -> Vec<String> {
        *self.gathered.lock() = Gathered::default();
        *self.here.lock() = None;
        emptied(&self.sink, &self.ram)
    }

    fn cleared_pages(&self) -> u64 {
        self.sink.cleared_pages()
    }
}
