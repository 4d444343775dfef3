//! The reasons why a guest, or all guests, cannot be served.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use sterna_ram::missing_pages::MissingPagesError;

use crate::handshake::HandshakeError;
use crate::source::SourceError;

/// The pager could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PagerError {
    /// A socket could not be bound.
    #[error("cannot listen at {path}: {source}; remove the file if no other process serves it")]
    Listen {
        /// The path of the socket.
        path: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The system refused a request.
    #[error("{call}: {source}")]
    System {
        /// The system call.
        call: &'static str,
        /// The error of the call.
        source: io::Error,
    },
    /// The guest's RAM cannot be served page by page.
    #[error(transparent)]
    Memory(#[from] MissingPagesError),
    /// The image does not have the memory that the guest needs, or more.
    #[error(
        "the guest's RAM block {block} is not in the image as one piece: restore it into a machine with the RAM of the saved one"
    )]
    OtherMemory {
        /// Name of the RAM block.
        block: String,
    },
    /// The recorded working set is of another image.
    #[error(
        "the working set was recorded with {recorded} bytes of memory, but the image has {image}: record it again with \
         this image"
    )]
    OtherWorkingSet {
        /// Bytes of the memory with which the working set was recorded.
        recorded: u64,
        /// Bytes of the image's memory.
        image: u64,
    },
}

impl PagerError {
    pub(crate) fn system(call: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System { call, source }
    }
}

/// A guest cannot be served any more. Its VMM is killed, because the guest would wait without end.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// The VMM did not hand its memory over correctly.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// The connection failed during the handshake.
    #[error("the connection failed before its memory regions arrived: {0}")]
    Connection(Arc<io::Error>),
    /// The image cannot be read.
    #[error("the page at byte {offset:#x} of the guest's memory cannot be read from the image: {source}")]
    Source {
        /// Offset of the page in the guest's memory, in bytes.
        offset: u64,
        /// The reason, with the image and, if it has frames, the frame.
        source: Arc<SourceError>,
    },
    /// A thread waits for an address that is in no region.
    #[error("it touched the address {address:#x}, which is in none of the memory regions that it sent")]
    Outside {
        /// The address.
        address: u64,
    },
    /// The VMM has moved memory, so its addresses are not known any more.
    #[error("it moved the memory {:#x} to {:#x} (mremap), which cannot be served", .0.start, .0.end)]
    Moved(Range<u64>),
    /// The kernel did not accept a page.
    #[error("the kernel did not place the page at {address:#x}: {source}{}", advice(.source))]
    Place {
        /// Address of the page in the VMM.
        address: u64,
        /// The error of the system.
        source: Arc<io::Error>,
    },
    /// The page faults cannot be read.
    #[error("its page faults cannot be read: {0}")]
    Events(Arc<io::Error>),
    /// A migration of the VMM has failed.
    #[error("{0}")]
    Session(Arc<dyn std::error::Error + Send + Sync>),
    /// The operator ended the pager while the guest lacked pages.
    #[error("the pager was ended while it lacked pages")]
    Stopped,
}

fn advice(error: &io::Error) -> &'static str {
    match rustix::io::Errno::from_io_error(error) {
        Some(rustix::io::Errno::NOMEM | rustix::io::Errno::NOSPC) => {
            "; give the host or the VMM's cgroup more memory, or more huge pages (vm.nr_hugepages)"
        }
        _ => "",
    }
}
