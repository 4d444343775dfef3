//! Taking memory out of an image: a block, a range of physical addresses, or a core file.
//!
//! What comes out is sparse: pages of zeros are holes. Where the file system can share blocks between files it
//! does. A core has the shape of QEMU's own `dump-guest-memory` (see [`elf`](super::elf)).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use serde::Serialize;
use sterna_transport::{CreateOptions, Direct, PageFile, PageQueue, QueueOptions};
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};

use super::architecture::{Architecture, Unknown};
use super::elf::{self, Load};
use super::memory_map::{MemoryMap, Region};
use super::paging::{self, Mapping};
use super::registers::Registers;
use super::spool;
use super::state::State;
use crate::ImageError;
use crate::read::{Image, MappedPages};

/// Bytes copied at once.
const PIECE: u64 = 1 << 20;

/// What is taken out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// A RAM block, by its name.
    Block(String),
    /// A range of guest physical addresses; what is not RAM there is zeros.
    Range {
        /// First address.
        start: u64,
        /// Length in bytes.
        length_bytes: u64,
    },
    /// An ELF core of all memory with a known address.
    Core {
        /// Whether a processor's page tables are followed, so that virtual addresses work without a kernel's help.
        is_virtual: bool,
    },
}

/// How it is taken out.
#[derive(Debug, Clone, Default)]
pub struct ExtractOptions {
    /// Replace a file that is there.
    pub replace: bool,
    /// Physical addresses of blocks, by name, where the user knows them.
    pub placed: Vec<(String, u64)>,
    /// What processors the machine has, where the user knows it better than the image tells.
    pub architecture: Option<Architecture>,
    /// Threads that copy; 0 for one per processor.
    pub threads: usize,
}

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Extracted {
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Bytes of pages with data in it.
    pub data_bytes: u64,
    /// Of these, bytes that share their place on the disk with the image.
    pub shared_bytes: u64,
    /// Loadable segments of a core.
    pub segments: usize,
    /// Processors with registers in a core.
    pub processors: usize,
    /// What processors a core is of; empty for anything else.
    pub architecture: &'static str,
    /// What a user should know.
    pub notes: Vec<String>,
}

/// Takes `part` out of `image` into a new file `to`, which is whole or absent.
///
/// # Errors
/// [`ImageError::Request`] for a block that is not there, a range without RAM; [`ImageError::SameFile`];
/// [`ImageError::NoBitmaps`]; [`ImageError::File`]; what is wrong with the image.
pub fn extract(
    image: &Image,
    part: &Part,
    to: &Path,
    options: &ExtractOptions,
) -> Result<Extracted, ImageError> {
    image.check_bitmaps()?;
    if image.is_at(to) {
        return Err(ImageError::SameFile { file: to.display().to_string() });
    }
    // Before the time that a spool takes.
    let create = CreateOptions { direct: Direct::Wanted, replace: options.replace, keep_bytes: 0 };
    let file = Arc::new(PageFile::create(to, create)?);
    let plan = Planner { image, options }.plan(part)?;
    let spool = spool::for_random_access(image, spool::beside(to))?;
    let source = spool.as_ref().unwrap_or(image);
    let Some(pages) = source.mapped() else {
        return Err(ImageError::Request(format!("{} has no pages at known places", image.path_name())));
    };
    let plan = match plan.is_virtual {
        true => plan.with_virtual_addresses(pages)?,
        false => plan,
    };
    let mut extracted = write(source, pages, &file, &plan, options)?;
    image.check_unchanged()?;
    file.complete()?;
    extracted.segments = plan.loads.len();
    extracted.processors = plan.processors.len();
    extracted.architecture = plan.architecture.map_or("", Architecture::name);
    extracted.notes = plan.notes;
    Ok(extracted)
}

/// A stretch of a block that goes to one place.
#[derive(Debug, Clone, Copy)]
struct Copy {
    block: usize,
    /// Offset in the block.
    from: u64,
    length: u64,
    /// Offset behind the head.
    to: u64,
}

#[derive(Debug, Default)]
struct Plan {
    copies: Vec<Copy>,
    length: u64,
    is_core: bool,
    is_virtual: bool,
    loads: Vec<Load>,
    architecture: Option<Architecture>,
    processors: Vec<Registers>,
    map: MemoryMap,
    notes: Vec<String>,
}

struct Planner<'a> {
    image: &'a Image,
    options: &'a ExtractOptions,
}

impl Planner<'_> {
    fn plan(&self, part: &Part) -> Result<Plan, ImageError> {
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
            ImageError::Request(format!("there is no block {name:?}; there are: {}", names.join(", ")))
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
                    "block {name:?} cannot lie at {at:#x}: addresses of memory are multiples of {PAGE_SIZE}"
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
            return Err(ImageError::Request(format!("no RAM lies at {start:#x} to {end:#x}")));
        }
        if missing > 0 {
            plan.notes.push(format!("{missing} bytes of the range are not RAM of the image; they are zeros"));
        }
        self.notes(&map, &mut plan);
        Ok(plan)
    }

    fn core(&self, is_virtual: bool) -> Result<Plan, ImageError> {
        let state = State::of(self.image);
        let architecture = self.architecture(&state)?;
        if is_virtual && architecture != Architecture::X86 {
            return Err(ImageError::Request(format!(
                "page tables are followed for x86-64 only, and this machine is of {architecture}: leave --virtual out"
            )));
        }
        let map = self.map(&state)?;
        if map.regions.is_empty() {
            return Err(ImageError::Request(
                "no block of the image has a known physical address; place them by hand (--at BLOCK=ADDRESS)"
                    .into(),
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
                plan.notes.push("no registers in the core: Sterna reads only those of x86".into());
            }
            Ok(processors) => plan.processors = processors,
            Err(why) => plan.notes.push(format!("no registers in the core: {why}")),
        }
        if self.options.architecture.is_none() && architecture == Some(Architecture::Aarch64) {
            plan.notes.push(
                "the guest is taken for one of 64-bit Arm: the image of a 32-bit one looks the same, and Sterna writes no \
                 cores of those"
                    .into(),
            );
        }
        self.notes(&map, &mut plan);
        plan.map = map;
        Ok(plan)
    }

    /// What the machine's processors are.
    fn architecture(&self, state: &State<'_>) -> Result<Architecture, ImageError> {
        if let Some(known) = self.options.architecture {
            return Ok(known);
        }
        let machine = &self.image.shape().configuration.machine_type;
        state.architecture().map_err(|why| {
            let text = match why {
                Unknown::Machine => format!(
                    "the image does not say what processors the machine {machine:?} has, and a core must: give --arch \
                     ({})",
                    Architecture::names()
                ),
                Unknown::ByteOrder => format!(
                    "the guest of a {machine} may have either byte order, and the image does not say which: give --arch \
                     ppc64 or --arch ppc64le"
                ),
            };
            ImageError::Request(text)
        })
    }

    /// Why a range that may be in block `main`, the machine's RAM, cannot be taken out.
    fn unplaced(&self, main: usize, state: &State<'_>) -> ImageError {
        let shape = self.image.shape();
        let (machine, block) = (&shape.configuration.machine_type, &shape.ram.blocks[main].name);
        let is_known = self.options.architecture.is_some() || state.architecture().is_ok();
        ImageError::Request(if is_known {
            format!(
                "where the machine {machine:?} has its RAM is not known: give its address (--at {block}=ADDRESS)"
            )
        } else {
            format!(
                "the image does not say what processors the machine {machine:?} has, and so not where its RAM lies: give \
                 --arch ({}) or --at {block}=ADDRESS",
                Architecture::names()
            )
        })
    }

    /// What is left out, and how sure the addresses are.
    fn notes(&self, map: &MemoryMap, plan: &mut Plan) {
        let blocks = &self.image.shape().ram.blocks;
        let mut unknown: Vec<_> = map.unplaced.iter().map(|index| blocks[*index].name.as_str()).collect();
        // Tables for the firmware and option ROMs are copied into RAM at boot.
        unknown.retain(|name| !name.starts_with("/rom@") && *name != "pc.rom");
        if !unknown.is_empty() {
            let names = unknown.join(", ");
            plan.notes
                .push(format!("left out, since their addresses are not known: {names} (--at BLOCK=ADDRESS)"));
        }
        for (region, block) in
            map.regions.iter().filter_map(|region| Some((region, blocks.get(region.block)?)))
        {
            if block.is_skipped {
                let at = region.address;
                plan.notes
                    .push(format!("block {:?} at {at:#x} is not in the image; it is zeros", block.name));
            }
        }
        if let Some(base) = map.assumed_base {
            let machine = &self.image.shape().configuration.machine_type;
            plan.notes.push(format!(
                "RAM is taken to begin at {base:#x}, as in every {machine}; the image does not say (--at BLOCK=ADDRESS)"
            ));
        }
        let has_high = map.regions.iter().any(|region| region.address == 4 << 30);
        if map.split.is_some_and(|split| !split.is_from_cmos) && has_high {
            plan.notes.push(
                "where RAM is split below 4 GiB is the machine type's rule; the image does not say".into(),
            );
        }
    }
}

impl Plan {
    /// Adds segments for what the page tables map, before those by physical address.
    fn with_virtual_addresses(mut self, pages: &MappedPages) -> Result<Self, ImageError> {
        let in_kernel = |registers: &&Registers| registers.segments[1].selector & 3 == 0;
        let does_paging = |registers: &&Registers| registers.control[0] & 1 << 31 != 0;
        let mut candidates = self.processors.iter().filter(does_paging);
        let first = candidates.clone().find(in_kernel).or_else(|| candidates.next());
        let Some(registers) = first.copied() else {
            self.notes.push("no processor does paging: virtual addresses are physical ones".into());
            return Ok(self);
        };
        let mut failure = None;
        let map = &self.map;
        let mut read = |at: u64, table: &mut paging::Table| -> bool {
            let page = PAGE_SIZE as u64;
            // Where a block's pages are none of the processor's, no table is.
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
            self.notes.push("the page tables have more entries than were followed".into());
        }
        let mut loads: Vec<Load> = found.list.iter().flat_map(|mapping| self.loads_of(mapping)).collect();
        // Physical addresses stay where no virtual ones are.
        for load in &self.loads {
            loads.extend(uncovered(load, &found.list));
        }
        self.loads = loads;
        Ok(self)
    }

    /// The segments of a mapping, as far as it maps RAM.
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

/// The parts of `load` at virtual addresses that `mappings`, which rise, leave free.
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

/// Writes head and pages.
fn write(
    image: &Image,
    pages: &MappedPages,
    file: &Arc<PageFile>,
    plan: &Plan,
    options: &ExtractOptions,
) -> Result<Extracted, ImageError> {
    let head = match plan.architecture {
        Some(architecture) if plan.is_core => elf::head(architecture, &plan.loads, &plan.processors),
        _ => Vec::new(),
    };
    let base = head.len() as u64;
    file.set_len(base + plan.length)?;
    let from = image.page_file(Direct::Off)?;
    let copier = Copier {
        pages,
        from: from.as_deref(),
        file,
        base,
        shares: AtomicBool::new(from.is_some()),
        data: AtomicU64::new(0),
        shared: AtomicU64::new(0),
    };
    let mut pieces = Vec::new();
    for copy in &plan.copies {
        let mut done = 0;
        while done < copy.length {
            let length = (PIECE - (copy.to + done) % PIECE).min(copy.length - done);
            pieces.push(Copy { from: copy.from + done, to: copy.to + done, length, ..*copy });
            done += length;
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = if options.threads == 0 { cores } else { options.threads };
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), ImageError> {
        let mut queue = PageQueue::new(file, QueueOptions::default());
        let mut buffer = vec![0; PIECE as usize];
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            copier.copy(piece, &mut queue, &mut buffer)?;
        }
        Ok(queue.drain()?)
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads.min(pieces.len()).max(1)).map(|_| scope.spawn(work)).collect();
        handles.into_iter().try_for_each(|handle| match handle.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    if !head.is_empty() {
        file.write_at(0, &[sterna_transport::IoPart::Bytes(&head)])?;
    }
    Ok(Extracted {
        file_bytes: base + plan.length,
        data_bytes: copier.data.into_inner(),
        shared_bytes: copier.shared.into_inner(),
        ..Extracted::default()
    })
}

struct Copier<'a> {
    pages: &'a MappedPages,
    from: Option<&'a PageFile>,
    file: &'a PageFile,
    base: u64,
    /// Whether the file system has not refused to share yet.
    shares: AtomicBool,
    data: AtomicU64,
    shared: AtomicU64,
}

impl Copier<'_> {
    fn copy(&self, piece: &Copy, queue: &mut PageQueue, buffer: &mut [u8]) -> Result<(), ImageError> {
        let block = &self.pages.blocks()[piece.block];
        if block.is_skipped {
            return Ok(());
        }
        // A range need not start or end with a page.
        let end = piece.from + piece.length;
        let mut page = piece.from >> PAGE_SHIFT;
        let last = end.div_ceil(PAGE_SIZE as u64);
        while let Some(run) = block.bitmap.next_run(page, last, last - page) {
            page = run.end();
            let start = (run.first << PAGE_SHIFT).max(piece.from);
            let stop = (run.end() << PAGE_SHIFT).min(end);
            let to = self.base + piece.to + (start - piece.from);
            self.data.fetch_add(stop - start, Ordering::Relaxed);
            if self.share(to, block.pages_offset + start, stop - start)? {
                continue;
            }
            // Ranges inside a page need the whole page first; pages are at most one more than the piece.
            let whole = (run.count as usize) << PAGE_SHIFT;
            let skip = (start - (run.first << PAGE_SHIFT)) as usize;
            if whole <= buffer.len() {
                self.pages.read(piece.block, run.first, &mut buffer[..whole])?;
                queue.write_bytes(to, &buffer[skip..skip + (stop - start) as usize])?;
            } else {
                let mut content = vec![0; whole];
                self.pages.read(piece.block, run.first, &mut content)?;
                queue.write_bytes(to, &content[skip..skip + (stop - start) as usize])?;
            }
        }
        Ok(())
    }

    fn share(&self, to: u64, at: u64, length: u64) -> Result<bool, ImageError> {
        let Some(from) = self.from.filter(|_| self.shares.load(Ordering::Relaxed)) else { return Ok(false) };
        let is_aligned = (to | at | length).is_multiple_of(PAGE_SIZE as u64);
        if !is_aligned {
            return Ok(false);
        }
        let shared = self.file.reflink_range(to, from, at, length)?;
        if shared {
            self.shared.fetch_add(length, Ordering::Relaxed);
        } else {
            self.shares.store(false, Ordering::Relaxed);
        }
        Ok(shared)
    }
}
