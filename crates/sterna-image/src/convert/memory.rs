//! Stores a guest's memory out of the files that contain it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_store::{ImageWriter, StoredImage};

use crate::ImageError;
use crate::crew;
use crate::tools::reading::Reading;

/// Memory in a part of a file. Holes of the file are pages of zeros.
#[derive(Debug, Clone, Copy)]
pub struct MemoryPart<'a> {
    /// The file: a memory file, or a memfd.
    pub file: &'a File,
    /// Name of the file, for messages.
    pub name: &'a str,
    /// Place of the first byte in the file.
    pub offset: u64,
    /// Length in bytes: whole pages.
    pub length_bytes: u64,
}

/// A part, its place in the memory, and the ranges of its file that have data.
struct Placed<'a> {
    part: MemoryPart<'a>,
    start: u64,
    data: Vec<(u64, u64)>,
}

/// Stores the parts, one after the other, as block 0. With a `base`, its pages take the place of the files' holes.
///
/// `watch` gets the number of bytes of each extent that was stored. It returns `false` to stop; the result is then `false`.
pub(super) fn store_memory(
    parts: &[MemoryPart<'_>],
    writer: &ImageWriter,
    base: Option<&StoredImage>,
    threads: usize,
    watch: &(dyn Fn(u64) -> bool + Sync),
) -> Result<bool, ImageError> {
    let extent_bytes = u64::from(writer.extent_bytes());
    let placed = place(parts);
    let length = placed.last().map_or(0, |last| last.start + last.part.length_bytes);
    let (next, is_stopped) = (AtomicU64::new(0), AtomicBool::new(false));
    crew::share(threads, || {
        let (mut lane, mut content) = (writer.lane()?, Vec::new());
        loop {
            let extent = next.fetch_add(1, Ordering::Relaxed);
            let start = extent * extent_bytes;
            if start >= length {
                return Ok::<(), ImageError>(());
            }
            let end = (start + extent_bytes).min(length);
            content.clear();
            content.resize((end - start) as usize, 0);
            let done =
                read(&placed, start, &mut content, base).and_then(|()| Ok(lane.put(0, extent, &content)?));
            let is_last = done.is_err() || !watch(end - start);
            if is_last {
                // The other threads claim no further extents.
                next.store(length.div_ceil(extent_bytes), Ordering::Relaxed);
                is_stopped.store(done.is_ok(), Ordering::Relaxed);
                return done;
            }
        }
    })?;
    Ok(!is_stopped.into_inner())
}

fn place<'a>(parts: &[MemoryPart<'a>]) -> Vec<Placed<'a>> {
    let mut start = 0;
    let place = |part: &MemoryPart<'a>| {
        let data = Reading::extents(part.file, part.offset + part.length_bytes);
        let placed = Placed { part: *part, start, data };
        start += part.length_bytes;
        placed
    };
    parts.iter().map(place).collect()
}

/// Fills `content`, which is zero, with the memory from `start` on.
fn read(
    placed: &[Placed<'_>],
    start: u64,
    content: &mut [u8],
    base: Option<&StoredImage>,
) -> Result<(), ImageError> {
    if let Some(base) = base {
        base.read(0, start, content)?;
    }
    let end = start + content.len() as u64;
    let first = placed.partition_point(|placed| placed.start + placed.part.length_bytes <= start);
    for Placed { part, start: at, data } in &placed[first..] {
        if *at >= end {
            break;
        }
        let from = start.max(*at);
        let until = end.min(at + part.length_bytes);
        // Places in the file.
        let (first, last) = (part.offset + (from - at), part.offset + (until - at));
        for (from, to) in cut(data, first, last) {
            let into = (from - part.offset + at - start) as usize;
            let into = &mut content[into..into + (to - from) as usize];
            let read = part.file.read_exact_at(into, from);
            read.map_err(|error| ImageError::io(part.name, "read", error))?;
        }
    }
    Ok(())
}

/// The parts of `data` between `start` and `end`.
fn cut(data: &[(u64, u64)], start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
    let first = data.partition_point(|(_, stop)| *stop <= start);
    let cut = move |(from, to): &(u64, u64)| ((*from).max(start), (*to).min(end));
    data[first..].iter().map(cut).take_while(move |(from, _)| *from < end)
}
