//! Splits the devices of an image into sections, and names their fields by the description.

use std::collections::BTreeMap;

use sterna_wire::global_state::GlobalState;

use super::architecture::{Architecture, Signs, Unknown};
use super::description::{Described, Description};
use super::memory_map::{MapBlock, MapHints, MemoryMap};
use super::registers::Registers;
use super::sections::{DeviceSection, ShapeWalk, Stop};
use crate::model::Shape;
use crate::read::Image;

/// The devices of an image, split into sections.
pub struct State<'a> {
    image: &'a Image,
    description: Option<Description>,
    /// FULL sections in stream order, early ones first.
    pub sections: Vec<Section<'a>>,
    /// Other live devices, in the order of their START sections.
    pub live: Vec<Live<'a>>,
    /// Commands between RAM's sections: number and body.
    pub commands: Vec<(u16, &'a [u8])>,
    /// Whether these lists are complete: all bytes were separated, and the stream has EOF.
    ///
    /// Errors of the description do not count.
    pub is_whole: bool,
}

/// One FULL section with its body.
#[derive(Debug, Clone)]
pub struct Section<'a> {
    /// Decoded header of the section.
    pub header: DeviceSection,
    /// Body without header and footer.
    pub body: &'a [u8],
    /// Whether the section is loaded before RAM.
    pub is_early: bool,
}

/// A live device: it sends its state in parts between RAM's sections (START, PARTs, END).
#[derive(Debug, Clone)]
pub struct Live<'a> {
    /// Decoded header of its START section.
    pub header: DeviceSection,
    /// The bodies of START, PARTs and END, in stream order.
    pub bodies: Vec<&'a [u8]>,
    /// Whether the stream has its END section.
    pub has_end: bool,
}

impl Live<'_> {
    /// Length of all bodies in bytes.
    pub fn bytes(&self) -> u64 {
        self.bodies.iter().map(|body| body.len() as u64).sum()
    }
}

impl<'a> State<'a> {
    /// Splits the devices of `image`, as far as possible.
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
        // Each START has a unique section number.
        let mut live_of: BTreeMap<u32, usize> = BTreeMap::new();
        for (index, (walk, bytes)) in walk.stretches(shape).into_iter().enumerate() {
            // QEMU 10.0 writes sections that it loads before RAM's pages after RAM's START.
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

    /// The description of a section; none if it is missing or does not match.
    pub fn described(&self, section: &Section<'_>) -> Option<&Described> {
        self.description.as_ref()?.devices().get(section.header.described?)
    }

    /// The section with that name and instance.
    pub fn find(&self, name: &str, instance: u32) -> Option<&Section<'a>> {
        self.sections
            .iter()
            .find(|section| section.header.name == name && section.header.instance == instance)
    }

    /// Run state of the guest before it was stopped, such as `running` or `paused`.
    pub fn run_state(&self) -> Option<String> {
        let section = self.find("globalstate", 0)?;
        GlobalState::decode(section.body).ok().map(|state| state.run_state)
    }

    /// The registers of all processors, by ascending instance.
    ///
    /// # Errors
    /// The reason why there are none, as a sentence.
    pub fn registers(&self) -> Result<Vec<Registers>, String> {
        let mut found: Vec<_> = self.sections.iter().filter(|section| section.header.name == "cpu").collect();
        found.sort_by_key(|section| section.header.instance);
        if found.is_empty() {
            return Err("the image has no section of a processor".into());
        }
        let registers: Option<Vec<_>> =
            found.iter().map(|section| Registers::find(self.described(section)?, section.body)).collect();
        registers.ok_or_else(|| {
            "the description does not contain the place of the processors' registers".to_owned()
        })
    }

    /// The bytes of a top-level field.
    pub fn field(&self, name: &str, instance: u32, field: &str) -> Option<&'a [u8]> {
        let section = self.find(name, instance)?;
        let (place, _) = self.described(section)?.field(field)?;
        let start = usize::try_from(place.offset).ok()?;
        section.body.get(start..start.checked_add(usize::try_from(place.bytes).ok()?)?)
    }

    /// Determines the architecture of the machine.
    ///
    /// # Errors
    /// [`Unknown`] if the image does not identify it.
    pub fn architecture(&self) -> Result<Architecture, Unknown> {
        let shape = self.image.shape();
        Architecture::of(&Signs {
            machine_type: &shape.configuration.machine_type,
            blocks: &shape.ram.blocks,
            has_x86_registers: self.registers().is_ok(),
        })
    }

    /// Maps blocks to physical memory. `placed` and `architecture` come from the user and have precedence.
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
            // RAM of both byte orders has the same address.
            Err(Unknown::ByteOrder) => Some(Architecture::Ppc64),
            told => told.ok(),
        };
        let architecture = architecture.or_else(told);
        MemoryMap::of(&blocks, &MapHints { architecture, machine_type, cmos, placed })
    }

    /// The address of a virtio-mem block, from its device's early section.
    fn virtio_mem_address(&self, block: &str) -> Option<u64> {
        let (path, _) = block.rsplit_once('/')?;
        let section = self.find(&format!("{path}/virtio-mem-device-early"), 0)?;
        let place = self.described(section)?.nested("tmp", 0, "addr")?;
        let bytes = section.body.get(usize::try_from(place.offset).ok()?..)?.first_chunk::<8>()?;
        (place.bytes == 8).then(|| u64::from_be_bytes(*bytes))
    }
}
