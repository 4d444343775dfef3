//! Compares two images: pages, configuration, and devices down to their fields.
//!
//! The forms do not count: a converted image is equal to its source. Therefore the capability `mapped-ram`, and the
//! description's part about capabilities, are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use sterna_wire::{PAGE_SHIFT, PAGE_SIZE};
use xxhash_rust::xxh3::xxh3_64;

use super::sections::DeviceSection;
use super::spool;
use super::state::{Live, Section, State};
use crate::ImageError;
use crate::crew;
use crate::model::{BlockShape, Shape};
use crate::read::{Image, MappedPages};

/// Pages that a thread compares in one step (1 MiB).
const PIECE_PAGES: u64 = 256;
/// The limit of differing fields that are named for a section.
const NAMED_FIELDS: usize = 32;

/// Options of a comparison.
#[derive(Debug, Clone)]
pub struct DiffOptions {
    /// Threads that read pages; 0 means one for each CPU.
    pub threads: usize,
    /// The limit of page ranges that are listed for each block.
    pub ranges: usize,
}

impl Default for DiffOptions {
    fn default() -> Self {
        Self { threads: 0, ranges: 16 }
    }
}

/// The result of a comparison.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Formats of the two images. Equal images may have different formats.
    pub kinds: [String; 2],
    /// Differences in the configuration and in the stream's shape.
    pub configuration: Vec<Pair>,
    /// RAM blocks that differ in length or content.
    pub blocks: Vec<BlockDifference>,
    /// Device sections that differ.
    pub sections: Vec<SectionDifference>,
    /// Whether the descriptions differ in their devices.
    pub description: bool,
    /// Number of pages that were compared.
    pub compared_pages: u64,
}

impl Difference {
    /// Whether both images contain the same machine in the same state.
    pub fn is_same(&self) -> bool {
        self.configuration.is_empty()
            && self.blocks.is_empty()
            && self.sections.is_empty()
            && !self.description
    }
}

/// A property with its values in both images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// Name of the property.
    pub what: String,
    /// Value in the first image.
    pub a: String,
    /// Value in the second image.
    pub b: String,
}

/// A block that differs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct BlockDifference {
    /// Name of the block.
    pub name: String,
    /// Length in bytes in each image; none if the block is missing there.
    pub length_bytes: [Option<u64>; 2],
    /// The reason why the pages were not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_compared: Option<String>,
    /// Number of pages that differ.
    pub pages: u64,
    /// Ranges of differing pages, as first page and count; limited to [`DiffOptions::ranges`].
    pub ranges: Vec<(u64, u64)>,
    /// Number of all ranges.
    pub range_count: u64,
}

/// A section that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SectionDifference {
    /// Name of the section.
    pub name: String,
    /// Instance number of the section.
    pub instance: u32,
    /// Length of the body in bytes in each image; none if missing there.
    pub bytes: [Option<u64>; 2],
    /// Version in each image; none if the section is missing there.
    pub versions: [Option<u32>; 2],
    /// Number of bytes that differ within the common length of the bodies.
    pub differing_bytes: u64,
    /// The first 32 fields that differ.
    pub fields: Vec<Pair>,
    /// Whether more than these fields differ.
    pub has_more: bool,
}

/// Compares `a` with `b`. Images without random access to pages are first copied into `directory`.
///
/// # Errors
/// The error of a damaged image; [`ImageError::Io`].
pub fn diff(a: &Image, b: &Image, directory: &Path, options: &DiffOptions) -> Result<Difference, ImageError> {
    a.check_bitmaps()?;
    b.check_bitmaps()?;
    let mut difference =
        Difference { kinds: [a, b].map(|image| image.format().to_string()), ..Difference::default() };
    difference.configuration = configuration(a.shape(), b.shape());
    let (state_a, state_b) = (State::of(a), State::of(b));
    difference.sections = sections(&state_a, &state_b);
    if state_a.is_whole && state_b.is_whole {
        order(&state_a, &state_b, &mut difference);
        let (a, b) = (commands(&state_a), commands(&state_b));
        opaque("commands between RAM's sections", &a, &b, &mut difference);
    } else {
        let (a, b) = (a.shape(), b.shape());
        opaque("sections before RAM (not separable)", &a.early, &b.early, &mut difference);
        opaque("data between RAM's sections", &beside(a), &beside(b), &mut difference);
        opaque("devices (not separable)", &a.devices, &b.devices, &mut difference);
    }
    live(&state_a, &state_b, &mut difference);
    difference.description = described(a.shape()) != described(b.shape());
    let spools = [
        spool::for_random_access(a, directory.to_owned())?,
        spool::for_random_access(b, directory.to_owned())?,
    ];
    let (with_a, with_b) = (spools[0].as_ref().unwrap_or(a), spools[1].as_ref().unwrap_or(b));
    if let (Some(pages_a), Some(pages_b)) = (with_a.mapped(), with_b.mapped()) {
        blocks(pages_a, pages_b, options, &mut difference)?;
    }
    a.check_unchanged()?;
    b.check_unchanged()?;
    Ok(difference)
}

fn beside(shape: &Shape) -> Vec<u8> {
    [&shape.setup[..], &shape.between].concat()
}

/// The commands between RAM's sections, as bytes of the stream.
fn commands(state: &State<'_>) -> Vec<u8> {
    let bytes = |(number, body): &(u16, &[u8])| {
        [&number.to_be_bytes()[..], &(body.len() as u16).to_be_bytes(), *body].concat()
    };
    state.commands.iter().flat_map(bytes).collect()
}

/// Name, instance, and a counter for sections that share both. In a valid stream the counter is always 1.
type Key<'s> = (&'s str, u32, usize);

/// Counts sections with equal name and instance.
#[derive(Default)]
struct Keys<'s>(BTreeMap<(&'s str, u32), usize>);

impl<'s> Keys<'s> {
    fn of(&mut self, header: &'s DeviceSection) -> Key<'s> {
        let (name, instance) = (header.name.as_str(), header.instance);
        let count = self.0.entry((name, instance)).or_default();
        *count += 1;
        (name, instance, *count)
    }

    fn of_all(headers: impl IntoIterator<Item = &'s DeviceSection>) -> Vec<Key<'s>> {
        let mut keys = Self::default();
        headers.into_iter().map(|header| keys.of(header)).collect()
    }
}

/// The keys of the FULL sections in stream order.
fn keys<'s>(state: &'s State<'_>) -> Vec<Key<'s>> {
    Keys::of_all(state.sections.iter().map(|section| &section.header))
}

/// Reports devices that are the same but have another order.
fn order(a: &State<'_>, b: &State<'_>, difference: &mut Difference) {
    let (a, b) = (keys(a), keys(b));
    if a != b && a.iter().collect::<BTreeSet<_>>() == b.iter().collect() {
        let text = |keys: &[Key<'_>]| keys.iter().map(|key| key.0).collect::<Vec<_>>().join(", ");
        difference.configuration.push(Pair { what: "order of devices".into(), a: text(&a), b: text(&b) });
    }
}

/// Compares the sections of other live devices between RAM's sections.
///
/// Sterna does not decode them. Therefore each device's bytes are compared as a whole. The number of PARTs does not
/// count.
fn live(a: &State<'_>, b: &State<'_>, difference: &mut Difference) {
    let mut both: BTreeMap<Key<'_>, [Option<&Live<'_>>; 2]> = BTreeMap::new();
    for (side, state) in [a, b].into_iter().enumerate() {
        let keys = Keys::of_all(state.live.iter().map(|live| &live.header));
        for (key, live) in keys.into_iter().zip(&state.live) {
            both.entry(key).or_default()[side] = Some(live);
        }
    }
    for ((name, instance, _), sides) in &both {
        let what = format!("{name} instance {instance} (next to RAM)");
        let [a, b] = sides.map(|live| live.map_or(String::new(), |live| live.header.version.to_string()));
        if a != b {
            difference.configuration.push(Pair { what: format!("version of {what}"), a, b });
        }
        let [a, b] = sides.map(|live| live.map_or(Vec::new(), |live| live.bodies.concat()));
        opaque(&what, &a, &b, difference);
    }
}

/// Compares bytes that Sterna cannot split into sections.
fn opaque(what: &str, a: &[u8], b: &[u8], difference: &mut Difference) {
    if a != b {
        let text = |bytes: &[u8]| match bytes.len() {
            0..=32 => hex(bytes),
            length => format!("{length} bytes, XXH3 {:016x}", xxh3_64(bytes)),
        };
        difference.configuration.push(Pair { what: what.into(), a: text(a), b: text(b) });
    }
}

fn configuration(a: &Shape, b: &Shape) -> Vec<Pair> {
    let mut pairs = Vec::new();
    let mut pair = |what: &str, a: String, b: String| {
        if a != b {
            pairs.push(Pair { what: what.into(), a, b });
        }
    };
    let capabilities = |shape: &Shape| {
        let names: Vec<_> =
            shape.configuration.capabilities.iter().filter(|name| *name != "mapped-ram").cloned().collect();
        names.join(", ")
    };
    let uuid = |shape: &Shape| shape.configuration.uuid.map_or(String::new(), |uuid| hex(&uuid));
    let yes = |value: bool| if value { "yes" } else { "no" }.to_owned();
    pair("machine type", a.configuration.machine_type.clone(), b.configuration.machine_type.clone());
    pair("capabilities", capabilities(a), capabilities(b));
    pair("uuid", uuid(a), uuid(b));
    pair("RAM has an END", yes(a.has_end), yes(b.has_end));
    pair("stream is complete", yes(a.has_eof), yes(b.has_eof));
    pair("sections have footers", yes(a.ram.footers), yes(b.ram.footers));
    let order = |shape: &Shape| {
        let names: Vec<_> = shape.ram.blocks.iter().map(|block| block.name.as_str()).collect();
        names.join(", ")
    };
    for block in &a.ram.blocks {
        let address = |block: &BlockShape| block.address.map_or(String::new(), |at| format!("{at:#x}"));
        if let Some(other) = b.ram.blocks.iter().find(|other| other.name == block.name) {
            pair(&format!("address of block {}", block.name), address(block), address(other));
        }
    }
    let sorted = |shape: &Shape| {
        let mut names: Vec<_> = shape.ram.blocks.iter().map(|block| block.name.clone()).collect();
        names.sort();
        names
    };
    if sorted(a) == sorted(b) {
        pair("order of blocks", order(a), order(b));
    }
    pairs
}

/// The devices of the description, as a comparable JSON value.
fn described(shape: &Shape) -> Option<serde_json::Value> {
    sterna_wire::vmdesc::parse(shape.description.as_deref()?).ok()?.get("devices").cloned()
}

fn sections(a: &State<'_>, b: &State<'_>) -> Vec<SectionDifference> {
    type Both<'s> = (Option<&'s Section<'s>>, Option<&'s Section<'s>>);
    // The first image gives the order. Sections that only the second image has follow.
    let mut order = Vec::new();
    let mut both: BTreeMap<Key<'_>, Both<'_>> = BTreeMap::new();
    for (key, section) in keys(a).into_iter().zip(&a.sections) {
        order.push(key);
        both.entry(key).or_default().0 = Some(section);
    }
    for (key, section) in keys(b).into_iter().zip(&b.sections) {
        let entry = both.entry(key).or_default();
        if entry.0.is_none() {
            order.push(key);
        }
        entry.1 = Some(section);
    }
    let differs = |key: &Key<'_>| {
        let (first, second) = both[key];
        section(key, a, first, second)
    };
    order.iter().filter_map(differs).collect()
}

fn section(
    key: &Key<'_>,
    state: &State<'_>,
    a: Option<&Section<'_>>,
    b: Option<&Section<'_>>,
) -> Option<SectionDifference> {
    let bytes = |section: Option<&Section<'_>>| section.map(|section| section.body.len() as u64);
    let version = |section: Option<&Section<'_>>| section.map(|section| section.header.version);
    let mut difference = SectionDifference {
        name: key.0.to_owned(),
        instance: key.1,
        bytes: [bytes(a), bytes(b)],
        versions: [version(a), version(b)],
        differing_bytes: 0,
        fields: Vec::new(),
        has_more: false,
    };
    if let (Some(a), Some(b)) = (a, b) {
        if a.body == b.body && a.header.version == b.header.version {
            return None;
        }
        difference.differing_bytes = a.body.iter().zip(b.body).filter(|(a, b)| a != b).count() as u64;
        fields(state, a, b, &mut difference);
    }
    Some(difference)
}

/// Names the fields in which the bodies differ.
fn fields(state: &State<'_>, a: &Section<'_>, b: &Section<'_>, difference: &mut SectionDifference) {
    let Some(described) = state.described(a) else { return };
    let common = a.body.len().min(b.body.len());
    let mut at = 0;
    while let Some(ahead) = a.body[at..common].iter().zip(&b.body[at..common]).position(|(a, b)| a != b) {
        at += ahead;
        if difference.fields.len() == NAMED_FIELDS {
            difference.has_more = true;
            return;
        }
        let place = described.locate(at as u64);
        let start = (place.offset as usize).min(at);
        let end =
            usize::try_from(place.offset.saturating_add(place.bytes)).unwrap_or(common).clamp(at + 1, common);
        let what = if place.path.is_empty() { format!("byte {at}") } else { place.path };
        difference.fields.push(Pair { what, a: value(&a.body[start..end]), b: value(&b.body[start..end]) });
        at = end;
    }
}

/// Formats a field: a number if its size allows it, otherwise bytes.
fn value(bytes: &[u8]) -> String {
    match bytes.len() {
        1 | 2 | 4 | 8 => format!("0x{}", hex(bytes)),
        0..=32 => hex(bytes),
        length => format!("{}… ({length} bytes)", hex(&bytes[..32])),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn blocks(
    a: &MappedPages,
    b: &MappedPages,
    options: &DiffOptions,
    difference: &mut Difference,
) -> Result<(), ImageError> {
    for (index, block) in a.blocks().iter().enumerate() {
        let other = b.blocks().iter().position(|other| other.name == block.name);
        let mut found = BlockDifference { name: block.name.clone(), ..BlockDifference::default() };
        found.length_bytes = [Some(block.length_bytes), other.map(|other| b.blocks()[other].length_bytes)];
        let Some(other) = other else {
            difference.blocks.push(found);
            continue;
        };
        let theirs = &b.blocks()[other];
        if block.is_skipped || theirs.is_skipped {
            let ones = match (block.is_skipped, theirs.is_skipped) {
                (true, true) => "either",
                (true, false) => "the first",
                (false, _) => "the second",
            };
            if block.is_skipped != theirs.is_skipped || block.length_bytes != theirs.length_bytes {
                found.not_compared = Some(format!("its pages are not in {ones} image (shared memory)"));
                difference.blocks.push(found);
            }
            continue;
        }
        let pages = block.pages().min(theirs.pages());
        difference.compared_pages += pages;
        pages_of((a, index), (b, other), pages, options, &mut found)?;
        if found.pages > 0 || block.length_bytes != theirs.length_bytes {
            difference.blocks.push(found);
        }
    }
    for block in b.blocks() {
        if a.blocks().iter().all(|other| other.name != block.name) {
            let length_bytes = [None, Some(block.length_bytes)];
            let name = block.name.clone();
            difference.blocks.push(BlockDifference { name, length_bytes, ..BlockDifference::default() });
        }
    }
    Ok(())
}

/// Compares the first `pages` pages of two blocks.
fn pages_of(
    a: (&MappedPages, usize),
    b: (&MappedPages, usize),
    pages: u64,
    options: &DiffOptions,
    found: &mut BlockDifference,
) -> Result<(), ImageError> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = if options.threads == 0 { cores } else { options.threads };
    let words: Vec<AtomicU64> = (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
    let next = AtomicU64::new(0);
    let work = || -> Result<(), ImageError> {
        let size = PIECE_PAGES as usize * PAGE_SIZE;
        let (mut left, mut right) = (vec![0; size], vec![0; size]);
        loop {
            let first = next.fetch_add(PIECE_PAGES, Ordering::Relaxed);
            if first >= pages {
                return Ok(());
            }
            let count = PIECE_PAGES.min(pages - first);
            let held = |(pages, block): (&MappedPages, usize)| {
                pages.blocks()[block].bitmap.count_range(first, count) > 0
            };
            if !held(a) && !held(b) {
                continue;
            }
            let bytes = (count << PAGE_SHIFT) as usize;
            a.0.read(a.1, first, &mut left[..bytes])?;
            b.0.read(b.1, first, &mut right[..bytes])?;
            if left[..bytes] == right[..bytes] {
                continue;
            }
            for (page, (left, right)) in
                left[..bytes].chunks(PAGE_SIZE).zip(right[..bytes].chunks(PAGE_SIZE)).enumerate()
            {
                if left != right {
                    let page = first + page as u64;
                    words[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::Relaxed);
                }
            }
        }
    };
    crew::share(threads, work)?;
    let words: Vec<u64> = words.into_iter().map(AtomicU64::into_inner).collect();
    found.pages = words.iter().map(|word| u64::from(word.count_ones())).sum();
    ranges(&words, pages, options.ranges, found);
    Ok(())
}

/// Lists the runs of set bits.
fn ranges(words: &[u64], pages: u64, most: usize, found: &mut BlockDifference) {
    let is_set = |page: u64| words[(page / 64) as usize] >> (page % 64) & 1 == 1;
    let mut page = 0;
    while page < pages {
        if words[(page / 64) as usize] >> (page % 64) == 0 {
            page = (page / 64 + 1) * 64;
            continue;
        }
        if !is_set(page) {
            page += 1;
            continue;
        }
        let first = page;
        while page < pages && is_set(page) {
            page += 1;
        }
        found.range_count += 1;
        if found.ranges.len() < most {
            found.ranges.push((first, page - first));
        }
    }
}
