//! Takes in a machine that nobody here knows: what its stream says of itself, and its pages, become an image.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_image::{BlockShape, MappedWriter, RamShape, Shape};
use sterna_ram::{GuestRam, RamBlock};
use sterna_wire::extension::Handover;
use sterna_wire::main::{
    BodyKind, Configuration, Expectations, SectionHeader, SectionKind, SectionKnowledge, Tail, TailEnd,
    encode_footer, encode_section_part,
};
use sterna_wire::ram;

use super::RAM_BYTES;
use super::lane::ImageLane;
use super::receive::ImagePlan;
use crate::error::MigrationError;
use crate::hooks::Hook;
use crate::incoming::target::{Layout, RamStart, RamStarted, Section, Target};
use crate::pages::PageSink;
use crate::params::Capabilities;
use crate::vm::Device;

const CHANNEL: &str = "main channel";

/// What grows into an image.
pub(super) struct Keeper {
    plan: ImagePlan,
    state: Mutex<State>,
}

struct State {
    shape: Shape,
    /// Names of the FULL sections that came before RAM.
    early: Vec<(String, u32)>,
    /// From the block list on.
    image: Option<Growing>,
    /// The description came after everything else had been made durable.
    more_came: bool,
}

struct Growing {
    writer: MappedWriter,
    /// Every lane; the main channel's is the last.
    lanes: Vec<Arc<ImageLane>>,
}

impl Keeper {
    pub fn new(plan: ImagePlan) -> Self {
        Self { plan, state: Mutex::new(State::new()) }
    }

    pub fn plan(&self) -> &ImagePlan {
        &self.plan
    }

    /// The machine as far as it has come.
    pub fn shape(&self) -> Shape {
        self.lock().shape.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

impl State {
    fn new() -> Self {
        Self { shape: Shape::empty(), early: Vec::new(), image: None, more_came: false }
    }

    /// Where bytes that stand between sections of RAM, or before them, are kept.
    fn kept(&mut self) -> &mut Vec<u8> {
        if self.image.is_some() { &mut self.shape.between } else { &mut self.shape.early }
    }
}

impl Target for Keeper {
    fn uuid(&self) -> Option<[u8; 16]> {
        None
    }

    fn expectations(&self, capabilities: &Capabilities) -> Expectations {
        Expectations {
            multifd: capabilities.multifd,
            // Without knowing the machine's version: a START without a flush says so.
            accept_legacy_flush: true,
            background_snapshot: true,
            opaque_tail: true,
            device_state_bytes: sterna_image::OPAQUE_BYTES as u64,
            ..Expectations::default()
        }
    }

    fn knowledge(&self) -> Box<dyn SectionKnowledge + Send> {
        Box::new(|name: &str, _: u32, _: u32, _: SectionKind| match name {
            ram::SECTION_NAME => BodyKind::Ram,
            // The migration's name, not the machine's: it does not go into the image.
            Handover::SECTION_NAME => BodyKind::LengthPrefixed { most: Handover::BODY_BYTES },
            _ => BodyKind::OpaqueByFooter,
        })
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }

    fn known_layout(&self, _: usize) -> Result<Option<Layout>, MigrationError> {
        Ok(None)
    }

    fn configuration(&self, configuration: &Configuration) -> Result<(), MigrationError> {
        let mut state = self.lock();
        state.shape.configuration = configuration.clone();
        state.shape.has_configuration = true;
        Ok(())
    }

    fn command(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.lock().kept().extend_from_slice(bytes);
        Ok(())
    }

    fn ram_starts(&self, start: &RamStart<'_>) -> Result<RamStarted, MigrationError> {
        let total = start.table.total_bytes().filter(|total| *total <= RAM_BYTES);
        if total.is_none() {
            let what =
                format!("the source's RAM is larger than {RAM_BYTES} bytes, the most that is taken in");
            return Err(MigrationError::PeerIncompatible { what });
        }
        let mut state = self.lock();
        let blocks = start.blocks.blocks.iter().map(|block| BlockShape {
            name: block.name.clone(),
            length_bytes: block.length_bytes,
            address: block.address,
            host_page_bytes: None,
            is_skipped: false,
        });
        state.shape.ram = RamShape { section_id: start.section_id, blocks: blocks.collect(), footers: true };
        let writer = self.plan.begin(&state.shape)?;
        let (layout, lanes) = self.lanes(&writer, start)?;
        state.image = Some(Growing { writer, lanes });
        Ok(RamStarted { layout: Some(layout), warning: None })
    }

    fn ram_section_ended(&self, kind: SectionKind) {
        self.lock().shape.has_end |= kind == SectionKind::End;
    }

    fn section(&self, section: &Section<'_>) -> Result<(), MigrationError> {
        let Section { id, name, instance, version, kind, body } = *section;
        let mut state = self.lock();
        let kept = state.kept();
        let header = SectionHeader { id, name, instance, version };
        match kind {
            SectionKind::Start => header.encode_start(kept),
            SectionKind::Full => header.encode_full(kept),
            SectionKind::Part | SectionKind::End => {
                encode_section_part(id, kind == SectionKind::End, kept);
                Ok(())
            }
        }
        .map_err(MigrationError::wire(CHANNEL))?;
        kept.extend_from_slice(body);
        encode_footer(id, kept);
        if kind == SectionKind::Full {
            state.early.push((name.to_owned(), instance));
        }
        Ok(())
    }

    fn tail(&self) -> Option<Tail> {
        Some(Tail::new(self.lock().early.clone()))
    }

    fn devices_came(&self, tail: &Tail, end: &TailEnd) -> Result<(), MigrationError> {
        let most = sterna_image::OPAQUE_BYTES;
        if end.devices_bytes > most {
            let what = format!("{} bytes of device state, more than {most}", end.devices_bytes);
            return Err(MigrationError::PeerIncompatible { what });
        }
        let mut state = self.lock();
        state.shape.devices = tail.bytes()[..end.devices_bytes].to_vec();
        state.shape.has_eof = end.has_eof;
        state.shape.description = end.description.clone().map(|range| tail.bytes()[range].to_vec());
        Ok(())
    }

    fn end_came(&self, description: Option<Vec<u8>>) {
        let mut state = self.lock();
        state.shape.description = description;
        state.more_came = true;
    }

    fn finish_loading(&self) -> Result<bool, MigrationError> {
        let mut state = self.lock();
        // A Sterna source commits behind this: the image must need nothing but its description then.
        state.shape.has_eof = true;
        let Some(image) = &state.image else {
            let what = "the stream ended and had no section of RAM".to_owned();
            return Err(MigrationError::PeerMisbehaved { what });
        };
        for lane in &image.lanes {
            lane.settle()?;
            lane.close();
        }
        self.plan.keep(&image.writer, &state.shape)?;
        Ok(true)
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        Vec::new()
    }

    fn start(&self) -> Result<(), MigrationError> {
        let mut state = self.lock();
        let Some(image) = &state.image else {
            return Err(MigrationError::Internal(
                "an image is to be put in its place and there is none".to_owned(),
            ));
        };
        self.plan.complete(&image.writer, &state.shape, state.more_came)?;
        // What was only gathered there is let go of.
        state.image = None;
        Ok(())
    }

    fn runs_guests(&self) -> bool {
        false
    }

    fn take_over_paused(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    fn reset(&self) -> Vec<String> {
        let state = std::mem::replace(&mut *self.lock(), State::new());
        // Dropped, an image that is not complete is gone.
        if let Some(image) = state.image {
            image.lanes.iter().for_each(|lane| lane.close());
        }
        Vec::new()
    }

    fn cleared_pages(&self) -> u64 {
        0
    }
}
