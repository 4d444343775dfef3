//! An image after its head was read: its format, and a cursor before its pages.

use std::io::{self, Read};
use std::sync::Arc;

use sterna_wire::limits::VM_DESCRIPTION_BYTES;
use sterna_wire::vmdesc::{self, SectionLength};

use super::body::{self, End, RecordSink};
use super::cursor::{Cursor, MAPPED_NEEDS_RANDOM_ACCESS};
use super::head::{self, Head, Lengths};
use super::source::read_exact;
use super::source::{Input, Piped, ReadAt, Sequential};
use super::tee::Tee;
use super::{half_repaired, libvirt, tail};
use crate::compression::{Places, decompress_with};
use crate::error::ImageError;
use crate::format::{Compression, Form, Format};
use crate::model::{LibvirtHeader, Shape};

/// The format according to the container, libvirt's header, and the stream's offset in the file.
type Front = (Format, Option<LibvirtHeader>, u64);

/// An image whose head has been read.
pub(crate) struct Begun {
    pub(crate) format: Format,
    /// Header and texts of libvirt's container; none for a bare image.
    pub(crate) header: Option<LibvirtHeader>,
    pub(crate) stream_offset: u64,
    pub(crate) head: Head,
    pub(super) file: Arc<str>,
    cursor: Cursor,
    lengths: Lengths,
    /// Maps offsets in the decompressed stream to offsets in the file.
    places: Places,
}

impl Begun {
    /// Starts to read `source`.
    ///
    /// Consumed bytes of the decompressed stream also go to `tee`. After the end of RAM, `tee` holds them back.
    pub(crate) fn of_source(
        source: &Arc<dyn ReadAt>,
        name: &str,
        tee: Option<Tee>,
    ) -> Result<Self, ImageError> {
        let broken_off = half_repaired::broken_off(&**source);
        if broken_off.map_err(|error| ImageError::io(name, "read", error))?.is_some() {
            return Err(ImageError::HalfRepaired { file: name.to_owned() });
        }
        let (format, header, stream_offset) = front(&**source, name)?;
        // The description is at the end of the stream. Only an uncompressed stream can be read there first.
        let lengths = match format.compression() {
            Compression::None => {
                let source = Arc::clone(source);
                Lengths::new(move || section_lengths(&*source).unwrap_or_default())
            }
            _ => Lengths::unknown(),
        };
        let sequential = Sequential::new(Arc::clone(source), stream_offset);
        let places = Places::default();
        let input: Box<dyn Input> = match format.compression() {
            Compression::None => Box::new(sequential),
            compression => {
                let decompressed = decompress_with(compression, sequential, &places);
                Box::new(Piped(decompressed.map_err(|error| ImageError::io(name, "decompress", error))?))
            }
        };
        let front = (format, header, stream_offset);
        let mut begun = Self::of_input(input, front, name, tee, (lengths, places))?;
        begun.cursor.set_ends_anywhere(source.ends_anywhere());
        Ok(begun)
    }

    /// Starts to read a pipe: a bare legacy stream, compressed or not.
    pub(crate) fn of_pipe(
        mut pipe: Box<dyn Read + Send>,
        name: &str,
        tee: Option<Tee>,
    ) -> Result<Self, ImageError> {
        let mut magic = Vec::new();
        let read = (&mut pipe).take(Format::FIRST_BYTES as u64).read_to_end(&mut magic);
        read.map_err(|error| ImageError::io(name, "read", error))?;
        let format = match Format::of_first_bytes(&magic) {
            Some(format) if !format.is_libvirt() => format,
            Some(_) => {
                let text = format!("{name} is a libvirt save image: give it as a file, not through a pipe");
                return Err(ImageError::Request(text));
            }
            None => return Err(unknown(&magic, name)),
        };
        let whole = io::Cursor::new(magic).chain(pipe);
        let places = Places::default();
        let decompressed = decompress_with(format.compression(), whole, &places)
            .map_err(|error| ImageError::io(name, "decompress", error))?;
        let front = (format, None, 0);
        Self::of_input(Box::new(Piped(decompressed)), front, name, tee, (Lengths::unknown(), places))
    }

    fn of_input(
        input: Box<dyn Input>,
        (format, header, stream_offset): Front,
        name: &str,
        tee: Option<Tee>,
        (mut lengths, places): (Lengths, Places),
    ) -> Result<Self, ImageError> {
        let file: Arc<str> = name.into();
        let position = if format.is_compressed() { 0 } else { stream_offset };
        let mut cursor = Cursor::new(input, Arc::clone(&file), position).copied_to(tee);
        let in_file = |error| in_compressed(error, format, stream_offset, &places);
        let head = head::read(&mut cursor, &mut lengths).map_err(in_file)?;
        let format = with_form(format, head.shape.form(), name)?;
        Ok(Self { format, header, stream_offset, head, file, cursor, lengths, places })
    }

    /// The name of the file, for errors.
    pub(crate) fn file_name(&self) -> &str {
        &self.file
    }

    /// Reads the stream to its end; page records go to `sink`.
    pub(crate) fn finish(mut self, sink: &mut dyn RecordSink) -> Result<(Shape, End), ImageError> {
        let read = body::read(&mut self.cursor, &mut self.head, &mut self.lengths, sink);
        let end =
            read.map_err(|error| in_compressed(error, self.format, self.stream_offset, &self.places))?;
        self.cursor.give()?;
        Ok((self.head.shape, end))
    }
}

/// Adds the place in the file to an error in the decompressed stream.
fn in_compressed(error: ImageError, format: Format, stream_offset: u64, places: &Places) -> ImageError {
    match error {
        ImageError::Broken { file, offset, rule, paragraph } if format.is_compressed() => {
            let place = places.compressed(offset).map_or(String::new(), |(from, to)| {
                let (from, to) = (stream_offset + from, stream_offset + to);
                format!(", which is compressed in bytes {from} to {to} of the file")
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

/// The lengths of section bodies in the description of `source`; `None` without a description.
///
/// Descriptions are small, and the largest allowed one is not: the parts that are read grow, so that a restore does not wait
/// for 16 MiB. Each part is longer than a description that can be in it. The devices need not be complete in it.
fn section_lengths(source: &dyn ReadAt) -> Option<Vec<SectionLength>> {
    let end = source.len_bytes().ok()?;
    [64 << 10, 1 << 20, VM_DESCRIPTION_BYTES as u64 + 64].into_iter().find_map(|length| {
        let mut bytes = vec![0; length.min(end) as usize];
        read_exact(source, "", end - bytes.len() as u64, &mut bytes, "the description").ok()?;
        let description = tail::split(&bytes, true).description?;
        // If other bytes follow, a larger part may have a description that ends at the last byte.
        let is_last = description.end == bytes.len() || length > VM_DESCRIPTION_BYTES as u64;
        if is_last { vmdesc::section_lengths(&bytes[description]).ok() } else { None }
    })
}

/// Reads the container before the stream in `source`. The form of a bare stream is not known yet.
fn front(source: &dyn ReadAt, name: &str) -> Result<Front, ImageError> {
    let mut magic = [0; Format::FIRST_BYTES];
    let length = source.len_bytes().map_err(|error| ImageError::io(name, "fstat", error))?;
    let magic = &mut magic[..length.min(Format::FIRST_BYTES as u64) as usize];
    read_exact(source, name, 0, magic, "the first bytes")?;
    match Format::of_first_bytes(magic) {
        Some(format) if !format.is_libvirt() => Ok((format, None, 0)),
        Some(raw) => {
            let (header, offset) = libvirt::read(source, name)?;
            if !header.is_complete {
                return Err(ImageError::Unfinished { file: name.to_owned() });
            }
            // Versions 0 and 1 have no format word (§2). The header's decoder refuses an unknown word.
            let format = match header.version {
                2 => Format::of_number(header.format).unwrap_or(raw),
                _ => raw,
            };
            Ok((format, Some(header), offset))
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

/// The format of a stream in `form`. It must match the format word (`specs/libvirt-save.md §2`).
fn with_form(format: Format, form: Form, file: &str) -> Result<Format, ImageError> {
    let (file, is) = (file.to_owned(), format.in_form(form));
    if format.is_libvirt() && format.form() != form {
        let is = if form == Form::Mapped { "mapped-ram" } else { "a legacy stream" };
        let rule = format!("the format word is {}, but the stream is {is}", format.word());
        return Err(ImageError::Broken { file, offset: 28, rule, paragraph: "specs/libvirt-save.md §2" });
    }
    if is.form() != form {
        let rule = MAPPED_NEEDS_RANDOM_ACCESS.to_owned();
        return Err(ImageError::Unsupported { file, rule, paragraph: "specs/mapped-ram.md §4.1" });
    }
    Ok(is)
}
