//! Random access to the memory of a guest.

use std::io;

use sterna_image::ImageError;
use sterna_store::StoreError;

use crate::working_set::WorkingSet;

/// Bytes of the smallest page.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Bytes of a huge page, and of the largest frame.
pub(crate) const HUGE_BYTES: u64 = 2 << 20;

/// The memory of a guest, which can be read in any order.
///
/// Offsets are those of the guest's RAM regions, one after the other. A *frame* is the unit in which the source reads
/// cheaply. For example, a compressed image decompresses a whole frame to read one page of it.
pub trait PageSource: Send + Sync {
    /// The image's path or address, for messages.
    fn name(&self) -> &str;

    /// Length of the memory in bytes, a multiple of 4096.
    fn len_bytes(&self) -> u64;

    /// Length of a frame in bytes: a power of two from 4 KiB to 2 MiB. The last frame may be shorter.
    fn frame_bytes(&self) -> u64;

    /// Whether these bytes are known to be zeros, without reading them. The range consists of whole 4 KiB pages.
    fn is_zero(&self, offset: u64, bytes: u64) -> bool;

    /// Fills `to` with the bytes from `offset` on if that needs no wait for a disk or a network. Returns `false` if it does;
    /// the content of `to` is then undefined.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_now(&self, offset: u64, to: &mut [u8]) -> Result<bool, SourceError>;

    /// Fills `to` with the bytes from `offset` on, and waits for them. The range may begin and end inside a frame.
    ///
    /// The bytes are those of the image as it was opened: what can be checked is checked before the call returns.
    ///
    /// # Errors
    /// [`SourceError`]: the content of `to` is then undefined.
    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), SourceError>;

    /// The working set that the image contains, which is filled first if the options name no other. By default none.
    fn working_set(&self) -> Option<WorkingSet> {
        None
    }
}

/// The memory could not be read. The guests that wait for it cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The system refused.
    #[error("{name}, byte {offset}: {call}: {source}")]
    System {
        /// The image.
        name: String,
        /// Offset of the first byte in the guest's memory.
        offset: u64,
        /// The system call.
        call: &'static str,
        /// The error of the call.
        source: io::Error,
    },
    /// The image has changed since it was opened.
    #[error("{name} has changed since it was opened: do not write to an image that is served")]
    Changed {
        /// The image.
        name: String,
    },
    /// The image ends before a page that it had when it was opened.
    #[error(
        "{name} ends before byte {offset} of the guest's memory: do not write to an image that is served"
    )]
    Short {
        /// The image.
        name: String,
        /// Offset of the first missing byte in the guest's memory.
        offset: u64,
    },
    /// The memory has a length that no guest has.
    #[error(
        "{name} has {bytes} bytes of memory, but a guest's memory is a multiple of 4096 bytes and not empty"
    )]
    Length {
        /// The image.
        name: String,
        /// Length of the memory.
        bytes: u64,
    },
    /// The image lacks the content of a RAM block.
    #[error("{name} lacks the pages of the block {block}, which were left out when it was saved")]
    Skipped {
        /// The image.
        name: String,
        /// The block.
        block: String,
    },
    /// The image cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An image of Sterna's format cannot be read. The error names the frame.
    #[error(transparent)]
    Store(#[from] StoreError),
}
