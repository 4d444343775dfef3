//! The errors of images. They name the file, the byte, the broken rule and the next step.

use std::io;

use sterna_ram::RamError;
use sterna_store::StoreError;
use sterna_transport::TransportError;
use sterna_wire::WireError;

/// The reason why an image could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The image breaks a rule of its format. No setting helps: take another copy, or run `sterna repair`.
    #[error("{file}, byte {offset}: {rule} ({paragraph})")]
    Broken {
        /// Path or name of the image.
        file: String,
        /// Offset of the byte that breaks the rule.
        ///
        /// In a compressed image, it counts in the decompressed stream, otherwise in the file.
        offset: u64,
        /// The broken rule of the format, as a clause.
        rule: String,
        /// Where the rule is written down, such as `specs/mapped-ram.md §4.3`.
        paragraph: &'static str,
    },
    /// The image ends too early: it is truncated, or still being written.
    #[error("{file} ends at byte {offset}, inside {what}: it is truncated, or still being written")]
    Torn {
        /// Path or name of the image.
        file: String,
        /// Byte at which the file ends, or the decompressed stream of a compressed image.
        offset: u64,
        /// The part that is incomplete.
        what: &'static str,
    },
    /// The image can be read, but its devices, texts or description are damaged.
    ///
    /// `sterna verify` lists all damage.
    /// [`ConvertOptions::force_damaged`](crate::convert::ConvertOptions::force_damaged) accepts the image unchanged.
    #[error("{file} is damaged and was not changed: {first}{}. `sterna verify` shows more", more_findings(*.more))]
    Damaged {
        /// Path or name of the image.
        file: String,
        /// The most severe finding, with its place.
        first: String,
        /// Number of further findings.
        more: usize,
    },
    /// The file has no image format that Sterna knows.
    #[error("{file} is not an image of a virtual machine: it starts with {magic}")]
    Unknown {
        /// Path or name of the file.
        file: String,
        /// The first bytes of the file, as text.
        magic: String,
    },
    /// The image is valid, but has a property that Sterna does not read.
    #[error("{file}: {rule} ({paragraph})")]
    Unsupported {
        /// Path or name of the image.
        file: String,
        /// The property that is not supported.
        rule: String,
        /// Where the property is specified, such as `specs/mapped-ram.md §1.6`.
        paragraph: &'static str,
    },
    /// libvirt began to save into this file and did not finish (`LibvirtQemudPart`).
    #[error("{file}: libvirt never finished this save image (LibvirtQemudPart, specs/libvirt-save.md §4.1)")]
    Unfinished {
        /// Path or name of the image.
        file: String,
    },
    /// A background snapshot whose bitmaps QEMU never wrote (`specs/mapped-ram.md §4.9`).
    ///
    /// It would load with all of RAM zero.
    #[error(
        "{file} is a background snapshot whose page bitmaps QEMU never wrote; it would load as empty memory: `sterna \
         repair` repairs it (specs/mapped-ram.md §4.9)"
    )]
    NoBitmaps {
        /// Path or name of the image.
        file: String,
    },
    /// A repair in place was interrupted: some bitmaps are written, others are not.
    #[error(
        "an in-place repair of {file} was interrupted, and pages may be missing: repeat `sterna repair --in-place` \
         (specs/mapped-ram.md §7.5)"
    )]
    HalfRepaired {
        /// Path or name of the image.
        file: String,
    },
    /// The image has more opaque bytes than Sterna keeps in memory.
    #[error("{file}: {what} needs more than {limit_bytes} bytes, the limit of Sterna's memory for it")]
    TooLarge {
        /// Path or name of the image.
        file: String,
        /// The part that is too large.
        what: &'static str,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// The file changed while it was read.
    #[error("{file} changed while it was read; wait for its writer to finish and try again")]
    Changed {
        /// Path or name of the image.
        file: String,
    },
    /// The target exists, and replacing was not requested.
    #[error("{file} exists; remove it, give another file, or use --force")]
    Exists {
        /// Path of the target.
        file: String,
    },
    /// Source and target are the same file.
    #[error("{file} is both source and target; give another target")]
    SameFile {
        /// Path of the file.
        file: String,
    },
    /// The request is not possible for this image. The text contains the reason and the next step.
    #[error("{0}")]
    Request(String),
    /// A compressed stream is damaged, or a compressor failed.
    #[error(
        "{file}: {compression}: {reason}, in or before byte {compressed} of the file ({decompressed} bytes were decompressed by then)"
    )]
    Compression {
        /// Path or name of the image.
        file: String,
        /// The compression format, such as `zstd`.
        compression: &'static str,
        /// The codec's message about the damage.
        reason: String,
        /// Bytes of the stream that were decompressed before the error.
        decompressed: u64,
        /// Byte of the file up to which the codec had read. The damage is in the block that contains this byte, or
        /// that ends there.
        compressed: u64,
    },
    /// The system refused a call on a file.
    #[error("{file}: {call} failed: {source}")]
    Io {
        /// Path or name of the file.
        file: String,
        /// The system call or operation that failed.
        call: &'static str,
        /// The system's error for that call.
        source: io::Error,
    },
    /// The wire format cannot express the content to be written.
    #[error("image: {0}")]
    Wire(#[from] WireError),
    /// The page file could not be created, read or written.
    #[error("image: {0}")]
    File(#[from] TransportError),
    /// An image in Sterna's own format, or a store, could not be read or written.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// Guest RAM could not be reached.
    #[error("image: {0}")]
    Ram(#[from] RamError),
}

fn more_findings(more: usize) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more)") }
}

impl ImageError {
    /// Whether the image itself is damaged or not an image. False if this host or the request is the cause.
    pub fn is_image_at_fault(&self) -> bool {
        matches!(
            self,
            Self::Broken { .. }
                | Self::Torn { .. }
                | Self::Damaged { .. }
                | Self::Unknown { .. }
                | Self::Unsupported { .. }
                | Self::Unfinished { .. }
                | Self::NoBitmaps { .. }
                | Self::HalfRepaired { .. }
                | Self::TooLarge { .. }
                | Self::Compression { .. }
        ) || matches!(self, Self::Store(error) if error.is_image_at_fault())
    }

    /// Makes [`ImageError::Io`], or restores the error of an image in Sterna's format that is inside of `source`.
    pub(crate) fn io(file: &str, call: &'static str, source: io::Error) -> Self {
        match source.downcast::<StoreError>() {
            Ok(error) => Self::Store(error),
            Err(source) => Self::Io { file: file.to_owned(), call, source },
        }
    }
}
