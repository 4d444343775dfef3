//! Why an image cannot be sent or served.

use crate::error::Cause;

/// A property of an image, or of a machine in memory, because of which it cannot move to a VMM.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum UnusableImage {
    /// The file ends before the devices' state does.
    #[error("{image} ends inside the devices' state: it cannot be restored")]
    CutOff {
        /// Name of the image.
        image: String,
    },
    /// A background snapshot whose page bitmaps QEMU never wrote.
    #[error(
        "{image} is a background snapshot whose bitmaps were never written; all of RAM would be zero: `sterna repair` \
         repairs it"
    )]
    NoBitmaps {
        /// Name of the image.
        image: String,
    },
    /// Shared memory was left out when the image was saved.
    #[error(
        "{image}: it was saved with x-ignore-shared and does not hold all of RAM; QEMU excludes that from postcopy: restore \
         it without --lazy"
    )]
    WithoutSharedMemory {
        /// Name of the image.
        image: String,
    },
    /// The machine had huge pages, and an image cannot be served to such a machine.
    #[error(
        "{image}: its block {block:?} was in huge pages, and QEMU's postcopy needs the same at the destination: restore it \
         without --lazy"
    )]
    HugePages {
        /// Name of the image.
        image: String,
        /// Name of the block.
        block: String,
    },
    /// The machine type has no section footers, which postcopy needs.
    #[error("{image}: its machine type is older than QEMU's postcopy: restore it without --lazy")]
    OldMachineType {
        /// Name of the image.
        image: String,
    },
    /// The image was saved while postcopy ran.
    #[error(
        "{image}: it has command {number}, of a postcopy that had begun when it was saved: it does not hold all of RAM, and \
         no VM can load it"
    )]
    PostcopyHadBegun {
        /// Name of the image.
        image: String,
        /// Number of the command.
        number: u16,
    },
    /// The sections of one part cannot be separated, so that commands between them cannot be removed.
    #[error("{image}: its sections {place} cannot be told apart ({flaw}): restore it without --lazy")]
    Sections {
        /// Name of the image.
        image: String,
        /// The part of the stream.
        place: &'static str,
        /// The first byte that is no section, and why.
        flaw: String,
    },
    /// Memory was given whose blocks are not those of the machine.
    #[error(
        "the machine's RAM has other blocks than its image lists: create the memory with the names and lengths of Shape::ram"
    )]
    OtherBlocks,
    /// A machine in memory that has not arrived yet.
    #[error("no machine has arrived in this memory: receive one before it is sent on")]
    NotArrived,
    /// The image breaks a rule of its format. The error names the byte and the rule.
    #[error("{0}")]
    Unreadable(#[source] Cause),
}
