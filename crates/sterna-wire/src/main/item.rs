//! What the decoder of the main channel hands over.

use super::{Command, Configuration, SectionKind};
use crate::mapped_ram::MappedHeader;
use crate::ram::BlockList;

/// Result of one call of [`MainDecoder::next`](super::MainDecoder::next).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// `buf` has to hold at least so many bytes from its start before another call makes sense; never more than
    /// [`limits::MAIN_STEP_BYTES`](crate::limits::MAIN_STEP_BYTES).
    NeedMore(usize),
    /// The first so many bytes of `buf` were taken into the decoder; drop them and call again. Never 0.
    Partial {
        /// How many bytes, at least 1.
        consumed: usize,
    },
    /// Something whole.
    Item {
        /// What it is.
        item: MainItem,
        /// How many bytes to drop from the front of `buf`; may be 0.
        consumed: usize,
    },
    /// The stream is over: [`MainItem::Eof`], and unless it was suppressed the description, are behind us; or
    /// [`MainItem::Tail`] is.
    End,
}

/// Something whole out of the main channel, in stream order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MainItem {
    /// Magic and version were right.
    Header,
    /// The configuration, held against [`Expectations`](super::Expectations) already.
    Configuration(Configuration),
    /// A command.
    Command(Command),
    /// The block list of the RAM section, held against the expected blocks already.
    ///
    /// Where blocks are expected the list is in their order (the order on the wire means nothing), so an index
    /// is an index into `Expectations::blocks`.
    RamStart(BlockList),
    /// Before [`RamStart`](Self::RamStart), only with `mapped-ram`: where a block lies in the file. The decoder
    /// goes on at `resume_at`: the caller continues with the bytes from that file offset.
    MappedBlock {
        /// Name of the block.
        name: String,
        /// Its length in bytes.
        length_bytes: u64,
        /// Where bitmap and pages are.
        header: MappedHeader,
        /// File offset of the byte to go on with.
        resume_at: u64,
    },
    /// This page is all zero.
    Zero {
        /// Index in the block list.
        block: usize,
        /// Offset in the block in bytes: page-aligned and inside.
        offset: u64,
    },
    /// [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of this page follow. The caller takes them where they are and then
    /// calls [`payload_consumed`](super::MainDecoder::payload_consumed).
    PagePayloadFollows {
        /// Index in the block list.
        block: usize,
        /// Offset in the block in bytes: page-aligned and inside.
        offset: u64,
    },
    /// This page differs from its older content by `delta`, which [`xbzrle::check`](crate::xbzrle::check) has
    /// passed.
    Xbzrle {
        /// Index in the block list.
        block: usize,
        /// Offset in the block in bytes: page-aligned and inside.
        offset: u64,
        /// What [`xbzrle::apply`](crate::xbzrle::apply) takes.
        delta: Vec<u8>,
    },
    /// All multifd channels have to be in step here (§3.5). With legacy flushes: an EOS.
    MultifdFlush,
    /// Only with [`Expectations::rdma`](super::Expectations::rdma): a phase begins. The caller runs it and then goes on
    /// with the bytes after this item, which it keeps meanwhile (`specs/rdma.md §5.2`).
    Hook {
        /// Start (the blocks are exchanged), Part or End.
        kind: SectionKind,
    },
    /// A section of RAM is over, its footer checked.
    RamEnd {
        /// Start, Part or End.
        kind: SectionKind,
    },
    /// A section of another device, whole, its footer checked.
    Section {
        /// Name of the section.
        name: String,
        /// Instance of the device.
        instance: u32,
        /// Version of the body.
        version: u32,
        /// Start, Part, End or Full.
        kind: SectionKind,
        /// The body; of a length-prefixed one without the length.
        body: Vec<u8>,
    },
    /// Only with [`Expectations::opaque_tail`](super::Expectations::opaque_tail): the first byte behind this item
    /// is that of the first device's section after RAM, or EOF. The decoder takes no more of the stream;
    /// [`Tail`](super::Tail) finds its end.
    Tail,
    /// End of the stream, `00`: the source has committed.
    Eof,
    /// The description after it, any bytes; [`vmdesc::parse`](crate::vmdesc::parse) reads it. Empty when the peer sent
    /// an empty one.
    VmDescription(Vec<u8>),
    /// All of a checkpoint's RAM has come ([`MainDecoder::begin_checkpoint`](super::MainDecoder::begin_checkpoint)). The
    /// decoder takes no more until the next one begins.
    CheckpointRam,
}
