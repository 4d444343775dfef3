//! The items that the decoder of the main channel returns.

use super::command::Command;
use super::configuration::Configuration;
use super::element::SectionKind;
use crate::mapped_ram::MappedHeader;
use crate::ram::BlockList;

/// Result of one call of [`MainDecoder::next`](super::MainDecoder::next).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// More bytes are needed: `buf` must have at least so many before the next call.
    ///
    /// The number is never above [`limits::MAIN_STEP_BYTES`](crate::limits::MAIN_STEP_BYTES).
    NeedMore(usize),
    /// The decoder has taken the first bytes of `buf`. The caller drops them and calls again.
    Partial {
        /// Number of bytes to drop, at least 1.
        consumed: usize,
    },
    /// One item of the stream was complete.
    Item {
        /// The item, with checked content.
        item: MainItem,
        /// Number of bytes to drop from the front of `buf`. May be 0.
        consumed: usize,
    },
    /// The stream is over.
    ///
    /// The last item was [`MainItem::Tail`], or [`MainItem::Eof`] with its description unless that is
    /// suppressed.
    End,
}

/// An item of the main channel, in stream order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MainItem {
    /// The header, with the right magic and version.
    Header,
    /// The configuration. It matches the [`Expectations`](super::Expectations).
    Configuration(Configuration),
    /// A command of the source.
    Command(Command),
    /// The block list of the RAM section. It matches the expected blocks.
    ///
    /// If the caller expects blocks, the list is in their order, so that an index is an index into
    /// `Expectations::blocks`. The order on the wire has no meaning.
    RamStart(BlockList),
    /// Position of a block in a file. Before [`RamStart`](Self::RamStart), only with `mapped-ram`.
    ///
    /// The caller continues with the bytes at the file offset `resume_at`.
    MappedBlock {
        /// Name of the RAM block.
        name: String,
        /// Length of the block, in bytes.
        length_bytes: u64,
        /// Positions of the bitmap and the pages.
        header: MappedHeader,
        /// File offset of the next byte of the stream.
        resume_at: u64,
    },
    /// This page contains only zeros.
    Zero {
        /// Index in the block list.
        block: usize,
        /// Offset in the block, in bytes: page-aligned and inside the block.
        offset: u64,
    },
    /// [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of this page follow.
    ///
    /// The caller reads them directly to their destination, then calls
    /// [`payload_consumed`](super::MainDecoder::payload_consumed).
    PagePayloadFollows {
        /// Index in the block list.
        block: usize,
        /// Offset in the block, in bytes: page-aligned and inside the block.
        offset: u64,
    },
    /// `delta` turns the page's older content into the new one. [`xbzrle::check`](crate::xbzrle::check) has
    /// accepted it.
    Xbzrle {
        /// Index in the block list.
        block: usize,
        /// Offset in the block, in bytes: page-aligned and inside the block.
        offset: u64,
        /// The argument for [`xbzrle::apply`](crate::xbzrle::apply).
        delta: Vec<u8>,
    },
    /// A synchronisation point for all multifd channels (§3.5). With legacy flushes, an EOS.
    MultifdFlush,
    /// A phase of RDMA begins. Only with [`Expectations::rdma`](super::Expectations::rdma).
    ///
    /// The caller keeps the bytes after this item and decodes them after the phase (`specs/rdma.md §5.2`).
    Hook {
        /// Start (the sides exchange their blocks), Part or End.
        kind: SectionKind,
    },
    /// A section of RAM is over, and its footer is correct.
    RamEnd {
        /// Start, Part or End.
        kind: SectionKind,
    },
    /// A complete section of another device, and its footer is correct.
    Section {
        /// Name of the section.
        name: String,
        /// Instance of the device.
        instance: u32,
        /// Version of the body.
        version: u32,
        /// Start, Part, End or Full.
        kind: SectionKind,
        /// The body, without the length of a length-prefixed one.
        body: Vec<u8>,
    },
    /// The device state after RAM begins. Only with
    /// [`Expectations::opaque_tail`](super::Expectations::opaque_tail).
    ///
    /// The next byte begins a device's section, or is EOF. The decoder takes no more bytes.
    /// [`Tail`](super::Tail) finds the end of the stream.
    Tail,
    /// End of the stream, `00`: the source has committed.
    Eof,
    /// The description after EOF, with any content. Empty if the peer sent an empty one.
    ///
    /// [`vmdesc::parse`](crate::vmdesc::parse) reads it.
    VmDescription(Vec<u8>),
    /// The end of a checkpoint's RAM ([`MainDecoder::begin_checkpoint`](super::MainDecoder::begin_checkpoint)).
    ///
    /// The decoder takes no more bytes until the caller begins the next checkpoint.
    CheckpointRam,
}
