//! How an image is wrapped: container, compression, form.

pub use sterna_wire::libvirt::ByteOrder;

/// Where the pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// At fixed places, with a bitmap per block (`specs/mapped-ram.md §4`).
    Mapped,
    /// Records in the stream (`specs/mapped-ram.md §3`).
    Legacy,
}

/// How the stream is compressed (`specs/libvirt-save.md §2`). Only legacy streams are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip.
    Gzip,
    /// bzip2.
    Bzip2,
    /// xz.
    Xz,
    /// lzop.
    Lzop,
    /// zstd.
    Zstd,
}

impl Compression {
    /// All of them.
    pub(crate) const ALL: [Compression; 6] = [
        Compression::None,
        Compression::Gzip,
        Compression::Bzip2,
        Compression::Xz,
        Compression::Lzop,
        Compression::Zstd,
    ];

    /// The name, as libvirt has it; `raw` for none.
    pub fn name(self) -> &'static str {
        match self {
            Compression::None => "raw",
            Compression::Gzip => "gzip",
            Compression::Bzip2 => "bzip2",
            Compression::Xz => "xz",
            Compression::Lzop => "lzop",
            Compression::Zstd => "zstd",
        }
    }
}

/// What is around the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Container {
    /// Nothing: the stream starts at byte 0.
    Bare,
    /// libvirt's save image (`specs/libvirt-save.md`).
    Libvirt(LibvirtHeader),
}

/// Header, XML and cookie of a libvirt save image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibvirtHeader {
    /// Whether the magic says that libvirt finished it.
    pub is_complete: bool,
    /// Byte order of the header's integers.
    pub byte_order: ByteOrder,
    /// Version, 0 to 2.
    pub version: u32,
    /// Bytes between the header (92) and the stream.
    pub data_length: u32,
    /// The word *was running*: not 0 if the CPUs are to be started after a restore.
    pub was_running: u32,
    /// The format word (§2).
    pub format: u32,
    /// The domain's XML without its NUL.
    pub xml: Vec<u8>,
    /// The cookie without its NUL; none if the image has none.
    pub cookie: Option<Vec<u8>>,
}

/// What kind of image it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageKind {
    /// What is around the stream.
    pub container: Container,
    /// How it is compressed.
    pub compression: Compression,
    /// Where the pages are.
    pub form: Form,
}

impl ImageKind {
    /// The name of the kind as `sterna convert --format` takes it: `mapped-ram`, `legacy`, `legacy-zstd`,
    /// `libvirt-raw`, `libvirt-sparse`, `libvirt-gzip`, …
    pub fn name(&self) -> String {
        match (&self.container, self.form, self.compression) {
            (Container::Bare, Form::Mapped, _) => "mapped-ram".to_owned(),
            (Container::Bare, Form::Legacy, Compression::None) => "legacy".to_owned(),
            (Container::Bare, Form::Legacy, compression) => format!("legacy-{}", compression.name()),
            (Container::Libvirt(_), Form::Mapped, _) => "libvirt-sparse".to_owned(),
            (Container::Libvirt(_), Form::Legacy, compression) => format!("libvirt-{}", compression.name()),
        }
    }
}
