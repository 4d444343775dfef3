//! [`Image`]: an image that is open for reading.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use sterna_store::StoredImage;
use sterna_transport::{self as transport, Direct, PageFile};
use sterna_wire::PAGE_SIZE;

use super::begun::Begun;
use super::body::{End, RecordSink};
use super::framed::{self, Access};
use super::mapped::MappedPages;
use super::places::PagePlaces;
use super::regions;
use super::source::{ReadAt, Stamp};
use super::visitor::PageVisitor;
use crate::error::ImageError;
use crate::format::{Form, Format};
use crate::model::{IGNORE_SHARED, LibvirtHeader, Shape};
use crate::write::MappedWriter;

/// An open image: its format, the machine without its pages, and access to the pages.
pub struct Image {
    source: Arc<dyn ReadAt>,
    file: Arc<str>,
    stamp: Stamp,
    format: Format,
    header: Option<LibvirtHeader>,
    stream_offset: u64,
    shape: Shape,
    mapped: Option<MappedPages>,
    places: Option<PagePlaces>,
    end: End,
    has_deltas: bool,
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image")
            .field("file", &self.file)
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}

impl Image {
    /// Opens the image in `source`; `name` appears in errors.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_source(source: Arc<dyn ReadAt>, name: &str) -> Result<Image, ImageError> {
        Self::open_unwrapped(framed::unwrapped(source, name, &Access::default())?, name)
    }

    pub(super) fn open_unwrapped(source: Arc<dyn ReadAt>, name: &str) -> Result<Image, ImageError> {
        let stamp = source.stamp().map_err(|error| ImageError::io(name, "fstat", error))?;
        let begun = Begun::of_source(&source, name, None)?;
        Self::finish(begun, source, stamp, false)
    }

    /// Reads everything except the pages of an image whose head has been read.
    pub(crate) fn finish(
        begun: Begun,
        source: Arc<dyn ReadAt>,
        stamp: Stamp,
        is_indexed: bool,
    ) -> Result<Image, ImageError> {
        let (format, stream_offset) = (begun.format, begun.stream_offset);
        let header = begun.header.clone();
        let file = Arc::clone(&begun.file);
        let mut mapped = None;
        if format.form() == Form::Mapped {
            let length = source.len_bytes().map_err(|error| ImageError::io(&file, "fstat", error))?;
            regions::check(&begun.head, stream_offset, &file, length)?;
            let (blocks, placed) = (&begun.head.shape.ram.blocks, &begun.head.placed);
            let pages = MappedPages::read_bitmaps(blocks, placed, Arc::clone(&source), Arc::clone(&file))?;
            mapped = Some(pages);
        }
        let blocks = &begun.head.shape.ram.blocks;
        let can_index = is_indexed && format.form() == Form::Legacy && !format.is_compressed();
        let mut scan = Scan {
            has_records: vec![false; blocks.len()],
            has_deltas: false,
            places: can_index.then(|| PagePlaces::new(blocks)),
        };
        let (mut shape, end) = begun.finish(&mut scan)?;
        if format.form() == Form::Legacy && shape.has_capability(IGNORE_SHARED) {
            for (block, has_records) in shape.ram.blocks.iter_mut().zip(&scan.has_records) {
                block.is_skipped = !has_records;
            }
        }
        let Scan { has_deltas, places, .. } = scan;
        let image = Image {
            source,
            file,
            stamp,
            format,
            header,
            stream_offset,
            shape,
            mapped,
            places,
            end,
            has_deltas,
        };
        image.check_unchanged()?;
        Ok(image)
    }

    /// The format: container, form and compression.
    pub fn format(&self) -> Format {
        if self.stored().is_some() { Format::Sterna } else { self.format }
    }

    /// The format of the bytes that are read; for an image in Sterna's format, that of its view.
    pub(crate) fn view_format(&self) -> Format {
        self.format
    }

    /// The image in Sterna's own format that contains this one; none for other formats.
    ///
    /// Then this image is the mapped-ram image that it contains: offsets are those of that image.
    pub fn stored(&self) -> Option<&Arc<StoredImage>> {
        self.source.stored()
    }

    /// The header and the texts of libvirt's container; none for a bare image.
    pub fn libvirt_header(&self) -> Option<&LibvirtHeader> {
        self.header.as_ref()
    }

    /// The machine without its pages.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The path or name that the image was opened with.
    pub fn path_name(&self) -> &str {
        &self.file
    }

    /// File offset of the stream: 0, or the end of libvirt's data.
    pub fn stream_offset(&self) -> u64 {
        self.stream_offset
    }

    /// Offset after the stream; for a compressed image, in the decompressed stream.
    pub fn stream_end(&self) -> u64 {
        self.end.stream_end
    }

    /// How the stream ended.
    pub(crate) fn end(&self) -> End {
        self.end
    }

    /// Bytes after the stream, which have no meaning.
    pub fn trailing_bytes(&self) -> u64 {
        self.end.trailing_bytes
    }

    /// Whether the description after EOF is truncated. QEMU loads such an image.
    pub fn is_description_torn(&self) -> bool {
        self.end.is_description_torn
    }

    /// Whether the stream contains pages as deltas to their previous content (XBZRLE, `specs/mapped-ram.md §3.2`).
    pub fn has_deltas(&self) -> bool {
        self.has_deltas
    }

    /// Whether this is a background snapshot whose bitmaps QEMU never wrote (`specs/mapped-ram.md §4.9`).
    ///
    /// The file contains its pages, but all of them read as zero. [`repair`](crate::tools::repair) writes the
    /// bitmaps.
    pub fn lacks_bitmaps(&self) -> bool {
        let Some(mapped) = self.mapped.as_ref().filter(|_| !self.shape.has_end) else { return false };
        let mut held = mapped.blocks().iter().filter(|block| !block.is_skipped && block.length_bytes > 0);
        held.clone().next().is_some() && held.all(|block| block.bitmap.count() == 0)
    }

    /// Refuses an image that [lacks bitmaps](Self::lacks_bitmaps).
    pub(crate) fn check_bitmaps(&self) -> Result<(), ImageError> {
        if self.lacks_bitmaps() { Err(ImageError::NoBitmaps { file: self.file.to_string() }) } else { Ok(()) }
    }

    /// Whether the end of the stream cannot be determined.
    ///
    /// Its sections have no footers, and no description follows them. [`Shape::has_eof`] is false then.
    pub fn is_end_unsure(&self) -> bool {
        self.end.is_end_unsure
    }

    /// Whether `path` leads to the file of this image.
    pub fn is_at(&self, path: &Path) -> bool {
        let Some(Ok(ours)) = self.source.file().map(File::metadata) else { return false };
        std::fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino()))
    }

    /// The pages at their places; none for a legacy stream.
    pub fn mapped(&self) -> Option<&MappedPages> {
        self.mapped.as_ref()
    }

    /// The file, or the object that replaces it.
    pub fn source(&self) -> &Arc<dyn ReadAt> {
        &self.source
    }

    /// Opens the file again for queued or direct I/O, reflinks and holes.
    ///
    /// None if the image is not in a file.
    ///
    /// # Errors
    /// [`ImageError::File`] if the file cannot be opened again.
    pub fn page_file(&self, direct: Direct) -> Result<Option<Arc<PageFile>>, ImageError> {
        let Some(file) = self.source.file() else { return Ok(None) };
        // This opens the same file even if its path now leads to another one.
        let options = transport::OpenOptions { direct };
        Ok(Some(Arc::new(PageFile::open_again(file, &*self.file, options)?)))
    }

    /// Visits the pages in stream order. Skipped blocks are left out.
    ///
    /// A page of a legacy stream can occur several times: the last content counts.
    ///
    /// # Errors
    /// The visitor's error; [`ImageError::Changed`]; or the error of a damaged image. [`ImageError::Request`] for an
    /// image with [deltas](Self::has_deltas): [`spool`](Self::spool) it first.
    pub fn visit_pages(&self, visitor: &mut dyn PageVisitor) -> Result<(), ImageError> {
        match &self.mapped {
            Some(mapped) => mapped.visit(visitor)?,
            None => self.visit_records(&mut Visit { visitor, file: &self.file })?,
        }
        self.check_unchanged()
    }

    /// Copies shape and pages into a temporary sparse mapped-ram image in `dir`, for random access.
    ///
    /// The copy has no name. It disappears with the returned image, or when the process ends for any reason. Deltas
    /// are applied. A page that occurs several times has its last content.
    ///
    /// # Errors
    /// The error of a damaged image; [`ImageError::File`], such as a full disk.
    pub fn spool(&self, dir: &Path) -> Result<Image, ImageError> {
        let writer = MappedWriter::temporary(dir, &self.shape)?;
        let mut lane = writer.lane();
        match &self.mapped {
            Some(mapped) => mapped.visit(&mut lane)?,
            None => self.visit_records(&mut lane)?,
        }
        lane.drain()?;
        // After a crash, the file has no name and cannot be found. Therefore a sync is not needed.
        writer.fill_in_unsynced(&self.shape)?;
        self.check_unchanged()?;
        let name = format!("the spool of {}", self.file);
        Self::open_source(Arc::new(writer.file().reopened()?), &name)
    }

    /// The places of a legacy stream's pages, if the image was opened [for that](Self::open_indexed).
    ///
    /// `None` if pages cannot be read at random: the stream is compressed, or contains [deltas](Self::has_deltas). In
    /// this case, [`spool`](Self::spool) the image. The pages of a mapped-ram image have places without an index
    /// ([`mapped`](Self::mapped)).
    pub fn places(&self) -> Option<&PagePlaces> {
        self.places.as_ref().filter(|_| !self.has_deltas)
    }

    /// Checks that the file has not changed since it was opened.
    ///
    /// # Errors
    /// [`ImageError::Changed`] if it has; [`ImageError::Io`] if the check fails.
    pub fn check_unchanged(&self) -> Result<(), ImageError> {
        check_unchanged(&*self.source, self.stamp, &self.file)
    }

    fn visit_records(&self, sink: &mut dyn RecordSink) -> Result<(), ImageError> {
        Begun::of_source(&self.source, &self.file, None)?.finish(sink)?;
        Ok(())
    }
}

pub(crate) fn check_unchanged(source: &dyn ReadAt, before: Stamp, file: &str) -> Result<(), ImageError> {
    let now = source.stamp().map_err(|error| ImageError::io(file, "fstat", error))?;
    if now == before { Ok(()) } else { Err(ImageError::Changed { file: file.to_owned() }) }
}

/// Examines records without keeping pages.
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

/// Passes records to a visitor.
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
