//! Plans an extraction: which parts of the image go to which places in the file.

use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use super::request::{ExtractOptions, Part};
use crate::ImageError;
use crate::model::BlockShape;
use crate::read::{Image, MappedPages};
use crate::tools::architecture::{Architecture, Unknown};
use crate::tools::elf::Load;
use crate::tools::memory_map::{MemoryMap, Region};
use crate::tools::paging::{self, Mapping};
use crate::tools::registers::Registers;
use crate::tools::state::State;

/// A range of a block with its place in the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copy {
    pub(super) block: usize,
    /// Offset in the block, in bytes.
    pub(super) from: u64,
    pub(super) length: u64,
    /// Offset in the file after the head, in bytes.
    pub(super) to: u64,
}

/// All copies of an extraction, and the data for a core's head.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) copies: Vec<Copy>,
    pub(super) length: u64,
    pub(super) is_core: bool,
    pub(super) is_virtual: bool,
    pub(super) loads: Vec<Load>,
    pub(super) architecture: Option<Architecture>,
    pub(super) processors: Vec<Registers>,
    map: MemoryMap,
    /// Bytes of guest RAM that are left out.
    pub(super) missing_bytes: u64,
    pub(super) notes: Vec<String>,
}

pub(super) struct Planner<'a> {
    pub(super) image: &'a Image,
    pub(super) options: &'a ExtractOptions,
}

impl Planner<'_> {
    pub(super) fn plan(&self, part: &Part) -> Result<Plan, ImageError> {
        match part {
            Part::Block(name) => self.block(name),
            Part::Range { start, length_bytes } => self.range(*start, *length_bytes),
            Part::Core { is_virtual } => self.core(*is_virtual),
        }
    }

    fn find(&self, name: &str) -> Result<usize, ImageError> {
        let blocks = &self.image.shape().ram.blocks;
        let found = blocks.iter().position(|block| block.name == name);
        found.ok_or_else(|| {
            let names: Vec<_> = blocks.iter().map(|block| block.name.as_str()).collect();
            ImageError::Request(format!("unknown block {name:?}; blocks are: {}", names.join(", ")))
        })
    }

    fn block(&self, name: &str) -> Result<Plan, ImageError> {
        let block = self.find(name)?;
        let shape = &self.image.shape().ram.blocks[block];
        if shape.is_skipped {
            return Err(ImageError::Request(format!(
                "the pages of block {name:?} are not in the image: it was shared memory (x-ignore-shared)"
            )));
        }
        let length = shape.length_bytes;
        Ok(Plan { copies: vec![Copy { block, from: 0, length, to: 0 }], length, ..Plan::default() })
    }

    fn map(&self, state: &State<'_>) -> Result<MemoryMap, ImageError> {
        let place = |(name, at): &(String, u64)| {
            let block = self.find(name)?;
            if !at.is_multiple_of(PAGE_SIZE as u64) {
                return Err(ImageError::Request(format!(
                    "block {name:?} cannot be at {at:#x}: memory addresses are multiples of {PAGE_SIZE}"
                )));
            }
            Ok((block, *at))
        };
        let placed: Result<Vec<_>, ImageError> = self.options.placed.iter().map(place).collect();
        Ok(state.memory_map(&placed?, self.options.architecture))
    }

    fn range(&self, start: u64, length: u64) -> Result<Plan, ImageError> {
        let state = State::of(self.image);
        let map = self.map(&state)?;
        let Some(end) = start.checked_add(length).filter(|end| *end <= i64::MAX as u64 && length > 0) else {
            return Err(ImageError::Request("the range is empty or ends beyond 2^63".into()));
        };
        let mut plan = Plan { length, ..Plan::default() };
        let mut missing = 0;
        let mut at = start;
        while at < end {
            let Some(region) = map.at(at) else {
                let next = map.regions.iter().map(|region| region.address).find(|address| *address > at);
                let next = next.unwrap_or(end).min(end);
                missing += next - at;
                at = next;
                continue;
            };
            let length = region.length_bytes.min(end - at);
            plan.copies.push(Copy { block: region.block, from: region.block_offset, length, to: at - start });
            at += length;
        }
        if let Some(main) = map.unplaced_main.filter(|_| missing > 0) {
            return Err(self.unplaced(main, &state));
        }
        if plan.copies.is_empty() {
            return Err(ImageError::Request(format!("there is no RAM at {start:#x} to {end:#x}")));
        }
        if missing > 0 {
            plan.notes.push(format!(
                "{missing} bytes of the range are not RAM of the image; they are written as zeros"
            ));
        }
        self.notes(&map, &mut plan);
        // The range may contain memory whose address is unknown.
        let unplaced = if missing > 0 { map.unplaced.clone() } else { Vec::new() };
        self.refuse_missing(unplaced, &mut plan)?;
        Ok(plan)
    }

    fn core(&self, is_virtual: bool) -> Result<Plan, ImageError> {
        let state = State::of(self.image);
        let architecture = self.architecture(&state)?;
        if is_virtual && architecture != Architecture::X86 {
            return Err(ImageError::Request(format!(
                "page tables can be read only for x86-64, but this machine is {architecture}: leave --virtual out"
            )));
        }
        let map = self.map(&state)?;
        if map.regions.is_empty() {
            return Err(ImageError::Request(
                "no block of the image has a known physical address; give them (--at BLOCK=ADDRESS)".into(),
            ));
        }
        let architecture = Some(architecture);
        let mut plan = Plan { is_core: true, is_virtual, architecture, ..Plan::default() };
        for region in &map.regions {
            let to = plan.length;
            let (block, from, length) = (region.block, region.block_offset, region.length_bytes);
            plan.copies.push(Copy { block, from, length, to });
            plan.loads.push(Load {
                virtual_address: region.address,
                physical_address: region.address,
                length_bytes: length,
                data_offset: to,
            });
            plan.length += length;
        }
        match state.registers() {
            _ if architecture != Some(Architecture::X86) => {
                plan.notes
                    .push("the core has no registers, because Sterna reads only the registers of x86".into());
            }
            Ok(processors) => plan.processors = processors,
            Err(why) => plan.notes.push(format!("the core has no registers: {why}")),
        }
        if self.options.architecture.is_none() && architecture == Some(Architecture::Aarch64) {
            plan.notes.push(
                "the guest is assumed to be 64-bit Arm: the image of a 32-bit guest looks the same, but Sterna cannot \
                 write cores of 32-bit guests"
                    .into(),
            );
        }
        self.notes(&map, &mut plan);
        self.refuse_missing(map.unplaced.clone(), &mut plan)?;
        plan.map = map;
        Ok(plan)
    }

    /// Refuses a plan that lacks some of the guest's RAM, unless the user accepts that.
    ///
    /// Missing are `unplaced` blocks, and blocks of the plan whose pages are not in the image.
    fn refuse_missing(&self, unplaced: Vec<usize>, plan: &mut Plan) -> Result<(), ImageError> {
        let blocks = &self.image.shape().ram.blocks;
        let is_ram = |block: &&BlockShape| !is_of_a_device(&block.name);
        let lost: Vec<_> = unplaced.iter().filter_map(|index| blocks.get(*index)).filter(is_ram).collect();
        let mut skipped: Vec<usize> = plan.copies.iter().map(|copy| copy.block).collect();
        skipped.dedup();
        let skipped: Vec<_> =
            skipped.iter().filter_map(|index| blocks.get(*index)).filter(|block| block.is_skipped).collect();
        plan.missing_bytes = lost.iter().chain(&skipped).map(|block| block.length_bytes).sum();
        if plan.missing_bytes == 0 || self.options.partial {
            return Ok(());
        }
        let names =
            |list: &[&BlockShape]| list.iter().map(|it| it.name.as_str()).collect::<Vec<_>>().join(", ");
        let mut why = Vec::new();
        if !lost.is_empty() {
            why.push(format!(
                "the addresses of {} are unknown: give them (--at BLOCK=ADDRESS)",
                names(&lost)
            ));
        }
        if !skipped.is_empty() {
            why.push(format!(
                "{} was shared memory (x-ignore-shared), whose pages are not in the image",
                names(&skipped)
            ));
        }
        let text = format!("{} bytes of guest RAM would be missing: {}", plan.missing_bytes, why.join("; "));
        Err(ImageError::Request(format!("{text}; --partial writes the file without them")))
    }

    /// The architecture from the user or the image.
    fn architecture(&self, state: &State<'_>) -> Result<Architecture, ImageError> {
        if let Some(known) = self.options.architecture {
            return Ok(known);
        }
        let machine = &self.image.shape().configuration.machine_type;
        state.architecture().map_err(|why| {
            let text = match why {
                Unknown::Machine => format!(
                    "the image does not contain the architecture of the machine {machine:?}, which a core needs: give \
                     --arch ({})",
                    Architecture::names()
                ),
                Unknown::ByteOrder => format!(
                    "the guest of a {machine} may have either byte order, and the image does not contain it: give \
                     --arch ppc64 or --arch ppc64le"
                ),
            };
            ImageError::Request(text)
        })
    }

    /// The error for a range that may be in `main`, the machine's unplaced RAM.
    fn unplaced(&self, main: usize, state: &State<'_>) -> ImageError {
        let shape = self.image.shape();
        let (machine, block) = (&shape.configuration.machine_type, &shape.ram.blocks[main].name);
        let is_known = self.options.architecture.is_some() || state.architecture().is_ok();
        ImageError::Request(if is_known {
            format!("the RAM address of the machine {machine:?} is unknown: give it (--at {block}=ADDRESS)")
        } else {
            format!(
                "the image does not contain the architecture of the machine {machine:?}, so the addresses of its RAM \
                 are unknown: give --arch ({}) or --at {block}=ADDRESS",
                Architecture::names()
            )
        })
    }

    /// Adds notes about omitted blocks and assumed addresses.
    fn notes(&self, map: &MemoryMap, plan: &mut Plan) {
        let blocks = &self.image.shape().ram.blocks;
        let mut unknown: Vec<_> = map.unplaced.iter().map(|index| blocks[*index].name.as_str()).collect();
        // Tables for the firmware and option ROMs are copied into RAM at boot.
        unknown.retain(|name| !name.starts_with("/rom@") && *name != "pc.rom");
        if !unknown.is_empty() {
            let names = unknown.join(", ");
            plan.notes
                .push(format!("left out, because their addresses are unknown: {names} (--at BLOCK=ADDRESS)"));
        }
        for (region, block) in
            map.regions.iter().filter_map(|region| Some((region, blocks.get(region.block)?)))
        {
            if block.is_skipped {
                let at = region.address;
                plan.notes.push(format!(
                    "block {:?} at {at:#x} is not in the image; it is written as zeros",
                    block.name
                ));
            }
        }
        if let Some(base) = map.assumed_base {
            let machine = &self.image.shape().configuration.machine_type;
            plan.notes.push(format!(
                "RAM is assumed to begin at {base:#x}, as in every {machine}, because the image does not contain the \
                 address (--at BLOCK=ADDRESS)"
            ));
        }
        let has_high = map.regions.iter().any(|region| region.address == 4 << 30);
        if map.split.is_some_and(|split| !split.is_from_cmos) && has_high {
            plan.notes.push(
                "the split of RAM below 4 GiB is assumed by the machine type, because the image does not contain it"
                    .into(),
            );
        }
    }
}

/// Whether a block without an address belongs to a device, not to the guest's RAM.
///
/// QEMU's names decide: a device's path (`0000:00:02.0/vga.vram`), a table or ROM for the firmware, video memory, a
/// flash drive.
fn is_of_a_device(name: &str) -> bool {
    let starts = ["/rom@", "system.flash", "pflash"];
    let ends = [".rom", ".bios", ".vram", ".vgavram", ".ramfb"];
    // `/objects/ID` is a memory backend.
    name.contains('/') && !name.starts_with("/objects/")
        || starts.iter().any(|start| name.starts_with(start))
        || ends.iter().any(|end| name.ends_with(end))
}

impl Plan {
    /// Adds segments for the mappings of the page tables, before the segments by physical address.
    pub(super) fn with_virtual_addresses(mut self, pages: &MappedPages) -> Result<Self, ImageError> {
        let in_kernel = |registers: &&Registers| registers.segments[1].selector & 3 == 0;
        let does_paging = |registers: &&Registers| registers.control[0] & 1 << 31 != 0;
        let mut candidates = self.processors.iter().filter(does_paging);
        let first = candidates.clone().find(in_kernel).or_else(|| candidates.next());
        let Some(registers) = first.copied() else {
            self.notes.push("no processor uses paging: virtual addresses equal physical addresses".into());
            return Ok(self);
        };
        let mut failure = None;
        let map = &self.map;
        let mut read = |at: u64, table: &mut paging::Table| -> bool {
            let page = PAGE_SIZE as u64;
            // A table cannot be in a block whose parts are not aligned to the processor's pages.
            let is_page =
                |region: &Region| region.length_bytes >= page && region.block_offset.is_multiple_of(page);
            let Some(region) = map.at(at).filter(is_page) else { return false };
            match pages.read(region.block, region.block_offset >> PAGE_SHIFT, table) {
                Ok(()) => true,
                Err(error) => {
                    failure = Some(error);
                    false
                }
            }
        };
        let found = paging::mappings(&registers, &mut read).unwrap_or_default();
        if let Some(error) = failure {
            return Err(error);
        }
        if !found.is_whole {
            self.notes.push("the page tables have more entries than the limit; the rest is left out".into());
        }
        let mut loads: Vec<Load> = found.list.iter().flat_map(|mapping| self.loads_of(mapping)).collect();
        // Physical addresses remain at virtual addresses without a mapping.
        for load in &self.loads {
            loads.extend(uncovered(load, &found.list));
        }
        self.loads = loads;
        Ok(self)
    }

    /// The segments of a mapping, limited to the parts that map RAM.
    fn loads_of(&self, mapping: &Mapping) -> Vec<Load> {
        let mut loads = Vec::new();
        let end = mapping.physical_address.saturating_add(mapping.length_bytes);
        for physical in self.loads.iter().filter(|load| load.virtual_address == load.physical_address) {
            let start = physical.physical_address.max(mapping.physical_address);
            let stop = (physical.physical_address + physical.length_bytes).min(end);
            if start < stop {
                loads.push(Load {
                    virtual_address: mapping.virtual_address.wrapping_add(start - mapping.physical_address),
                    physical_address: start,
                    length_bytes: stop - start,
                    data_offset: physical.data_offset + (start - physical.physical_address),
                });
            }
        }
        loads
    }
}

/// The parts of `load` at virtual addresses that `mappings` (in ascending order) do not use.
fn uncovered(load: &Load, mappings: &[Mapping]) -> Vec<Load> {
    let mut free = Vec::new();
    let end = load.virtual_address + load.length_bytes;
    let mut at = load.virtual_address;
    let part = |from: u64, to: u64| Load {
        virtual_address: from,
        physical_address: load.physical_address + (from - load.virtual_address),
        length_bytes: to - from,
        data_offset: load.data_offset + (from - load.virtual_address),
    };
    for mapping in mappings {
        let stop = mapping.virtual_address.saturating_add(mapping.length_bytes);
        if stop <= at {
            continue;
        }
        if mapping.virtual_address >= end {
            break;
        }
        if mapping.virtual_address > at {
            free.push(part(at, mapping.virtual_address));
        }
        at = stop;
    }
    if at < end {
        free.push(part(at, end));
    }
    free
}
