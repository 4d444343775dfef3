//! The devices of an image, taken apart: each section's body, and by the description its fields.

use std::collections::BTreeMap;

use sterna_wire::global_state::GlobalState;

use super::architecture::{Architecture, Signs, Unknown};
use super::description::{Described, Description};
use super::memory_map::{MapBlock, MapHints, MemoryMap};
use super::registers::Registers;
use super::sections::{DeviceSection, ShapeWalk, Stop};
use crate::model::Shape;
use crate::read::Image;

/// The devices of an image.
pub struct State<'a> {
    image: &'a Image,
    description: Option<Description>,
    /// FULL sections in stream order, early ones first.
    pub sections: Vec<Section<'a>>,
    /// Devices that live beside RAM, in the order of their STARTs.
    pub live: Vec<Live<'a>>,
    /// Commands between RAM's sections: number and body.
    pub commands: Vec<(u16, &'a [u8])>,
    /// Whether every section is in these lists: all bytes could be told apart, and the stream is not truncated. What the
    /// description says wrongly does not matter.
    pub is_whole: bool,
}

/// One FULL section.
#[derive(Debug, Clone)]
pub struct Section<'a> {
    /// What its header says.
    pub header: DeviceSection,
    /// Its body.
    pub body: &'a [u8],
    /// Whether it is loaded before RAM.
    pub is_early: bool,
}

/// A device that sends its state bit by bit beside RAM: START, PARTs, END.
#[derive(Debug, Clone)]
pub struct Live<'a> {
    /// What the header of its START says.
    pub header: DeviceSection,
    /// The bodies of START, PARTs and END, in stream order.
    pub bodies: Vec<&'a [u8]>,
    /// Whether its END was there.
    pub has_end: bool,
}

impl Live<'_> {
    /// Bytes of all its bodies.
    pub fn bytes(&self) -> u64 {
        self.bodies.iter().map(|body| body.len() as u64).sum()
    }
}

impl<'a> State<'a> {
    /// Takes the devices of `image` apart, as far as they can be.
    pub fn of(image: &'a Image) -> Self {
        let shape = image.shape();
        let description = shape.description.as_deref().and_then(|text| Description::parse(text).ok());
        let mut state = Self {
            image,
            description,
            sections: Vec::new(),
            live: Vec::new(),
            commands: Vec::new(),
            is_whole: shape.has_eof && shape.ram.footers,
        };
        if shape.ram.footers {
            state.take(shape);
        }
        state
    }

    fn take(&mut self, shape: &'a Shape) {
        let walk = ShapeWalk::of(shape, self.description.as_ref());
        let commands = walk.between.commands.iter();
        self.commands = commands.map(|command| (command.number, &shape.between[command.body()])).collect();
        // Each START has a number of its own.
        let mut live_of: BTreeMap<u32, usize> = BTreeMap::new();
        for (index, (walk, bytes)) in walk.stretches(shape).into_iter().enumerate() {
            // QEMU 10.0 puts after RAM's START what it loads before RAM's pages.
            let is_early = index < 2;
            self.is_whole &= walk.stop == Stop::Whole;
            for header in &walk.starts {
                live_of.insert(header.id, self.live.len());
                let bodies = vec![&bytes[header.body()]];
                self.live.push(Live { header: header.clone(), bodies, has_end: false });
            }
            for part in &walk.parts {
                if let Some(live) = live_of.get(&part.id).and_then(|index| self.live.get_mut(*index)) {
                    live.bodies.push(&bytes[part.body()]);
                    live.has_end |= part.is_end;
                }
            }
            self.sections.extend(walk.sections.iter().map(|header| {
                let body = &bytes[header.body()];
                Section { header: header.clone(), body, is_early }
            }));
        }
    }

    /// The description of a section, if it has one that fits.
    pub fn described(&self, section: &Section<'_>) -> Option<&Described> {
        self.description.as_ref()?.devices().get(section.header.described?)
    }

    /// The section of that name and instance.
    pub fn find(&self, name: &str, instance: u32) -> Option<&Section<'a>> {
        self.sections
            .iter()
            .find(|section| section.header.name == name && section.header.instance == instance)
    }

    /// What the guest was doing before it was stopped: `running`, `paused`, ….
    pub fn run_state(&self) -> Option<String> {
        let section = self.find("globalstate", 0)?;
        GlobalState::decode(section.body).ok().map(|state| state.run_state)
    }

    /// The registers of all processors, by rising instance.
    ///
    /// # Errors
    /// Why there are none, as a sentence.
    pub fn registers(&self) -> Result<Vec<Registers>, String> {
        let mut found: Vec<_> = self.sections.iter().filter(|section| section.header.name == "cpu").collect();
        found.sort_by_key(|section| section.header.instance);
        if found.is_empty() {
            return Err("the image has no section of a processor".into());
        }
        let registers: Option<Vec<_>> =
            found.iter().map(|section| Registers::find(self.described(section)?, section.body)).collect();
        registers.ok_or_else(|| "the description does not say where the processors' registers are".to_owned())
    }

    /// The bytes of a field.
    pub fn field(&self, name: &str, instance: u32, field: &str) -> Option<&'a [u8]> {
        let section = self.find(name, instance)?;
        let (place, _) = self.described(section)?.field(field)?;
        let start = usize::try_from(place.offset).ok()?;
        section.body.get(start..start.checked_add(usize::try_from(place.bytes).ok()?)?)
    }

    /// What processors the machine has.
    ///
    /// # Errors
    /// The image does not tell.
    pub fn architecture(&self) -> Result<Architecture, Unknown> {
        let shape = self.image.shape();
        Architecture::of(&Signs {
            machine_type: &shape.configuration.machine_type,
            blocks: &shape.ram.blocks,
            has_x86_registers: self.registers().is_ok(),
        })
    }

    /// Where blocks lie in physical memory; `placed` are addresses, and `architecture` the processors, that the user
    /// gives.
    pub fn memory_map(&self, placed: &[(usize, u64)], architecture: Option<Architecture>) -> MemoryMap {
        let shape = self.image.shape();
        let blocks: Vec<_> = shape
            .ram
            .blocks
            .iter()
            .map(|block| MapBlock { name: block.name.clone(), length_bytes: block.length_bytes })
            .collect();
        let mut placed = placed.to_vec();
        for (index, block) in blocks.iter().enumerate() {
            if placed.iter().all(|(known, _)| *known != index)
                && let Some(address) = self.virtio_mem_address(&block.name)
            {
                placed.push((index, address));
            }
        }
        let machine_type = &shape.configuration.machine_type;
        let cmos = self.field("mc146818rtc", 0, "cmos_data");
        let told = || match self.architecture() {
            // Both have it at the same place.
            Err(Unknown::ByteOrder) => Some(Architecture::Ppc64),
            told => told.ok(),
        };
        let architecture = architecture.or_else(told);
        MemoryMap::of(&blocks, &MapHints { architecture, machine_type, cmos, placed })
    }

    /// The address that the virtio-mem device of this block's path states in its early section.
    fn virtio_mem_address(&self, block: &str) -> Option<u64> {
        let (path, _) = block.rsplit_once('/')?;
        let section = self.find(&format!("{path}/virtio-mem-device-early"), 0)?;
        let place = self.described(section)?.nested("tmp", 0, "addr")?;
        let bytes = section.body.get(usize::try_from(place.offset).ok()?..)?.first_chunk::<8>()?;
        (place.bytes == 8).then(|| u64::from_be_bytes(*bytes))
    }
}
