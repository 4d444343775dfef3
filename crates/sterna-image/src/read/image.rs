//! An image, opened for reading.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::OFlags;
use sterna_transport::{self as transport, Direct, PageFile};
use sterna_wire::PAGE_SIZE;

use super::PageVisitor;
use super::begun::Begun;
use super::body::{End, RecordSink};
use super::mapped::MappedPages;
use super::places::PagePlaces;
use super::regions;
use super::source::{ReadAt, Stamp};
use crate::ImageError;
use crate::model::{Compression, Form, IGNORE_SHARED, ImageKind, Shape};
use crate::write::MappedWriter;

/// An image, opened for reading: what it is, the machine without its pages, and the way to the pages.
pub struct Image {
    source: Arc<dyn ReadAt>,
    file: Arc<str>,
    stamp: Stamp,
    kind: ImageKind,
    stream_offset: u64,
    shape: Shape,
    mapped: Option<MappedPages>,
    places: Option<PagePlaces>,
    end: End,
    has_deltas: bool,
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image").field("file", &self.file).field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Image {
    /// Opens the image at `path` and reads everything but its pages.
    ///
    /// An image whose devices are truncated opens, too ([`Shape::has_eof`] is false then), so that it can be
    /// looked at; one that is cut before has no shape and does not.
    ///
    /// # Errors
    /// [`ImageError`]: no image, a broken rule and where, an image that is still being written.
    pub fn open(path: &Path) -> Result<Image, ImageError> {
        let name = path.display().to_string();
        Self::open_source(open_file(path)?, &name)
    }

    /// Opens the image in `source`; `name` is for errors.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_source(source: Arc<dyn ReadAt>, name: &str) -> Result<Image, ImageError> {
        let stamp = source.stamp().map_err(|error| ImageError::io(name, "fstat", error))?;
        let begun = Begun::of_source(&source, name, None)?;
        Self::finish(begun, source, stamp, false)
    }

    /// As [`open`](Self::open). Where each page of a legacy stream lies is noted on the way ([`places`](Self::places)).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_indexed(path: &Path) -> Result<Image, ImageError> {
        let (name, source) = (path.display().to_string(), open_file(path)?);
        let stamp = source.stamp().map_err(|error| ImageError::io(&name, "fstat", error))?;
        let begun = Begun::of_source(&source, &name, None)?;
        Self::finish(begun, source, stamp, true)
    }

    /// Reads everything but the pages of an image that was begun.
    pub(crate) fn finish(
        begun: Begun,
        source: Arc<dyn ReadAt>,
        stamp: Stamp,
        is_indexed: bool,
    ) -> Result<Image, ImageError> {
        let (kind, stream_offset) = (begun.kind.clone(), begun.stream_offset);
        let file = Arc::clone(&begun.file);
        let mut mapped = None;
        if kind.form == Form::Mapped {
            let length = source.len_bytes().map_err(|error| ImageError::io(&file, "fstat", error))?;
            regions::check(&begun.head, stream_offset, &file, length)?;
            let (blocks, placed) = (&begun.head.shape.ram.blocks, &begun.head.placed);
            let pages = MappedPages::read_bitmaps(blocks, placed, Arc::clone(&source), Arc::clone(&file))?;
            mapped = Some(pages);
        }
        let blocks = &begun.head.shape.ram.blocks;
        let can_index = is_indexed && kind.form == Form::Legacy && kind.compression == Compression::None;
        let mut scan = Scan {
            has_records: vec![false; blocks.len()],
            has_deltas: false,
            places: can_index.then(|| PagePlaces::new(blocks)),
        };
        let (mut shape, end) = begun.finish(&mut scan)?;
        if kind.form == Form::Legacy && shape.has_capability(IGNORE_SHARED) {
            for (block, has_records) in shape.ram.blocks.iter_mut().zip(&scan.has_records) {
                block.is_skipped = !has_records;
            }
        }
        let Scan { has_deltas, places, .. } = scan;
        let image =
            Image { source, file, stamp, kind, stream_offset, shape, mapped, places, end, has_deltas };
        image.check_unchanged()?;
        Ok(image)
    }

    /// What kind of image it is.
    pub fn kind(&self) -> &ImageKind {
        &self.kind
    }

    /// The machine without its pages.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The path or name that it was opened by.
    pub fn path_name(&self) -> &str {
        &self.file
    }

    /// File offset of the stream: 0, or behind libvirt's data.
    pub fn stream_offset(&self) -> u64 {
        self.stream_offset
    }

    /// Offset of the byte behind the stream; of a compressed image, in the decompressed stream.
    pub fn stream_end(&self) -> u64 {
        self.end.stream_end
    }

    /// How the stream ended.
    pub(crate) fn end(&self) -> End {
        self.end
    }

    /// Bytes behind the stream, which mean nothing.
    pub fn trailing_bytes(&self) -> u64 {
        self.end.trailing_bytes
    }

    /// Whether the description after EOF is truncated, which QEMU does not mind.
    pub fn is_description_torn(&self) -> bool {
        self.end.is_description_torn
    }

    /// Whether pages came as differences to what was sent before (XBZRLE, `specs/mapped-ram.md §3.2`).
    pub fn has_deltas(&self) -> bool {
        self.has_deltas
    }

    /// Whether this is a background snapshot whose bitmaps QEMU never wrote (`specs/mapped-ram.md §4.9`): the file
    /// has its pages, and all of them read as zero. [`repair`](crate::tools::repair) mends it.
    pub fn lacks_bitmaps(&self) -> bool {
        let Some(mapped) = self.mapped.as_ref().filter(|_| !self.shape.has_end) else { return false };
        let mut held = mapped.blocks().iter().filter(|block| !block.is_skipped && block.length_bytes > 0);
        held.clone().next().is_some() && held.all(|block| block.bitmap.count() == 0)
    }

    /// Refuses an image that [lacks bitmaps](Self::lacks_bitmaps).
    pub(crate) fn check_bitmaps(&self) -> Result<(), ImageError> {
        if self.lacks_bitmaps() { Err(ImageError::NoBitmaps { file: self.file.to_string() }) } else { Ok(()) }
    }

    /// Whether nobody can tell if the stream is whole: its sections have no footers, and no description follows
    /// them. [`Shape::has_eof`] is false then.
    pub fn is_end_unsure(&self) -> bool {
        self.end.is_end_unsure
    }

    /// Whether `path` leads to the file that this image is in.
    pub fn is_at(&self, path: &Path) -> bool {
        let Some(Ok(ours)) = self.source.file().map(File::metadata) else { return false };
        std::fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino()))
    }

    /// The pages at their places; none for a legacy stream.
    pub fn mapped(&self) -> Option<&MappedPages> {
        self.mapped.as_ref()
    }

    /// The file, or what stands for it.
    pub fn source(&self) -> &Arc<dyn ReadAt> {
        &self.source
    }

    /// The file once more, for queued or direct I/O, reflinks and holes; none if the image is not in a file.
    ///
    /// # Errors
    /// [`ImageError::File`].
    pub fn page_file(&self, direct: Direct) -> Result<Option<Arc<PageFile>>, ImageError> {
        let Some(file) = self.source.file() else { return Ok(None) };
        // The same file, whatever lies at its path by now.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Ok(Some(Arc::new(PageFile::open(path, transport::OpenOptions { direct })?)))
    }

    /// Gives the pages in the order of the stream. Of a legacy stream the same page may come again: the last
    /// one counts. Blocks that are skipped are left out.
    ///
    /// # Errors
    /// The visitor's; [`ImageError::Changed`], or what is wrong with the image. [`ImageError::Request`] for an
    /// image with [deltas](Self::has_deltas): [`spool`](Self::spool) it first.
    pub fn visit_pages(&self, visitor: &mut dyn PageVisitor) -> Result<(), ImageError> {
        match &self.mapped {
            Some(mapped) => mapped.visit(visitor)?,
            None => self.visit_records(&mut Visit { visitor, file: &self.file })?,
        }
        self.check_unchanged()
    }

    /// Puts shape and pages into a sparse mapped-ram image without a name in directory `dir`, for random access: it
    /// is gone with the image, or with the process however that ends.
    /// Deltas are applied; of pages that came several times the last one is there.
    ///
    /// # Errors
    /// What is wrong with this image; [`ImageError::File`], such as a full disk.
    pub fn spool(&self, dir: &Path) -> Result<Image, ImageError> {
        let writer = MappedWriter::temporary(dir, &self.shape)?;
        let mut lane = writer.lane();
        match &self.mapped {
            Some(mapped) => mapped.visit(&mut lane)?,
            None => self.visit_records(&mut lane)?,
        }
        lane.drain()?;
        // Nobody finds it after a crash: it need not be on the disk.
        writer.fill_in_unsynced(&self.shape)?;
        self.check_unchanged()?;
        let name = format!("the spool of {}", self.file);
        Self::open_source(Arc::new(writer.file().reopened()?), &name)
    }

    /// Where each page of a legacy stream lies, if it was opened [for that](Self::open_indexed). `None` where pages cannot be
    /// read at random: the stream is compressed, or pages came as [deltas](Self::has_deltas). [`spool`](Self::spool) it
    /// then. Pages of a mapped-ram image have their places without an index ([`mapped`](Self::mapped)).
    pub fn places(&self) -> Option<&PagePlaces> {
        self.places.as_ref().filter(|_| !self.has_deltas)
    }

    /// Whether the file is as it was when it was opened.
    ///
    /// # Errors
    /// [`ImageError::Changed`]; [`ImageError::Io`].
    pub fn check_unchanged(&self) -> Result<(), ImageError> {
        check_unchanged(&*self.source, self.stamp, &self.file)
    }

    fn visit_records(&self, sink: &mut dyn RecordSink) -> Result<(), ImageError> {
        Begun::of_source(&self.source, &self.file, None)?.finish(sink)?;
        Ok(())
    }
}

/// Opens a regular file.
pub(crate) fn open_file(path: &Path) -> Result<Arc<dyn ReadAt>, ImageError> {
    let name = path.display().to_string();
    // A pipe that nobody writes would block the open; for files the flag means nothing.
    let opened = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    let file = opened.map_err(|error| ImageError::io(&name, "open", error))?;
    let metadata = file.metadata().map_err(|error| ImageError::io(&name, "fstat", error))?;
    if !metadata.is_file() {
        let why = "it is not a regular file, and an image needs random access";
        return Err(ImageError::io(
            &name,
            "open",
            std::io::Error::new(std::io::ErrorKind::InvalidInput, why),
        ));
    }
    Ok(Arc::new(file))
}

pub(crate) fn check_unchanged(source: &dyn ReadAt, before: Stamp, file: &str) -> Result<(), ImageError> {
    let now = source.stamp().map_err(|error| ImageError::io(file, "fstat", error))?;
    if now == before { Ok(()) } else { Err(ImageError::Changed { file: file.to_owned() }) }
}

/// Looks at records without keeping pages.
struct Scan {
    has_records: Vec<bool>,
    has_deltas: bool,
    places: Option<PagePlaces>,
}

impl RecordSink for Scan {
    fn page(&mut self, block: usize, _: u64, _: &[u8; PAGE_SIZE]) -> Result<(), ImageError> {
        self.has_records[block] = true;
        Ok(())
    }

    fn page_at(
        &mut self,
        position: u64,
        block: usize,
        page: u64,
        content: &[u8; PAGE_SIZE],
    ) -> Result<(), ImageError> {
        if let Some(places) = &mut self.places {
            places.note(block, page, position);
        }
        self.page(block, page, content)
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), ImageError> {
        self.has_records[block] = true;
        if let Some(places) = &mut self.places {
            places.note_zero(block, page);
        }
        Ok(())
    }

    fn delta(&mut self, block: usize, _: u64, _: &[u8]) -> Result<(), ImageError> {
        self.has_records[block] = true;
        self.has_deltas = true;
        Ok(())
    }
}

/// Hands records on to a visitor.
struct Visit<'a> {
    visitor: &'a mut dyn PageVisitor,
    file: &'a str,
}

impl RecordSink for Visit<'_> {
    fn page(&mut self, block: usize, page: u64, content: &[u8; PAGE_SIZE]) -> Result<(), ImageError> {
        self.visitor.pages(block, page, content)
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), ImageError> {
        self.visitor.zero(block, page, 1)
    }

    fn delta(&mut self, _: usize, _: u64, _: &[u8]) -> Result<(), ImageError> {
        let file = self.file;
        Err(ImageError::Request(format!("{file} contains pages as differences (XBZRLE): spool it first")))
    }
}
