//! What the stream of an opaque machine says of it, gathered as it comes: a [`Shape`].

use std::sync::Arc;

use sterna_image::model::Beside;
use sterna_image::{BlockShape, OPAQUE_BYTES, RamShape, Shape};
use sterna_wire::extension::Handover;
use sterna_wire::main::{
    BodyKind, Configuration, SectionHeader, SectionKind, SectionKnowledge, Tail, TailEnd, encode_footer,
    encode_section_part,
};
use sterna_wire::ram;

use crate::error::MigrationError;
use crate::incoming::target::{RamStart, Section};

const CHANNEL: &str = "main channel";

/// All of a machine but its pages, as far as it has come.
pub(crate) struct Gathered {
    /// Shared, so that making it durable holds no lock: that takes as long as the disk.
    shape: Arc<Shape>,
    /// Names of the FULL sections that came before RAM's END.
    early: Vec<(String, u32)>,
    /// What stands between RAM's sections and after its END.
    beside: Beside,
    /// The block list has come.
    has_ram: bool,
}

/// How the sections of a machine are delimited of which nothing is known.
pub(crate) fn knowledge() -> Box<dyn SectionKnowledge + Send> {
    Box::new(|name: &str, _: u32, _: u32, _: SectionKind| match name {
        ram::SECTION_NAME => BodyKind::Ram,
        // The migration's name, not the machine's: it does not go into the shape.
        Handover::SECTION_NAME => BodyKind::LengthPrefixed { most: Handover::BODY_BYTES },
        _ => BodyKind::OpaqueByFooter,
    })
}

impl Gathered {
    pub(crate) fn new() -> Self {
        let (shape, beside) = (Arc::new(Shape::empty()), Beside::default());
        Self { shape, early: Vec::new(), beside, has_ram: false }
    }

    /// The machine as far as it has come.
    pub(crate) fn shape(&self) -> &Arc<Shape> {
        &self.shape
    }

    pub(crate) fn configuration(&mut self, configuration: &Configuration) {
        let shape = self.change();
        shape.configuration = configuration.clone();
        shape.has_configuration = true;
    }

    pub(crate) fn command(&mut self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.keep(None, &[bytes])
    }

    pub(crate) fn ram_starts(&mut self, start: &RamStart<'_>) {
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

    /// What comes from now on stands beside RAM.
    pub(crate) fn ram_has_started(&mut self) {
        self.has_ram = true;
    }

    pub(crate) fn ram_section_ended(&mut self, kind: SectionKind) {
        self.beside.ram_went_on(kind);
        self.change().has_end |= kind == SectionKind::End;
    }

    pub(crate) fn section(&mut self, section: &Section<'_>) -> Result<(), MigrationError> {
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

    pub(crate) fn tail(&self) -> Tail {
        Tail::new(self.early.clone())
    }

    pub(crate) fn devices_came(&mut self, tail: &Tail, end: &TailEnd) -> Result<(), MigrationError> {
        self.add_devices(&tail.bytes()[..end.devices_bytes])?;
        let shape = self.change();
        shape.has_eof = end.has_eof;
        shape.description = end.description.clone().map(|range| tail.bytes()[range].to_vec());
        Ok(())
    }

    pub(crate) fn description(&mut self, description: Option<Vec<u8>>) {
        self.change().description = description;
    }

    /// Everything was read: a source that asks to prepare before the tail has sent all of its devices.
    pub(crate) fn finish(&mut self) -> Result<Arc<Shape>, MigrationError> {
        self.add_devices(&[])?;
        // A Sterna source commits after this: the machine must need nothing but its description then.
        self.change().has_eof = true;
        Ok(Arc::clone(&self.shape))
    }

    fn change(&mut self) -> &mut Shape {
        Arc::make_mut(&mut self.shape)
    }

    /// Keeps bytes that stand before RAM or beside it: no more than a reader of an image takes.
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

    /// Adds to the devices what came before the tail, and `tail`.
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
    let what = format!("{bytes} bytes of device state in one place, more than {OPAQUE_BYTES}");
    MigrationError::PeerIncompatible { what }
}
