//! The remaining part of a request, and the call that performs it.

use std::io;

use sterna_disk::Image;

use super::changes::Changes;
use super::engine::Work;
use super::request::Piece;
use crate::hardware::virtio::buffers::Buffers;

/// Highest number of bytes that one call copies.
const AT_ONCE: usize = 1 << 20;
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// The remaining part of a request. A call may complete only a part of it.
pub(super) enum Rest<'a> {
    /// First byte, remaining buffers, and number of bytes read before.
    Read(u64, Buffers<'a>, usize),
    Write(u64, Buffers<'a>),
    Flush,
    Discard(Piece),
    /// If the file does not support this operation, another call is tried.
    WriteZeroes(Piece),
}

impl Rest<'_> {
    /// The operation for a raw file.
    pub(super) fn work(&self) -> Work {
        match self {
            Self::Read(at, to, _) => Work::Read(to.vectors(), *at),
            Self::Write(at, from) => Work::Write(from.vectors(), *at),
            Self::Flush => Work::Flush,
            Self::WriteZeroes(piece) if !piece.may_unmap => allocate(ZERO, *piece),
            Self::Discard(piece) | Self::WriteZeroes(piece) => allocate(PUNCH, *piece),
        }
    }

    /// Performs the request or a part of it in this thread. Returns the number of bytes moved. Guest memory
    /// is copied first, because code that reads a qcow2 table twice must find the same bytes.
    pub(super) fn carry_out(&self, image: &Image) -> io::Result<usize> {
        match self {
            Self::Read(at, to, _) => {
                let mut bytes = vec![0; to.len().min(AT_ONCE)];
                image.read_at(&mut bytes, *at)?;
                Ok(to.write(&bytes))
            }
            Self::Write(at, from) => {
                let mut bytes = vec![0; from.len().min(AT_ONCE)];
                from.read(&mut bytes);
                image.write_at(&bytes, *at).map(|()| bytes.len())
            }
            Self::Flush => image.sync().map(|()| 0),
            Self::Discard(piece) => image.discard(piece.start, piece.length).map(|()| 0),
            Self::WriteZeroes(piece) => image.make_zero(piece.start, piece.length).map(|()| 0),
        }
    }

    /// Records the effects of a completed call: guest memory or the disk may have changed.
    pub(super) fn was_done(&self, changes: &Changes) {
        match self {
            Self::Read(_, to, _) => to.were_written(),
            Self::Write(at, from) => changes.written(*at, from.len() as u64),
            Self::Discard(piece) | Self::WriteZeroes(piece) => changes.written(piece.start, piece.length),
            Self::Flush => {}
        }
    }
}

fn allocate(mode: i32, piece: Piece) -> Work {
    Work::Allocate(mode, piece.start, piece.length)
}
