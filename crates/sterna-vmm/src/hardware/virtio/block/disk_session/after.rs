//! Continues or completes a request after the host has performed a part of it.

use std::io;

use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};

use crate::hardware::virtio::block::changes::Changes;
use crate::hardware::virtio::block::request::Piece;
use crate::hardware::virtio::block::rest::Rest;
use crate::hardware::virtio::buffers::Buffers;

pub(super) struct InFlight<'a> {
    pub(super) queue: usize,
    pub(super) head: u16,
    pub(super) status: Buffers<'a>,
    pub(super) rest: Rest<'a>,
}

pub(super) enum After<'a> {
    /// A call completed only a part of the request.
    More(InFlight<'a>),
    Answer {
        queue: usize,
        head: u16,
        status: Buffers<'a>,
        code: u32,
        written: usize,
    },
}

pub(super) fn after<'a>(done: InFlight<'a>, result: io::Result<usize>, changes: &Changes) -> After<'a> {
    let InFlight { queue, head, status, rest } = done;
    // A failed call may have written a part.
    rest.was_done(changes);
    let (code, written) = match (rest, result) {
        (Rest::Read(at, mut to, before), Ok(moved)) if moved > 0 => {
            if moved < to.len() {
                let _ = to.split_front(moved);
                let rest = Rest::Read(at + moved as u64, to, before + moved);
                return After::More(InFlight { queue, head, status, rest });
            }
            (VIRTIO_BLK_S_OK, before + moved)
        }
        (Rest::Write(at, mut from), Ok(moved)) if moved > 0 => {
            if moved < from.len() {
                let _ = from.split_front(moved);
                let rest = Rest::Write(at + moved as u64, from);
                return After::More(InFlight { queue, head, status, rest });
            }
            (VIRTIO_BLK_S_OK, 0)
        }
        // No byte was moved: the file has become shorter, or the disk is full.
        (Rest::Read(..) | Rest::Write(..), Ok(_)) => (VIRTIO_BLK_S_IOERR, 0),
        (Rest::Flush | Rest::Discard(_) | Rest::WriteZeroes(_), Ok(_)) => (VIRTIO_BLK_S_OK, 0),
        // Some file systems support only one of the two calls. A hole also reads as zero.
        (Rest::WriteZeroes(piece), Err(error)) if is_unsupported(&error) && !piece.may_unmap => {
            let rest = Rest::WriteZeroes(Piece { may_unmap: true, ..piece });
            return After::More(InFlight { queue, head, status, rest });
        }
        (_, Err(error)) if is_unsupported(&error) => (VIRTIO_BLK_S_UNSUPP, 0),
        (_, Err(_)) => (VIRTIO_BLK_S_IOERR, 0),
    };
    After::Answer { queue, head, status, code, written }
}

/// Whether the kernel or the file's format does not support the operation.
fn is_unsupported(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EOPNOTSUPP) || error.kind() == io::ErrorKind::Unsupported
}
