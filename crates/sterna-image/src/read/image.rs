//! An image, opened for reading.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use sterna_wire::PAGE_SIZE;

use super::body::{self, End, RecordSink};
use super::cursor::Cursor;
use super::head;
use super::mapped::{MappedPages, read_exact};
use super::source::{Input, ReadAt, Sequential, Stamp};
use super::{PageVisitor, libvirt, regions, sniff};
use crate::ImageError;
use crate::model::{Container, Form, ImageKind, Packing, Shape};

/// An image, opened for reading: what it is, the machine without its pages, and the way to the pages.
pub struct Image {
    source: Arc<dyn ReadAt>,
    file: Arc<str>,
    stamp: Stamp,
    kind: ImageKind,
    stream_offset: u64,
    shape: Shape,
    mapped: Option<MappedPages>,
    end: End,
    has_deltas: bool,
}

impl Image {
    /// Opens the image at `path` and reads everything but its pages.
    ///
    /// An image whose devices are cut off opens, too ([`Shape::has_eof`] is false then), so that it can be
    /// looked at; one that is cut before has no shape and does not.
    ///
    /// # Errors
    /// [`ImageError`]: no image, a broken rule and where, an image that is still being written.
    pub fn open(path: &Path) -> Result<Image, ImageError> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(|error| ImageError::io(&name, "open", error))?;
        let metadata = file.metadata().map_err(|error| ImageError::io(&name, "fstat", error))?;
        if !metadata.is_file() {
            return Err(ImageError::Request(format!(
                "{name} is no regular file: an image can only be opened where it can be read at any place"
            )));
        }
        Self::open_source(Arc::new(file), &name)
    }

    /// Opens the image in `source`; `name` is for errors.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_source(source: Arc<dyn ReadAt>, name: &str) -> Result<Image, ImageError> {
        let file: Arc<str> = name.into();
        let stamp = source.stamp().map_err(|error| ImageError::io(name, "fstat", error))?;
        let (kind, stream_offset) = kind(&*source, name)?;
        let mut cursor = stream(&source, &file, kind.packing, stream_offset)?;
        let mut head = head::read(&mut cursor)?;
        let form = head.shape.form();
        let mut sink = Scan { has_records: vec![false; head.shape.ram.blocks.len()], has_deltas: false };
        let mapped = match form {
            Form::Legacy => None,
            Form::Mapped => {
                let length = source.len_bytes().map_err(|error| ImageError::io(name, "fstat", error))?;
                regions::check(&head, &file, length)?;
                let blocks = &head.shape.ram.blocks;
                let source = Arc::clone(&source);
                Some(MappedPages::read_bitmaps(blocks, &head.placed, source, Arc::clone(&file))?)
            }
        };
        let end = body::read(&mut cursor, &mut head.shape, &mut sink)?;
        let mut shape = head.shape;
        if form == Form::Legacy && shape.has_capability(crate::model::IGNORE_SHARED) {
            for (block, has_records) in shape.ram.blocks.iter_mut().zip(&sink.has_records) {
                block.is_skipped = !has_records;
            }
        }
        let kind = ImageKind { form, ..kind };
        check_format(&kind, &file)?;
        let has_deltas = sink.has_deltas;
        let image = Image { source, file, stamp, kind, stream_offset, shape, mapped, end, has_deltas };
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

    /// Offset of the byte behind the stream; of a compressed image, in the unpacked stream.
    pub fn stream_end(&self) -> u64 {
        self.end.stream_end
    }

    /// Bytes behind the stream, which mean nothing.
    pub fn trailing_bytes(&self) -> u64 {
        self.end.trailing_bytes
    }

    /// Whether the description behind EOF is cut off, which QEMU does not mind.
    pub fn is_description_torn(&self) -> bool {
        self.end.is_description_torn
    }

    /// The pages at their places; none for a legacy stream.
    pub fn mapped(&self) -> Option<&MappedPages> {
        self.mapped.as_ref()
    }

    /// The file, or what stands for it.
    pub fn source(&self) -> &Arc<dyn ReadAt> {
        &self.source
    }

    /// Gives the pages in the order of the stream. Of a legacy stream the same page may come again: the last
    /// one counts. Blocks that are skipped are left out.
    ///
    /// # Errors
    /// The visitor's; [`ImageError::Changed`], or what is wrong with the image.
    pub fn visit_pages(&self, visitor: &mut dyn PageVisitor) -> Result<(), ImageError> {
        match &self.mapped {
            Some(mapped) => mapped.visit(visitor)?,
            None => self.visit_records(visitor)?,
        }
        self.check_unchanged()
    }

    /// Whether the file is as it was when it was opened.
    ///
    /// # Errors
    /// [`ImageError::Changed`]; [`ImageError::Io`].
    pub fn check_unchanged(&self) -> Result<(), ImageError> {
        let stamp = self.source.stamp().map_err(|error| ImageError::io(&self.file, "fstat", error))?;
        if stamp == self.stamp { Ok(()) } else { Err(ImageError::Changed { file: self.file.to_string() }) }
    }

    fn visit_records(&self, visitor: &mut dyn PageVisitor) -> Result<(), ImageError> {
        if self.has_deltas {
            return Err(ImageError::Request(format!(
                "{} holds pages as differences (XBZRLE): spool it first",
                self.file
            )));
        }
        let mut cursor = stream(&self.source, &self.file, self.kind.packing, self.stream_offset)?;
        let mut head = head::read(&mut cursor)?;
        body::read(&mut cursor, &mut head.shape, &mut Visit(visitor))?;
        Ok(())
    }
}

/// The container and the packing of `source`, and where its stream starts. The form is not known yet.
fn kind(source: &dyn ReadAt, name: &str) -> Result<(ImageKind, u64), ImageError> {
    let mut magic = [0; sniff::BYTES];
    let length = source.len_bytes().map_err(|error| ImageError::io(name, "fstat", error))?;
    let magic = &mut magic[..length.min(sniff::BYTES as u64) as usize];
    read_exact(source, name, 0, magic, "the first bytes")?;
    let form = Form::Legacy;
    match sniff::sniff(magic) {
        Some(sniff::Sniffed::Stream(packing)) => {
            Ok((ImageKind { container: Container::Bare, packing, form }, 0))
        }
        Some(sniff::Sniffed::Libvirt) => {
            let (header, offset) = libvirt::read(source, name)?;
            if !header.is_complete {
                return Err(ImageError::Unfinished { file: name.to_owned() });
            }
            // Versions 0 and 1 know no formats (§2).
            let packing = match header.version {
                2 => sniff::packing_of(header.format).unwrap_or(Packing::None),
                _ => Packing::None,
            };
            Ok((ImageKind { container: Container::Libvirt(header), packing, form }, offset))
        }
        None if magic.is_empty() => {
            Err(ImageError::Torn { file: name.to_owned(), offset: 0, what: "the first bytes" })
        }
        None => {
            let magic = format!("{:?}", String::from_utf8_lossy(magic));
            Err(ImageError::Unknown { file: name.to_owned(), magic })
        }
    }
}

/// The format word must tell the truth (`specs/libvirt-save.md §2`).
fn check_format(kind: &ImageKind, file: &str) -> Result<(), ImageError> {
    let Container::Libvirt(header) = &kind.container else { return Ok(()) };
    let says_sparse = header.version == 2 && header.format == sterna_wire::libvirt::FORMAT_SPARSE;
    if says_sparse == (kind.form == Form::Mapped) {
        return Ok(());
    }
    let (says, is) = if says_sparse { ("sparse", "a legacy stream") } else { ("raw", "mapped-ram") };
    let rule = format!("the format word says {says}, and the stream is {is}");
    let paragraph = "specs/libvirt-save.md §2";
    Err(ImageError::Broken { file: file.to_owned(), offset: 28, rule, paragraph })
}

/// A cursor at the start of the stream.
fn stream(
    source: &Arc<dyn ReadAt>,
    file: &Arc<str>,
    packing: Packing,
    offset: u64,
) -> Result<Cursor, ImageError> {
    let input: Box<dyn Input> = match packing {
        Packing::None => Box::new(Sequential::new(Arc::clone(source), offset)),
        other => {
            let rule = format!("{} cannot be read yet", other.name());
            return Err(ImageError::Request(rule));
        }
    };
    Ok(Cursor::new(input, Arc::clone(file), if packing == Packing::None { offset } else { 0 }))
}

/// Looks at records without keeping pages.
struct Scan {
    has_records: Vec<bool>,
    has_deltas: bool,
}

impl RecordSink for Scan {
    fn page(&mut self, block: usize, _: u64, _: &[u8; PAGE_SIZE]) -> Result<(), ImageError> {
        self.has_records[block] = true;
        Ok(())
    }

    fn zero(&mut self, block: usize, _: u64) -> Result<(), ImageError> {
        self.has_records[block] = true;
        Ok(())
    }

    fn delta(&mut self, block: usize, _: u64, _: &[u8]) -> Result<(), ImageError> {
        self.has_records[block] = true;
        self.has_deltas = true;
        Ok(())
    }
}

/// Hands records on to a visitor.
struct Visit<'a>(&'a mut dyn PageVisitor);

impl RecordSink for Visit<'_> {
    fn page(&mut self, block: usize, page: u64, content: &[u8; PAGE_SIZE]) -> Result<(), ImageError> {
        self.0.pages(block, page, content)
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), ImageError> {
        self.0.zero(block, page, 1)
    }

    fn delta(&mut self, _: usize, _: u64, _: &[u8]) -> Result<(), ImageError> {
        Err(ImageError::Request("a page came as a difference (XBZRLE) that was not there before".to_owned()))
    }
}
