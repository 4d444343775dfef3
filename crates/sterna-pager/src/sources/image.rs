//! The memory in an image: its RAM blocks, one after the other.

use std::io;
use std::path::Path;

use sterna_image::tools::verify::refuse_damage;
use sterna_image::{Access, Image, MappedPages, PagePlaces};

use super::cached_file::{CachedFile, FRAME_BYTES};
use crate::source::{PAGE_BYTES, PageSource, SourceError};

/// An image in any format. The memory is the image's RAM blocks in their order.
pub struct ImageMemory {
    image: Image,
    file: CachedFile,
    /// Offset of each block in the memory.
    starts: Vec<u64>,
    bytes: u64,
}

/// Pages of one block that lie side by side in the file, or that are zero.
struct Piece {
    bytes: usize,
    /// `None`: zeros.
    place: Option<u64>,
}

impl ImageMemory {
    /// Opens the image at `path`. A compressed image, or one with pages as differences, is unpacked into a file
    /// without a name in `spool`, or in the image's directory.
    ///
    /// An image in Sterna's own format is a [`StoredMemory`](crate::StoredMemory) instead.
    ///
    /// # Errors
    /// [`SourceError::Image`]; [`SourceError::Skipped`] if the image lacks a block's pages.
    pub fn open(path: &Path, spool: Option<&Path>) -> Result<Self, SourceError> {
        let mut image = Image::open_indexed(path, &Access::default())?;
        refuse_damage(&image)?;
        let name = image.path_name().to_owned();
        if image.mapped().is_none() && image.places().is_none() {
            let beside = path.parent().filter(|beside| !beside.as_os_str().is_empty());
            image = image.spool(spool.or(beside).unwrap_or(Path::new(".")))?;
        }
        let (mut starts, mut bytes) = (Vec::new(), 0u64);
        for block in &image.shape().ram.blocks {
            if block.is_skipped {
                return Err(SourceError::Skipped { name, block: block.name.clone() });
            }
            starts.push(bytes);
            bytes += block.length_bytes;
        }
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(SourceError::Length { name, bytes });
        }
        let source = image.mapped().map_or(image.source(), |mapped| mapped.source());
        let opened = source.file().map_or(Err(io::ErrorKind::Unsupported.into()), |file| file.try_clone());
        let opened = opened.map_err(|source| SourceError::System { name, offset: 0, call: "dup", source })?;
        Ok(Self { file: CachedFile::new(opened), image, starts, bytes })
    }

    /// Calls `each` for the pieces from `offset` on, until it returns `false`.
    fn pieces(
        &self,
        offset: u64,
        bytes: u64,
        mut each: impl FnMut(Piece) -> Result<bool, SourceError>,
    ) -> Result<bool, SourceError> {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let block = self.starts.partition_point(|start| *start <= at) - 1;
            let start = self.starts[block];
            let limit = end.min(self.starts.get(block + 1).copied().unwrap_or(self.bytes)) - start;
            let piece = match (self.image.mapped(), self.image.places()) {
                (Some(mapped), _) => of_mapped(mapped, block, at - start, limit),
                (None, Some(places)) => of_places(places, block, at - start, limit),
                // Such an image was unpacked.
                (None, None) => Piece { bytes: (limit + start - at) as usize, place: None },
            };
            at += piece.bytes as u64;
            if !each(piece)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn failed(&self, offset: u64, source: io::Error) -> SourceError {
        let name = self.image.path_name().to_owned();
        if source.kind() == io::ErrorKind::UnexpectedEof {
            return SourceError::Short { name, offset };
        }
        SourceError::System { name, offset, call: "pread", source }
    }
}

impl PageSource for ImageMemory {
    fn name(&self) -> &str {
        self.image.path_name()
    }

    fn len_bytes(&self) -> u64 {
        self.bytes
    }

    fn frame_bytes(&self) -> u64 {
        FRAME_BYTES
    }

    fn is_zero(&self, offset: u64, bytes: u64) -> bool {
        self.pieces(offset, bytes, |piece| Ok(piece.place.is_none())).unwrap_or(false)
    }

    fn read_now(&self, offset: u64, to: &mut [u8]) -> Result<bool, SourceError> {
        let mut done = 0;
        let is_read = self.pieces(offset, to.len() as u64, |piece| {
            let part = &mut to[done..done + piece.bytes];
            done += piece.bytes;
            match piece.place {
                None => part.fill(0),
                Some(place) => {
                    return self.file.read_now(place, part).map_err(|error| self.failed(offset, error));
                }
            }
            Ok(true)
        })?;
        if is_read {
            self.image.check_unchanged()?;
        }
        Ok(is_read)
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), SourceError> {
        let mut done = 0;
        self.pieces(offset, to.len() as u64, |piece| {
            let part = &mut to[done..done + piece.bytes];
            done += piece.bytes;
            match piece.place {
                None => part.fill(0),
                Some(place) => self.file.read(place, part).map_err(|error| self.failed(offset, error))?,
            }
            Ok(true)
        })?;
        Ok(self.image.check_unchanged()?)
    }
}

/// The piece from byte `at` of a block, which ends at byte `limit` at the latest.
fn of_mapped(mapped: &MappedPages, block: usize, at: u64, limit: u64) -> Piece {
    let block = &mapped.blocks()[block];
    let (page, end) = (at / PAGE_BYTES, limit.div_ceil(PAGE_BYTES));
    let run = block.bitmap.next_run(page, end, u64::MAX);
    match run {
        Some(run) if run.first == page => {
            let until = (run.end() * PAGE_BYTES).min(limit);
            Piece { bytes: (until - at) as usize, place: Some(block.pages_offset + at) }
        }
        run => {
            let until = run.map_or(limit, |run| run.first * PAGE_BYTES);
            Piece { bytes: (until - at) as usize, place: None }
        }
    }
}

/// As [`of_mapped`], for a stream, whose pages have places of their own.
fn of_places(places: &PagePlaces, block: usize, at: u64, limit: u64) -> Piece {
    let page = at / PAGE_BYTES;
    let until = ((page + 1) * PAGE_BYTES).min(limit);
    let place = places.offset(block, page).map(|place| place + at % PAGE_BYTES);
    Piece { bytes: (until - at) as usize, place }
}
