//! The formats of images: one table of names, numbers, first bytes, forms and compressions.
//!
//! The reader, the writers, the converter and the commands use this table. The verifier has its own decoder, but uses
//! this table, too. A second table would not find more damage, and could differ.

use std::fmt;
use std::str::FromStr;

use sterna_wire::libvirt::{FORMAT_SPARSE, MAGIC_COMPLETE, MAGIC_PARTIAL};
use sterna_wire::main::FileHeader;

/// Declares [`Format`] from the table, so that [`Format::ALL`] contains every format.
macro_rules! formats {
    ($(
        $(#[$doc:meta])+
        $format:ident: $name:literal, $number:expr, $magic:expr, $form:ident, $compression:ident;
    )+) => {
        /// A format of images: container, form and compression.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Format {
            $($(#[$doc])+ $format,)+
        }

        impl Format {
            /// All formats: bare ones, then libvirt's by their numbers.
            pub const ALL: &'static [Format] = &[$(Format::$format),+];

            const fn row(self) -> Row {
                match self {
                    $(Format::$format => Row {
                        name: $name,
                        number: $number,
                        magic: $magic,
                        form: Form::$form,
                        compression: Compression::$compression,
                    },)+
                }
            }
        }
    };
}

/// First bytes of QEMU's stream.
const STREAM: &[u8] = &FileHeader::MAGIC;
/// First bytes of libvirt's container around a complete image.
const CONTAINER: &[u8] = &MAGIC_COMPLETE;

/// First bytes of Sterna's own format.
const FRAMES: &[u8] = b"STERNAIM";

formats! {
    /// QEMU's mapped-ram: pages at fixed places.
    MappedRam: "mapped-ram", None, STREAM, Mapped, None;
    /// Sterna's own format: compressed, checked frames (`specs/image.md`). Readers see it as mapped-ram.
    Sterna: "sterna", None, FRAMES, Mapped, None;
    /// QEMU's migration stream in a file, pages in stream order.
    Legacy: "legacy", None, STREAM, Legacy, None;
    /// QEMU's stream, compressed with gzip.
    LegacyGzip: "legacy-gzip", None, b"\x1f\x8b", Legacy, Gzip;
    /// QEMU's stream, compressed with bzip2.
    LegacyBzip2: "legacy-bzip2", None, b"BZh", Legacy, Bzip2;
    /// QEMU's stream, compressed with xz.
    LegacyXz: "legacy-xz", None, b"\xfd7zXZ\0", Legacy, Xz;
    /// QEMU's stream, compressed with lzop.
    LegacyLzop: "legacy-lzop", None, b"\x89LZO", Legacy, Lzop;
    /// QEMU's stream, compressed with zstd.
    LegacyZstd: "legacy-zstd", None, b"\x28\xb5\x2f\xfd", Legacy, Zstd;
    /// libvirt's *raw*: QEMU's stream in libvirt's container.
    LibvirtRaw: "libvirt-raw", Some(0), CONTAINER, Legacy, None;
    /// libvirt's *gzip*: QEMU's stream, compressed, in libvirt's container.
    LibvirtGzip: "libvirt-gzip", Some(1), CONTAINER, Legacy, Gzip;
    /// libvirt's *bzip2*: QEMU's stream, compressed, in libvirt's container.
    LibvirtBzip2: "libvirt-bzip2", Some(2), CONTAINER, Legacy, Bzip2;
    /// libvirt's *xz*: QEMU's stream, compressed, in libvirt's container.
    LibvirtXz: "libvirt-xz", Some(3), CONTAINER, Legacy, Xz;
    /// libvirt's *lzop*: QEMU's stream, compressed, in libvirt's container.
    LibvirtLzop: "libvirt-lzop", Some(4), CONTAINER, Legacy, Lzop;
    /// libvirt's *zstd*: QEMU's stream, compressed, in libvirt's container.
    LibvirtZstd: "libvirt-zstd", Some(5), CONTAINER, Legacy, Zstd;
    /// libvirt's *sparse*: mapped-ram in libvirt's container.
    LibvirtSparse: "libvirt-sparse", Some(FORMAT_SPARSE), CONTAINER, Mapped, None;
}

/// Where an image stores its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// At fixed places, with a bitmap for each block (`specs/mapped-ram.md §4`).
    Mapped,
    /// As records in the stream (`specs/mapped-ram.md §3`).
    Legacy,
}

/// Compression of the stream (`specs/libvirt-save.md §2`). Only legacy streams can be compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    /// The stream is not compressed.
    None,
    /// gzip, with the file magic `1f 8b`.
    Gzip,
    /// bzip2, with the file magic `BZh`.
    Bzip2,
    /// xz, with the file magic `fd 37 7a 58 5a 00`.
    Xz,
    /// lzop, with the file magic `89 4c 5a 4f`.
    Lzop,
    /// zstd, with the file magic `28 b5 2f fd`.
    Zstd,
}

/// A row of the table.
struct Row {
    /// The name in `--format` and in reports.
    name: &'static str,
    /// libvirt's format word; none for a bare image.
    number: Option<u32>,
    /// The first bytes of the file.
    magic: &'static [u8],
    form: Form,
    compression: Compression,
}

impl Format {
    /// The largest number of bytes that [`of_first_bytes`](Self::of_first_bytes) reads.
    pub const FIRST_BYTES: usize = 16;

    /// The name that `sterna convert --format` takes, such as `libvirt-zstd`.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// libvirt's format word (`specs/libvirt-save.md §2`); none for a bare image.
    pub const fn number(self) -> Option<u32> {
        self.row().number
    }

    /// The first bytes of a complete file.
    pub const fn magic(self) -> &'static [u8] {
        self.row().magic
    }

    /// Where the image stores its pages.
    pub const fn form(self) -> Form {
        self.row().form
    }

    /// How the stream is compressed.
    pub const fn compression(self) -> Compression {
        self.row().compression
    }

    /// Whether the stream is compressed.
    pub const fn is_compressed(self) -> bool {
        !matches!(self.compression(), Compression::None)
    }

    /// Whether the stream is in libvirt's container.
    pub const fn is_libvirt(self) -> bool {
        self.number().is_some()
    }

    /// The name without its container, as libvirt's configuration spells it: `sparse`, `raw`, `zstd`.
    pub fn word(self) -> &'static str {
        self.name().strip_prefix("libvirt-").unwrap_or(self.name())
    }

    /// The format with libvirt's format word `number`; none for an unknown number.
    pub fn of_number(number: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.number() == Some(number))
    }

    /// Detects the format from the first bytes of a file; none without an image.
    ///
    /// [`Format::Legacy`] means any QEMU stream. Its configuration can still name mapped-ram.
    /// [`Format::LibvirtRaw`] means libvirt's container, complete or not. Its header contains the format word.
    pub fn of_first_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.starts_with(&MAGIC_COMPLETE) || bytes.starts_with(&MAGIC_PARTIAL) {
            return Some(Self::LibvirtRaw);
        }
        let is_told = |format: &Self| format.form() == Form::Legacy || *format == Self::Sterna;
        let mut bare = Self::ALL.iter().copied().filter(is_told);
        bare.find(|format| bytes.starts_with(format.magic()))
    }

    /// This format with its pages in `form`, in the same container. A compressed stream has only one form.
    #[must_use]
    pub fn in_form(self, form: Form) -> Self {
        match (self.is_compressed(), self.is_libvirt(), form) {
            (true, ..) => self,
            (false, false, Form::Mapped) if self == Self::Sterna => self,
            (false, false, Form::Mapped) => Self::MappedRam,
            (false, false, Form::Legacy) => Self::Legacy,
            (false, true, Form::Mapped) => Self::LibvirtSparse,
            (false, true, Form::Legacy) => Self::LibvirtRaw,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.iter().copied().find(|format| format.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|format| format.name()).collect();
            format!("{text:?} is not a format; formats are {}", names.join(", "))
        })
    }
}

impl Form {
    /// The name of the bare format in this form.
    pub const fn name(self) -> &'static str {
        match self {
            Form::Mapped => Format::MappedRam.name(),
            Form::Legacy => Format::Legacy.name(),
        }
    }
}

impl Compression {
    /// All compressions except [`Compression::None`].
    pub fn all() -> impl Iterator<Item = Compression> {
        let bare = |format: &&Format| !format.is_libvirt() && format.is_compressed();
        Format::ALL.iter().filter(bare).map(|format| format.compression())
    }

    /// The name of the decompressing program, as libvirt spells it; `raw` for no compression.
    pub fn name(self) -> &'static str {
        let mut bare = Format::ALL.iter().filter(|format| !format.is_libvirt());
        let named = bare.find(|format| format.is_compressed() && format.compression() == self);
        named.and_then(|format| format.name().strip_prefix("legacy-")).unwrap_or("raw")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use sterna_wire::libvirt::{ByteOrder, SaveHeader, VERSION};

    use super::*;

    #[test]
    fn name_of_every_format_parses_back_to_it_and_no_other_text_does() {
        for &format in Format::ALL {
            assert_eq!(format.name().parse(), Ok(format));
            assert_eq!(format.to_string(), format.name());
        }
        for text in ["", "raw", "sparse", "libvirt", "libvirt-", "legacy-raw", "qcow2", "mapped-ram-zstd"] {
            let refused = text.parse::<Format>().unwrap_err();
            assert!(Format::ALL.iter().all(|format| refused.contains(format.name())), "{refused}");
        }
    }

    #[test]
    fn names_numbers_first_bytes_and_parts_of_all_formats_differ() {
        let (mut names, mut numbers, mut magics, mut parts) =
            (HashSet::new(), HashSet::new(), HashSet::new(), HashSet::new());
        for &format in Format::ALL {
            assert!(names.insert(format.name()), "{format}");
            let is_framed = format == Format::Sterna;
            let part = (format.is_libvirt(), is_framed, format.form(), format.compression());
            assert!(parts.insert(part), "{format}");
            match format.number() {
                Some(number) => assert!(numbers.insert(number), "{format}"),
                // Two bare formats may share a magic. Then the configuration in the stream names the form.
                None => assert!(magics.insert((format.magic(), format.form())), "{format}"),
            }
        }
    }

    #[test]
    fn first_bytes_of_every_format_give_it_up_to_its_form_and_number() {
        for &format in Format::ALL {
            let found = match format {
                Format::Sterna => format,
                _ if format.is_libvirt() => Format::LibvirtRaw,
                _ => format.in_form(Form::Legacy),
            };

            assert_eq!(Format::of_first_bytes(format.magic()), Some(found));
            assert!(format.magic().len() <= Format::FIRST_BYTES, "{format}");
            let short = &format.magic()[..format.magic().len() - 1];
            assert_eq!(Format::of_first_bytes(short), None, "{format}");
        }
        assert_eq!(Format::of_first_bytes(&MAGIC_PARTIAL), Some(Format::LibvirtRaw));
        assert_eq!(Format::of_first_bytes(b"#!/bin/sh"), None);
    }

    #[test]
    fn header_of_libvirt_is_decoded_with_exactly_the_numbers_that_have_a_format() {
        for number in 0..100 {
            let header = SaveHeader {
                is_complete: true,
                byte_order: ByteOrder::Little,
                version: VERSION,
                data_length: 1,
                was_running: 0,
                format: number,
                cookie_offset: 0,
            };
            let mut bytes = Vec::new();
            header.encode(&mut bytes);

            assert_eq!(SaveHeader::decode(&bytes).is_ok(), Format::of_number(number).is_some(), "{number}");
        }
    }

    #[test]
    fn format_in_another_form_keeps_its_container_and_a_compressed_one_stays() {
        for &format in Format::ALL {
            let mapped = format.in_form(Form::Mapped);

            assert_eq!(mapped.is_libvirt(), format.is_libvirt());
            assert_eq!(mapped.form() == Form::Mapped, !format.is_compressed(), "{format}");
            // The legacy form of Sterna's format is QEMU's stream. A stream does not tell that it came from there.
            assert!(mapped.in_form(format.form()) == format);
        }
    }

    #[test]
    fn every_compression_is_in_a_bare_format_that_has_its_name() {
        for &format in Format::ALL.iter().filter(|format| format.form() == Form::Legacy) {
            let compression = format.compression();

            assert_eq!(Compression::all().any(|known| known == compression), format.is_compressed());
            if format.is_libvirt() || format.is_compressed() {
                assert_eq!(format.name().rsplit('-').next(), Some(compression.name()));
            }
        }
    }
}
