//! Stores a machine that another VMM hands over: its memory in open files, and its other files as bytes.

use std::path::Path;

use sterna_store::{Block, Piece, Recipe};

use super::directory::ConvertedDirectory;
use super::framed::bytes::push_bytes;
use super::framed::writer::writer_at;
use super::memory::{MemoryPart, store_memory};
use super::request::{ConvertOptions, threads};
use crate::ImageError;

/// A machine as its VMM's own snapshot directory would contain it.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// The VMM: `firecracker` or `cloud-hypervisor`.
    pub kind: &'a str,
    /// Name of the memory file.
    pub memory_name: &'a str,
    /// The memory, one part after the other.
    pub memory: &'a [MemoryPart<'a>],
    /// Names and bytes of the other files.
    pub files: &'a [(&'a str, &'a [u8])],
}

/// Writes a machine to an image in Sterna's own format at `to`, with the contents that
/// [`convert_directory`](super::convert_directory) gives the image of its directory.
///
/// `watch` gets the number of bytes of each part of the memory that was stored, and 0 when only the completion is left. It
/// returns `false` to stop. Then, and after an error, nothing is visible at `to`.
///
/// # Errors
/// The errors of reads and of the writer, such as a full disk. `None`: `watch` has stopped the save.
pub fn store_snapshot(
    snapshot: &Snapshot<'_>,
    to: &Path,
    options: &ConvertOptions,
    watch: &(dyn Fn(u64) -> bool + Sync),
) -> Result<Option<ConvertedDirectory>, ImageError> {
    let Snapshot { kind, memory_name, memory, files: others } = *snapshot;
    let length = memory.iter().map(|part| part.length_bytes).sum();
    let block = Block { name: memory_name.to_owned(), length_bytes: length, address: None };
    let (writer, _) = writer_at(to, vec![block], options, kind)?;
    if !store_memory(memory, &writer, None, threads(options.threads), watch)? {
        return Ok(None);
    }
    let mut recipe = Recipe::default();
    recipe.push(Piece::Copy { block: 0, offset: 0, length });
    let mut files = vec![(memory_name, recipe)];
    for (name, bytes) in others {
        let mut recipe = Recipe::default();
        push_bytes(&writer, &mut recipe, bytes);
        files.push((name, recipe));
    }
    if !watch(0) {
        return Ok(None);
    }
    let bytes = writer.complete(&files)?.bytes;
    Ok(Some(ConvertedDirectory { kind: kind.to_owned(), ram_bytes: length, bytes }))
}
