//! Receives an opaque machine, and writes its description and its pages to an image.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna::error::{MachineDifference, MigrationError, Untimely};
use sterna::hooks::Hook;
use sterna::internals::PageSink;
use sterna::internals::{Layout, RamStart, RamStarted, Section, Target};
use sterna::params::Capabilities;
use sterna::vm::Device;
use sterna_image::{MappedWriter, OPAQUE_BYTES, Shape};
use sterna_ram::{GuestRam, RamBlock};
use sterna_transport::Flusher;
use sterna_wire::main::{Configuration, Expectations, SectionKind, SectionKnowledge, Tail, TailEnd};

use super::gathered::{Gathered, knowledge};
use super::image_plan::{ImagePlan, RAM_BYTES};
use super::lane::ImageLane;

/// Receives one machine into an image.
pub(super) struct ImageTarget {
    plan: ImagePlan,
    state: Mutex<ReceivedImage>,
}

struct ReceivedImage {
    machine: Gathered,
    /// The image; set when the block list has arrived.
    image: Option<Growing>,
    /// Whether the description arrived after the rest had been made durable.
    more_came: bool,
}

#[derive(Clone)]
struct Growing {
    writer: MappedWriter,
    /// All lanes. The main channel's lane is the last.
    lanes: Vec<Arc<ImageLane>>,
    /// Writes dirty pages of the page cache to the disk during the reception; `None` with direct I/O. The remaining
    /// ones are written while the source's guest is stopped, so they should be few.
    flusher: Option<Arc<Mutex<Flusher>>>,
}

impl ImageTarget {
    pub(super) fn new(plan: ImagePlan) -> Self {
        Self { plan, state: Mutex::new(ReceivedImage::new()) }
    }

    pub(super) fn plan(&self) -> &ImagePlan {
        &self.plan
    }

    /// The received part of the machine.
    pub(super) fn shape(&self) -> Shape {
        let shape = Arc::clone(self.state.lock().machine.shape());
        Shape::clone(&shape)
    }

    /// Bytes of the machine's RAM, as far as known.
    pub(super) fn ram_bytes(&self) -> u64 {
        self.state.lock().machine.shape().ram_bytes()
    }

    fn lanes(
        &self,
        writer: &MappedWriter,
        start: &RamStart<'_>,
    ) -> Result<(Layout, Vec<Arc<ImageLane>>), MigrationError> {
        let block = |(name, length_bytes): (&str, u64)| RamBlock::without_memory(name, length_bytes);
        let ram = GuestRam::new(start.table.iter().map(block).collect::<Result<_, _>>()?)?;
        let mut lanes = Vec::new();
        for _ in 0..start.lanes {
            lanes.push(Arc::new(ImageLane::new(writer, None)?));
        }
        lanes.push(Arc::new(ImageLane::new(writer, Some(&ram))?));
        let sinks = lanes.iter().map(|lane| lane.clone() as Arc<dyn PageSink>).collect();
        Ok((Layout { ram, table: start.table.clone(), sinks }, lanes))
    }
}

impl ReceivedImage {
    fn new() -> Self {
        Self { machine: Gathered::default(), image: None, more_came: false }
    }
}

impl Target for ImageTarget {
    fn uuid(&self) -> Option<[u8; 16]> {
        None
    }

    fn expectations(&self, capabilities: &Capabilities) -> Expectations {
        Expectations {
            multifd: capabilities.multifd,
            // The machine type's version is unknown here. A START without a flush identifies the legacy form.
            accept_legacy_flush: true,
            background_snapshot: true,
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

    fn known_layout(&self, _: usize) -> Result<Option<Layout>, MigrationError> {
        Ok(None)
    }

    fn configuration(&self, configuration: &Configuration) -> Result<(), MigrationError> {
        self.state.lock().machine.configuration(configuration);
        Ok(())
    }

    fn command(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.state.lock().machine.command(bytes)
    }

    fn ram_starts(&self, start: &RamStart<'_>) -> Result<RamStarted, MigrationError> {
        let total = start.table.total_bytes().filter(|total| *total <= RAM_BYTES);
        if total.is_none() {
            return Err(MachineDifference::TooMuchRam { most: RAM_BYTES }.into());
        }
        let mut state = self.state.lock();
        state.machine.ram_starts(start);
        let writer = self.plan.begin(state.machine.shape())?;
        let (layout, lanes) = self.lanes(&writer, start)?;
        let file = writer.file();
        let flusher = (!file.is_direct()).then(|| Arc::new(Mutex::new(Flusher::start(file))));
        state.image = Some(Growing { writer, lanes, flusher });
        state.machine.ram_has_started();
        Ok(RamStarted { layout: Some(layout), warning: None })
    }

    fn ram_section_ended(&self, kind: SectionKind) {
        self.state.lock().machine.ram_section_ended(kind);
    }

    fn section(&self, section: &Section<'_>) -> Result<(), MigrationError> {
        self.state.lock().machine.section(section)
    }

    fn tail(&self) -> Option<Tail> {
        Some(self.state.lock().machine.tail())
    }

    fn devices_came(&self, tail: &Tail, end: &TailEnd) -> Result<(), MigrationError> {
        self.state.lock().machine.devices_came(tail, end)
    }

    fn end_came(&self, description: Option<Vec<u8>>) {
        let mut state = self.state.lock();
        state.machine.description(description);
        state.more_came = true;
    }

    fn finish_loading(&self) -> Result<bool, MigrationError> {
        let (image, shape) = {
            let mut state = self.state.lock();
            let shape = state.machine.finish()?;
            (state.image.clone(), shape)
        };
        let Some(image) = image else {
            return Err(Untimely::EndBeforeRam.into());
        };
        for lane in &image.lanes {
            lane.settle()?;
            lane.close();
        }
        if let Some(flusher) = &image.flusher {
            let mut flusher = flusher.lock();
            flusher.end().map_err(MigrationError::storage)?;
        }
        self.plan.keep(&image.writer, &shape)?;
        Ok(true)
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        Vec::new()
    }

    fn start(&self) -> Result<(), MigrationError> {
        let (image, shape, more_came) = {
            let state = self.state.lock();
            (state.image.clone(), Arc::clone(state.machine.shape()), state.more_came)
        };
        let Some(image) = image else {
            return Err(MigrationError::Internal(
                "an image is to be put in its place and there is none".to_owned(),
            ));
        };
        self.plan.complete(&image.writer, &shape, more_came)?;
        // The machine's data is no longer needed after the image is in place.
        self.state.lock().image = None;
        Ok(())
    }

    fn runs_guests(&self) -> bool {
        false
    }

    fn take_over_paused(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    fn keep_only_copy(&self) -> Option<PathBuf> {
        let image = self.state.lock().image.clone()?;
        Some(image.writer.file().keep())
    }

    fn reset(&self) -> Vec<String> {
        let state = std::mem::replace(&mut *self.state.lock(), ReceivedImage::new());
        // Dropping the writer of an incomplete image removes the image.
        if let Some(image) = state.image {
            image.lanes.iter().for_each(|lane| lane.close());
        }
        Vec::new()
    }

    fn cleared_pages(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna::error::Difference;
    use sterna_image::{Image, MappedOptions};
    use sterna_wire::main::{SectionHeader, encode_end, encode_footer};
    use sterna_wire::multifd::BlockTable;
    use sterna_wire::ram::{BlockEntry, BlockList};

    fn target(directory: &tempfile::TempDir) -> ImageTarget {
        let path = directory.path().join("image");
        ImageTarget::new(ImagePlan { path, options: MappedOptions::default(), convert: None })
    }

    fn section(kind: SectionKind, body: &[u8]) -> Section<'_> {
        Section { id: 3, name: "d", instance: 0, version: 1, kind, body }
    }

    #[test]
    fn section_and_command_beyond_what_a_reader_takes_are_refused_even_if_empty() {
        let directory = tempfile::tempdir().unwrap();
        let target = target(&directory);
        target.section(&section(SectionKind::Start, &vec![0; OPAQUE_BYTES - 100])).unwrap();

        let parts = (0..20).find_map(|_| target.section(&section(SectionKind::Part, &[])).err());
        let commands = (0..20).find_map(|_| target.command(&[8, 0, 11, 0, 0]).err());

        for error in [parts, commands] {
            assert!(
                matches!(
                    error,
                    Some(MigrationError::PeerIncompatible(Difference::Machine(
                        MachineDifference::TooMuchState { .. }
                    )))
                ),
                "{error:?}"
            );
        }
        let kept = target.state.lock().machine.shape().early.len();
        assert!((OPAQUE_BYTES - 100..=OPAQUE_BYTES).contains(&kept), "{kept}");
    }

    #[test]
    fn devices_of_the_most_bytes_that_are_taken_make_an_image_that_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let target = target(&directory);
        let list = BlockList { blocks: vec![BlockEntry::new("m0", 4096)] };
        let table = BlockTable::new(vec![("m0".to_owned(), 4096)]).unwrap();
        let start = RamStart { section_id: 1, blocks: &list, table: &table, lanes: 0, is_sterna: false };
        target.ram_starts(&start).unwrap();
        target.ram_section_ended(SectionKind::End);
        let mut bytes = Vec::new();
        SectionHeader { id: 5, name: "d", instance: 0, version: 1 }.encode_full(&mut bytes).unwrap();
        bytes.resize(OPAQUE_BYTES - 5, 0);
        encode_footer(5, &mut bytes);
        encode_end(&mut bytes);
        let mut tail = target.tail().unwrap();
        tail.push(&bytes).unwrap();
        let end = TailEnd { devices_bytes: OPAQUE_BYTES, has_eof: true, description: None };

        target.devices_came(&tail, &end).unwrap();
        target.finish_loading().unwrap();
        target.start().unwrap();

        let image = Image::open(&target.plan().path).expect("read");
        assert_eq!(image.shape().devices.len(), OPAQUE_BYTES);
        let more = TailEnd { devices_bytes: OPAQUE_BYTES + 1, ..end };
        assert!(matches!(
            target.devices_came(&tail, &more),
            Err(MigrationError::PeerIncompatible(Difference::Machine(
                MachineDifference::TooMuchState { .. }
            )))
        ));
    }
}
