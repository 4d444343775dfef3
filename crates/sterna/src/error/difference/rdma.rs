//! Settings of `rdma:`.

use std::fmt;

use sterna_wire::rdma::{ChunkSize, Part};

/// A difference between the RDMA settings of both sides.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaDifference {
    /// `return-path` at the source only: it opens one connection.
    #[error(
        "the source wants answers (return-path) and made one RDMA connection: give both sides the capability return-path, or \
         neither"
    )]
    ReturnPath,
    /// `multifd` with a QEMU.
    #[error(
        "the destination is a QEMU, which takes no multifd channels over rdma: switch multifd off on both sides"
    )]
    MultifdOfQemu,
    /// Another number of multifd channels.
    #[error(
        "the destination takes {theirs} multifd channels and this side has {ours}: give both sides the same number"
    )]
    Channels {
        /// The destination's number.
        theirs: u8,
        /// This side's number.
        ours: u8,
    },
    /// A multifd channel or a return path whose main connection has ended.
    #[error("{peer}: {part}, and its main connection is gone")]
    NoMainConnection {
        /// Address of the source.
        peer: String,
        /// Which part of the migration the connection claims to be.
        part: Part,
    },
    /// `rdma-pin-all` needs more registered memory than this side permits.
    #[error(
        "rdma-pin-all registers all of RAM at once, {wanted} bytes, and this side's x-sterna-rdma-pinned-limit is {limit}: \
         switch rdma-pin-all off at the source, or raise the limit"
    )]
    PinAll {
        /// Bytes of RAM.
        wanted: u64,
        /// This side's limit in bytes.
        limit: u64,
    },
    /// The source asks for more registered memory than this side permits.
    #[error(
        "the source asks for {wanted} more bytes of registered memory, {registered} are registered and this side's \
         x-sterna-rdma-pinned-limit is {limit}: set the source's to no more than this"
    )]
    PinnedLimit {
        /// Bytes that the source asks for.
        wanted: u64,
        /// Bytes that are registered.
        registered: u64,
        /// This side's limit in bytes.
        limit: u64,
    },
    /// A QEMU has registered less memory than the source writes.
    #[error(
        "{peer}: the destination refused a WRITE to {place} (remote access error), and it was asked to register that memory: \
         it has registered less, probably one chunk of {chunk}; set x-rdma-chunk-size to {} at the destination, or \
         rdma-pin-all at the source",
        chunk.window()
    )]
    ChunkSize {
        /// Address of the destination.
        peer: String,
        /// The refused memory.
        place: RemotePlace,
        /// This side's idea of the destination's chunk.
        chunk: ChunkSize,
    },
}

/// Memory of the destination, as the source knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemotePlace {
    /// A place in a block.
    Block {
        /// Index of the block.
        index: usize,
        /// Offset in the block in bytes.
        offset: u64,
    },
    /// An address outside all blocks.
    Address(u64),
}

impl fmt::Display for RemotePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block { index, offset } => write!(f, "offset {offset:#x} of block {index}"),
            Self::Address(address) => write!(f, "address {address:#x}"),
        }
    }
}
