//! An image whose head has been read: what it is, and a cursor in front of its pages.

use std::io::{self, Read};
use std::sync::Arc;

use sterna_wire::limits::VM_DESCRIPTION_BYTES;
use sterna_wire::vmdesc::{self, SectionLength};

use super::body::{self, End, RecordSink};
use super::cursor::Cursor;
use super::head::{self, Head, Lengths};
use super::mapped::read_exact;
use super::source::{Input, Piped, ReadAt, Sequential};
use super::tee::Tee;
use super::{half_repaired, libvirt, sniff, tail};
use crate::ImageError;
use crate::compression::{Places, decompress_with};
use crate::model::{Compression, Container, Form, ImageKind, Shape};

/// An image whose head has been read.
pub(crate) struct Begun {
    pub(crate) kind: ImageKind,
    pub(crate) stream_offset: u64,
    pub(crate) head: Head,
    pub(super) file: Arc<str>,
    cursor: Cursor,
    lengths: Lengths,
    /// Where the decompressed stream's bytes stand in the file.
    places: Places,
}

impl Begun {
    /// Begins to read `source`. What is consumed of the decompressed stream also goes to `tee`, which is held from the end of
    /// RAM on.
    pub(crate) fn of_source(
        source: &Arc<dyn ReadAt>,
        name: &str,
        tee: Option<Tee>,
    ) -> Result<Self, ImageError> {
        let broken_off = half_repaired::broken_off(&**source);
        if broken_off.map_err(|error| ImageError::io(name, "read", error))?.is_some() {
            return Err(ImageError::HalfRepaired { file: name.to_owned() });
        }
        let (kind, stream_offset) = kind(&**source, name)?;
        // The description lies at the end, which only a stream that is not compressed lets see beforehand.
        let lengths = match kind.compression {
            Compression::None => {
                let source = Arc::clone(source);
                Lengths::new(move || section_lengths(&*source).unwrap_or_default())
            }
            _ => Lengths::unknown(),
        };
        let sequential = Sequential::new(Arc::clone(source), stream_offset);
        let places = Places::default();
        let input: Box<dyn Input> = match kind.compression {
            Compression::None => Box::new(sequential),
            compression => {
                let decompressed = decompress_with(compression, sequential, &places);
                Box::new(Piped(decompressed.map_err(|error| ImageError::io(name, "decompress", error))?))
            }
        };
        Self::of_input(input, kind.clone(), stream_offset, name, tee, (lengths, places))
    }

    /// Begins to read a pipe: a bare legacy stream, compressed or not.
    pub(crate) fn of_pipe(
        mut pipe: Box<dyn Read + Send>,
        name: &str,
        tee: Option<Tee>,
    ) -> Result<Self, ImageError> {
        let mut magic = Vec::new();
        let read = (&mut pipe).take(sniff::BYTES as u64).read_to_end(&mut magic);
        read.map_err(|error| ImageError::io(name, "read", error))?;
        let compression = match sniff::sniff(&magic) {
            Some(sniff::Sniffed::Stream(compression)) => compression,
            Some(sniff::Sniffed::Libvirt) => {
                let text = format!("{name} is a libvirt save image: give it as a file, not through a pipe");
                return Err(ImageError::Request(text));
            }
            None => return Err(unknown(&magic, name)),
        };
        let whole = io::Cursor::new(magic).chain(pipe);
        let places = Places::default();
        let decompressed = decompress_with(compression, whole, &places)
            .map_err(|error| ImageError::io(name, "decompress", error))?;
        let kind = ImageKind { container: Container::Bare, compression, form: Form::Legacy };
        Self::of_input(Box::new(Piped(decompressed)), kind, 0, name, tee, (Lengths::unknown(), places))
    }

    fn of_input(
        input: Box<dyn Input>,
        kind: ImageKind,
        stream_offset: u64,
        name: &str,
        tee: Option<Tee>,
        (mut lengths, places): (Lengths, Places),
    ) -> Result<Self, ImageError> {
        let file: Arc<str> = name.into();
        let position = if kind.compression == Compression::None { stream_offset } else { 0 };
        let mut cursor = Cursor::new(input, Arc::clone(&file), position).copied_to(tee);
        let in_file = |error| in_compressed(error, &kind, stream_offset, &places);
        let head = head::read(&mut cursor, &mut lengths).map_err(in_file)?;
        let kind = ImageKind { form: head.shape.form(), ..kind };
        check_format(&kind, name)?;
        Ok(Self { kind, stream_offset, head, file, cursor, lengths, places })
    }

    /// The name of the file, for errors.
    pub(crate) fn file_name(&self) -> &str {
        &self.file
    }

    /// Reads on to the end; page records go to `sink`.
    pub(crate) fn finish(mut self, sink: &mut dyn RecordSink) -> Result<(Shape, End), ImageError> {
        let read = body::read(&mut self.cursor, &mut self.head, &mut self.lengths, sink);
        let end = read.map_err(|error| in_compressed(error, &self.kind, self.stream_offset, &self.places))?;
        self.cursor.give()?;
        Ok((self.head.shape, end))
    }
}

/// An error in a compressed image, with its place in the file besides that in the decompressed stream.
fn in_compressed(error: ImageError, kind: &ImageKind, stream_offset: u64, places: &Places) -> ImageError {
    match error {
        ImageError::Broken { file, offset, rule, paragraph } if kind.compression != Compression::None => {
            let place = places.compressed(offset).map_or(String::new(), |(from, to)| {
                let (from, to) = (stream_offset + from, stream_offset + to);
                format!(", which comes out of bytes {from} to {to} of the file")
            });
            let rule = format!("{rule} (a byte of the decompressed stream{place})");
            ImageError::Broken { file, offset, rule, paragraph }
        }
        ImageError::Compression { file, compression, reason, decompressed, compressed } => {
            ImageError::Compression {
                file,
                compression,
                reason,
                decompressed,
                compressed: stream_offset + compressed,
            }
        }
        error => error,
    }
}

/// What the description at the end of `source` says of the lengths of bodies; `None` if there is none.
fn section_lengths(source: &dyn ReadAt) -> Option<Vec<SectionLength>> {
    let end = source.len_bytes().ok()?;
    // More than a description may have, and the devices need not be whole.
    let start = end.saturating_sub(VM_DESCRIPTION_BYTES as u64 + 64);
    let mut bytes = vec![0; (end - start) as usize];
    read_exact(source, "", start, &mut bytes, "the description").ok()?;
    let description = tail::split(&bytes, true).description?;
    vmdesc::section_lengths(&bytes[description]).ok()
}

/// The container and the compression of `source`, and where its stream starts. The form is not known yet.
fn kind(source: &dyn ReadAt, name: &str) -> Result<(ImageKind, u64), ImageError> {
    let mut magic = [0; sniff::BYTES];
    let length = source.len_bytes().map_err(|error| ImageError::io(name, "fstat", error))?;
    let magic = &mut magic[..length.min(sniff::BYTES as u64) as usize];
    read_exact(source, name, 0, magic, "the first bytes")?;
    let form = Form::Legacy;
    match sniff::sniff(magic) {
        Some(sniff::Sniffed::Stream(compression)) => {
            Ok((ImageKind { container: Container::Bare, compression, form }, 0))
        }
        Some(sniff::Sniffed::Libvirt) => {
            let (header, offset) = libvirt::read(source, name)?;
            if !header.is_complete {
                return Err(ImageError::Unfinished { file: name.to_owned() });
            }
            // Versions 0 and 1 know no formats (§2).
            let compression = match header.version {
                2 => sniff::compression_of(header.format).unwrap_or(Compression::None),
                _ => Compression::None,
            };
            Ok((ImageKind { container: Container::Libvirt(header), compression, form }, offset))
        }
        None => Err(unknown(magic, name)),
    }
}

fn unknown(magic: &[u8], name: &str) -> ImageError {
    if magic.is_empty() {
        return ImageError::Torn { file: name.to_owned(), offset: 0, what: "the first bytes" };
    }
    let magic = format!("{:?}", String::from_utf8_lossy(magic));
    ImageError::Unknown { file: name.to_owned(), magic }
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
