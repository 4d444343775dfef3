//! What can go wrong with an image: which file, which byte, which rule, whose fault, and what to do next.

use std::io;

use sterna_ram::RamError;
use sterna_transport::TransportError;
use sterna_wire::WireError;

/// Why an image could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The image breaks a rule of its format. No setting helps: take another copy, or ask `sterna repair`.
    #[error("{file}, byte {offset}: {rule} ({paragraph})")]
    Broken {
        /// The image.
        file: String,
        /// Offset of the offending byte: in the file, or in the decompressed stream of a compressed image.
        offset: u64,
        /// The rule that is broken.
        rule: String,
        /// Where the rule is written down, such as `specs/mapped-ram.md §4.3`.
        paragraph: &'static str,
    },
    /// The image ends too early: it was cut, or is still being written.
    #[error("{file} ends at byte {offset}, inside {what}: it is truncated, or still being written")]
    Torn {
        /// The image.
        file: String,
        /// Where it ends.
        offset: u64,
        /// What is not whole.
        what: &'static str,
    },
    /// The image can be read, and is damaged: devices, texts, or what describes them. `sterna verify` says all of it;
    /// [`ConvertOptions::force_damaged`](crate::convert::ConvertOptions::force_damaged) takes it as it is.
    #[error("{file} is damaged and was not changed: {first}{}. `sterna verify` shows more", more_findings(*.more))]
    Damaged {
        /// The image.
        file: String,
        /// The worst of it, with its place.
        first: String,
        /// How much more there is.
        more: usize,
    },
    /// The file is no image that Sterna knows.
    #[error("{file} is not an image of a virtual machine: it starts with {magic}")]
    Unknown {
        /// The file.
        file: String,
        /// Its first bytes, as text.
        magic: String,
    },
    /// The image is sound, but of a kind that Sterna does not read.
    #[error("{file}: {rule} ({paragraph})")]
    Unsupported {
        /// The image.
        file: String,
        /// What it is.
        rule: String,
        /// Where that is written down.
        paragraph: &'static str,
    },
    /// libvirt began to save into this file and did not finish (`LibvirtQemudPart`).
    #[error("{file}: libvirt never finished this save image (LibvirtQemudPart, specs/libvirt-save.md §4.1)")]
    Unfinished {
        /// The image.
        file: String,
    },
    /// A background snapshot whose bitmaps QEMU never wrote (`specs/mapped-ram.md §4.9`): all of RAM would be zero.
    #[error(
        "{file} is a background snapshot whose page bitmaps QEMU never wrote; it would load as empty memory: `sterna \
         repair` mends it (specs/mapped-ram.md §4.9)"
    )]
    NoBitmaps {
        /// The image.
        file: String,
    },
    /// A repair in place was interrupted: some bitmaps are written, others are not.
    #[error(
        "an in-place repair of {file} was interrupted, and pages may be missing: repeat `sterna repair --in-place` \
         (specs/mapped-ram.md §7.5)"
    )]
    HalfRepaired {
        /// The image.
        file: String,
    },
    /// More opaque bytes than are kept in memory.
    #[error("{file}: {what} takes more than {limit_bytes} bytes, which is more than Sterna keeps in memory")]
    TooLarge {
        /// The image.
        file: String,
        /// What is so large.
        what: &'static str,
        /// The ceiling in bytes.
        limit_bytes: u64,
    },
    /// The file changed while it was read.
    #[error("{file} changed while it was read; wait for its writer to finish and try again")]
    Changed {
        /// The image.
        file: String,
    },
    /// The target is there already.
    #[error("{file} exists; remove it, name another file, or use --force")]
    Exists {
        /// The target.
        file: String,
    },
    /// Source and target are the same file.
    #[error("{file} is both source and target; name another target")]
    SameFile {
        /// The file.
        file: String,
    },
    /// What was asked for makes no sense for this image; the text says why and what to do.
    #[error("{0}")]
    Request(String),
    /// A compressed stream is damaged, or a compressor failed.
    #[error(
        "{file}: {compression}: {reason}, in or before byte {compressed} of the file ({decompressed} bytes were decompressed by then)"
    )]
    Compression {
        /// The image.
        file: String,
        /// The format, such as `zstd`.
        compression: &'static str,
        /// What the codec says.
        reason: String,
        /// Bytes of the stream that were decompressed before.
        decompressed: u64,
        /// Byte of the file up to which the codec had read: the damage is in the block that holds it, or ends there.
        compressed: u64,
    },
    /// The system refused a call on a file.
    #[error("{file}: {call} failed: {source}")]
    Io {
        /// The file.
        file: String,
        /// What was tried.
        call: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The format cannot express what is to be written.
    #[error("image: {0}")]
    Wire(#[from] WireError),
    /// The file system refused.
    #[error("image: {0}")]
    File(#[from] TransportError),
    /// Guest RAM could not be reached.
    #[error("image: {0}")]
    Ram(#[from] RamError),
}

fn more_findings(more: usize) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more)") }
}

impl ImageError {
    /// Whether the image itself is damaged or no image; else this side, or the request, is at fault.
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
        )
    }

    pub(crate) fn io(file: &str, call: &'static str, source: io::Error) -> Self {
        Self::Io { file: file.to_owned(), call, source }
    }
}
