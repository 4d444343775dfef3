//! Pages that must not arrive, and the rounds that contain them.

use crate::error::lower::Cause;

/// A page of guest RAM that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadPage {
    /// A page came twice in one round.
    #[error(
        "a page among pages {first} to {last} of RAM block number {block} came twice between two flushes \
         (specs/stream.md §3.5)"
    )]
    TwiceInRound {
        /// Index of the block.
        block: usize,
        /// First page of the packet's run.
        first: u64,
        /// Last page of the packet's run.
        last: u64,
    },
    /// A page came twice in postcopy.
    #[error("page {offset:#x} of block {block:?} came twice (specs/postcopy.md §3)")]
    Twice {
        /// Name of the block.
        block: String,
        /// Offset in the block, in bytes.
        offset: u64,
    },
    /// A page came in postcopy that this side has.
    #[error("page {offset:#x} of block {block:?} was not missing (specs/postcopy.md §3)")]
    NotMissing {
        /// Name of the block.
        block: String,
        /// Offset in the block, in bytes.
        offset: u64,
    },
    /// More incomplete huge pages than this side keeps.
    #[error("more than {most} huge pages{} came in parts at the same time", if *are_large { " of more than 2 MiB" } else { "" })]
    TooManyParts {
        /// Most huge pages that may be incomplete.
        most: usize,
        /// Whether the limit is the one of pages of more than 2 MiB.
        are_large: bool,
    },
    /// The source ended postcopy before all pages had come.
    #[error("the source has ended the stream, and {left} pages did not come")]
    Missing {
        /// Number of missing pages.
        left: u64,
    },
    /// A page came although the source's own memory is mapped here.
    #[error(
        "page {offset:#x} of block {block:?} came, and the source had handed its memory over (specs/extension.md §11)"
    )]
    HandedOver {
        /// Name of the block.
        block: String,
        /// Offset in the block, in bytes.
        offset: u64,
    },
    /// A difference (`xbzrle`) to a page that has not come.
    #[error(
        "page {offset:#x} of block {block:?} came as a difference, and never before (specs/stream.md §2.4)"
    )]
    DifferenceToNothing {
        /// Name of the block.
        block: String,
        /// Offset in the block, in bytes.
        offset: u64,
    },
    /// A difference (`xbzrle`) to a page that another channel has brought, so that their order is unknown.
    #[error(
        "page {page} of block {block} came as a difference, and by another channel in the same checkpoint \
         (specs/extension.md §10)"
    )]
    DifferenceToOtherChannel {
        /// Index of the block.
        block: usize,
        /// Number of the page.
        page: u64,
    },
}

/// Packets of multifd channels that do not fit the flushes of the main channel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRound {
    /// A packet in postcopy without pages on multifd channels.
    #[error(
        "multifd packet number {number} came in postcopy, where this channel has none (specs/extension.md §12.5)"
    )]
    PacketInPostcopy {
        /// Number of the packet.
        number: u64,
    },
    /// Packets between precopy's last flush and postcopy.
    #[error(
        "{late} multifd packets came between the last MULTIFD_FLUSH and POSTCOPY_LISTEN (specs/extension.md §12.5)"
    )]
    PacketsBeforeListen {
        /// Number of these packets.
        late: u64,
    },
    /// Packets after the last flush: their pages may have come in a wrong order.
    #[error(
        "{late} multifd packets (SYNC or pages) came after MULTIFD_FLUSH number {flush}, the last one (specs/stream.md \
         §3.5)"
    )]
    PacketsAfterFlush {
        /// Number of these packets.
        late: u64,
        /// Number of the flush.
        flush: u64,
    },
    /// A channel ended although a flush announced its SYNC packet.
    #[error("multifd channel {channel} ended before its SYNC number {sync}")]
    NoSync {
        /// Number of the channel.
        channel: usize,
        /// Number of the missing SYNC packet.
        sync: u64,
    },
    /// A checkpoint's RAM without a flush.
    #[error(
        "the RAM of a checkpoint ended without MULTIFD_FLUSH: its pages may not all have come (specs/colo.md §4)"
    )]
    NoFlush,
}

/// What is wrong with a payload of compressed pages.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum BadPayload {
    /// The decompressor's error.
    #[error("{0}")]
    Corrupt(#[source] Cause),
    /// It contains fewer bytes than its pages.
    #[error("{came} bytes where {due} are due")]
    Short {
        /// Bytes that it contains.
        came: usize,
        /// Bytes of its pages.
        due: usize,
    },
    /// The compressed frame ends; one frame must contain all packets of a channel.
    #[error("its frame ends")]
    FrameEnds,
    /// It contains more bytes than its pages.
    #[error("it contains more than its pages")]
    Long,
    /// Bytes follow the compressed pages.
    #[error("{bytes} bytes are left over")]
    LeftOver {
        /// Number of these bytes.
        bytes: usize,
    },
}
