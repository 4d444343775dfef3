//! Collects the description of an opaque machine from its stream, as it arrives: a [`Shape`].

use std::sync::Arc;

use sterna::error::{MachineDifference, MigrationError};
use sterna::internals::{RamStart, Section};
use sterna_image::model::Beside;
use sterna_image::{BlockShape, OPAQUE_BYTES, RamShape, Shape};
use sterna_wire::extension::Handover;
use sterna_wire::main::{
    BodyKind, Configuration, SectionHeader, SectionKind, SectionKnowledge, Tail, TailEnd, encode_footer,
    encode_section_part,
};
use sterna_wire::ram;

const CHANNEL: &str = "main channel";

/// The received part of a machine, without its pages.
pub struct Gathered {
    /// Shared, so that no lock is held while it is made durable. That takes as long as the disk needs.
    shape: Arc<Shape>,
    /// Names of the FULL sections that arrived before RAM's END section.
    early: Vec<(String, u32)>,
    /// Bytes between RAM's sections and after its END section.
    beside: Beside,
    /// Whether the block list has arrived.
    has_ram: bool,
}

/// How to find the ends of an unknown machine's sections.
pub fn knowledge() -> Box<dyn SectionKnowledge + Send> {
    Box::new(|name: &str, _: u32, _: u32, _: SectionKind| match name {
        ram::SECTION_NAME => BodyKind::Ram,
        // Identifies the migration, not the machine. Therefore it is not part of the shape.
        Handover::SECTION_NAME => BodyKind::LengthPrefixed { most: Handover::BODY_BYTES },
        _ => BodyKind::OpaqueByFooter,
    })
}

impl Default for Gathered {
    fn default() -> Self {
        let (shape, beside) = (Arc::new(Shape::empty()), Beside::default());
        Self { shape, early: Vec::new(), beside, has_ram: false }
    }
}

#[doc(hidden)]
impl Gathered {
    /// The received part of the machine.
    pub fn shape(&self) -> &Arc<Shape> {
        &self.shape
    }

    pub fn configuration(&mut self, configuration: &Configuration) {
        let shape = self.change();
        shape.configuration = configuration.clone();
        shape.has_configuration = true;
    }

    pub fn command(&mut self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.keep(None, &[bytes])
    }

    pub fn ram_starts(&mut self, start: &RamStart<'_>) {
        let blocks = start.blocks.blocks.iter().map(|block| BlockShape {
            name: block.name.clone(),
            length_bytes: block.length_bytes,
            address: block.address,
            host_page_bytes: None,
            is_skipped: false,
        });
        self.change().ram =
            RamShape { section_id: start.section_id, blocks: blocks.collect(), footers: true };
    }

    /// Marks that further sections arrive after the start of RAM.
    pub fn ram_has_started(&mut self) {
        self.has_ram = true;
    }

    pub fn ram_section_ended(&mut self, kind: SectionKind) {
        self.beside.ram_went_on(kind);
        self.change().has_end |= kind == SectionKind::End;
    }

    pub fn section(&mut self, section: &Section<'_>) -> Result<(), MigrationError> {
        let Section { id, name, instance, version, kind, body } = *section;
        let header = SectionHeader { id, name, instance, version };
        let (mut head, mut foot) = (Vec::new(), Vec::new());
        match kind {
            SectionKind::Start => header.encode_start(&mut head),
            SectionKind::Full => header.encode_full(&mut head),
            SectionKind::Part | SectionKind::End => {
                encode_section_part(id, kind == SectionKind::End, &mut head);
                Ok(())
            }
        }
        .map_err(MigrationError::wire(CHANNEL))?;
        encode_footer(id, &mut foot);
        self.keep(Some(kind), &[&head, body, &foot])?;
        if kind == SectionKind::Full {
            self.early.push((name.to_owned(), instance));
        }
        Ok(())
    }

    pub fn tail(&self) -> Tail {
        Tail::new(self.early.clone())
    }

    pub fn devices_came(&mut self, tail: &Tail, end: &TailEnd) -> Result<(), MigrationError> {
        self.add_devices(&tail.bytes()[..end.devices_bytes])?;
        let shape = self.change();
        shape.has_eof = end.has_eof;
        shape.description = end.description.clone().map(|range| tail.bytes()[range].to_vec());
        Ok(())
    }

    pub fn description(&mut self, description: Option<Vec<u8>>) {
        self.change().description = description;
    }

    /// All input was read: a source that sends *prepare* before the tail has sent all of its devices.
    pub fn finish(&mut self) -> Result<Arc<Shape>, MigrationError> {
        self.add_devices(&[])?;
        // A Sterna source commits after this, so from now on only the description may be missing.
        self.change().has_eof = true;
        Ok(Arc::clone(&self.shape))
    }

    fn change(&mut self) -> &mut Shape {
        Arc::make_mut(&mut self.shape)
    }

    /// Keeps bytes before RAM, between its sections or after its END, up to the limit of an image's reader.
    fn keep(&mut self, kind: Option<SectionKind>, parts: &[&[u8]]) -> Result<(), MigrationError> {
        let Gathered { shape, beside, has_ram, .. } = self;
        let shape = Arc::make_mut(shape);
        let kept = if *has_ram { beside.place(shape, kind) } else { &mut shape.early };
        let bytes = parts.iter().map(|part| part.len()).sum::<usize>();
        if bytes > OPAQUE_BYTES.saturating_sub(kept.len()) {
            return Err(too_much(kept.len() + bytes));
        }
        parts.iter().for_each(|part| kept.extend_from_slice(part));
        Ok(())
    }

    /// Adds the bytes that arrived before the tail, and `tail`, to the devices.
    fn add_devices(&mut self, tail: &[u8]) -> Result<(), MigrationError> {
        let Gathered { shape, beside, .. } = self;
        let shape = Arc::make_mut(shape);
        let came = beside.devices(shape);
        let bytes = shape.devices.len() + came.len() + tail.len();
        if bytes > OPAQUE_BYTES {
            return Err(too_much(bytes));
        }
        shape.devices.extend_from_slice(&came);
        shape.devices.extend_from_slice(tail);
        Ok(())
    }
}

fn too_much(bytes: usize) -> MigrationError {
    MachineDifference::TooMuchState { bytes, most: OPAQUE_BYTES }.into()
}
