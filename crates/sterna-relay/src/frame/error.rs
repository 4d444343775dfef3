//! The rules of the protocol, and the error for a frame that breaks one.

use std::fmt;

use super::limits::{DATA_BYTES, LANES, OFFSETS, PACKED_PAGES, TEXT_BYTES, VERSION};

/// A frame that breaks a rule of the protocol. The peer is at fault, except where the rule says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("frame {frame}{}, byte {offset}: {rule} (specs/relay.md {})", Flow(*.flow), .rule.paragraph())]
pub struct FrameError {
    /// Name of the frame or message.
    pub frame: &'static str,
    /// The flow that the frame names; 0 if it names none.
    pub flow: u32,
    /// Byte of the offending field in the frame.
    pub offset: usize,
    /// The rule that was broken.
    pub rule: Rule,
}

struct Flow(u32);

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            flow => write!(f, " of flow {flow}"),
        }
    }
}

impl FrameError {
    pub(crate) fn new(frame: &'static str, flow: u32, offset: usize, rule: Rule) -> Self {
        Self { frame, flow, offset, rule }
    }
}

/// A rule of the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rule {
    /// The first bytes of the carrier.
    #[error("the magic is {0:08x}: the peer is not a relay of Sterna")]
    Magic(u32),
    /// Another version of the protocol.
    #[error(
        "version {0} of the protocol, this side has {VERSION}: use the same version of Sterna on both hosts"
    )]
    Version(u32),
    /// A purpose other than open and join.
    #[error("purpose {0} is not 0 (open) or 1 (join)")]
    Purpose(u8),
    /// A number of carriers that is not allowed, or a carrier that is not among them.
    #[error("carrier {lane} of {lanes}; there are 1 to {LANES}")]
    Lane {
        /// Number of the carrier, from 0.
        lane: u8,
        /// Number of carriers.
        lanes: u8,
    },
    /// A route's name with other bytes than allowed.
    #[error("the route is not 1 to 64 letters, digits, `.`, `_` or `-`, the first of them not `.`")]
    Route,
    /// A share of the key where none belongs, or none where one belongs.
    #[error("the share of the key does not fit the purpose")]
    Share,
    /// An attempt without a number.
    #[error("attempt 0; attempts count from 1")]
    Attempt,
    /// A status that this version does not know.
    #[error("status {0} is unknown")]
    Status(u32),
    /// A field that must be 0.
    #[error("the reserved field is {0}, not 0")]
    Reserved(u32),
    /// A kind of frame that this version does not know.
    #[error("kind {0} is unknown")]
    Kind(u8),
    /// A body of a length that its kind does not have.
    #[error("a body of {bytes} bytes; this kind has {least} to {most}")]
    Length {
        /// The stated length, in bytes.
        bytes: usize,
        /// The shortest body, in bytes.
        least: usize,
        /// The longest body, in bytes.
        most: usize,
    },
    /// A frame of the session that names a flow, or a frame of a flow that names none.
    #[error("flow {0} where none belongs, or no flow where one belongs")]
    Flow(u32),
    /// An offset that no flow reaches.
    #[error("offset {0} is not below {OFFSETS}")]
    Offset(u64),
    /// A reason that this version does not know.
    #[error("reason {0} is unknown")]
    Reason(u32),
    /// Flags that this version does not know.
    #[error("flags {0:#x} are unknown")]
    Flags(u32),
    /// A verdict that this version does not know.
    #[error("verdict {0} is unknown")]
    Verdict(u32),
    /// A text that is too long or not UTF-8.
    #[error("the text is not at most {TEXT_BYTES} bytes of UTF-8")]
    Text,
    /// More payload than a DATA frame carries. This side is at fault.
    #[error("{0} bytes of payload; a frame carries 1 to {DATA_BYTES}")]
    Payload(usize),
    /// A flow that was never opened.
    #[error("the flow was never opened")]
    UnknownFlow,
    /// A second OPEN of a flow on the same carrier.
    #[error("the flow is opened twice on one carrier")]
    FlowTwice,
    /// OPEN from the side that accepts carriers.
    #[error("only the relay that connects opens flows")]
    Opener,
    /// More flows than a session has.
    #[error("more than {0} flows are open or not yet in order")]
    TooManyFlows(usize),
    /// Bytes are missing before this frame.
    #[error("it begins at offset {begins}, but only {received} bytes came before it")]
    Gap {
        /// Offset at which the frame begins.
        begins: u64,
        /// Bytes that have been received in order.
        received: u64,
    },
    /// More bytes than this side has granted.
    #[error("it ends at offset {ends}, beyond the credit of {credit}")]
    BeyondCredit {
        /// Offset after the last byte.
        ends: u64,
        /// Offset up to which this side has granted credit.
        credit: u64,
    },
    /// Bytes after the end of the flow, or another end.
    #[error("offset {offset} contradicts the end of the flow at {end}")]
    End {
        /// The offset in the frame.
        offset: u64,
        /// The end that was stated before, or the bytes that were received.
        end: u64,
    },
    /// An acknowledgement of bytes that were never sent.
    #[error("it acknowledges {acknowledged} bytes, but {sent} were sent")]
    NeverSent {
        /// The acknowledged offset.
        acknowledged: u64,
        /// Bytes that were sent.
        sent: u64,
    },
    /// More bytes delivered than received.
    #[error("{delivered} bytes are delivered, but only {received} received")]
    Delivered {
        /// The offset up to which bytes are delivered.
        delivered: u64,
        /// The offset up to which bytes are received.
        received: u64,
    },
    /// Credit further ahead than a window allows.
    #[error("credit up to {credit} is more than {most} bytes ahead of the {delivered} that are delivered")]
    Credit {
        /// The granted offset.
        credit: u64,
        /// The delivered offset.
        delivered: u64,
        /// Most bytes between both.
        most: u64,
    },
    /// The end of a flow is acknowledged that has not ended.
    #[error("it acknowledges an end that was never sent")]
    EndNeverSent,
    /// A second SYNC on one carrier.
    #[error("a second SYNC on one carrier")]
    SyncTwice,
    /// A frame other than ACK and SYNC at the start of a carrier.
    #[error("it comes before SYNC; only ACK does")]
    BeforeSync,
    /// A PONG without its PING.
    #[error("PONG {0} answers no PING")]
    Pong(u64),
    /// A frame after the end of the session.
    #[error("it comes after OVER")]
    AfterOver,
    /// An offer that no version makes, or an answer to an offer that was not made.
    #[error("the offer {0:#x} is unknown, or answers none")]
    Offer(u32),
    /// PACKED, MISS or HAVE in a session whose greeting did not agree on compression, or from the wrong side.
    #[error("the relays have not agreed on compression in this direction")]
    NotAgreed,
    /// A PACKED frame of a number of bytes that is not allowed.
    #[error("it unpacks to {0} bytes; a frame has 1 to {DATA_BYTES}")]
    Unpacked(usize),
    /// A PACKED frame with more pages than fit.
    #[error("it names {0} pages; at most {PACKED_PAGES} fit")]
    Pages(usize),
    /// A method of compression that this version does not know.
    #[error("method {0} is unknown")]
    Method(u32),
    /// A payload that ends before what it must have.
    #[error("the payload is too short")]
    Short,
    /// A page outside of the frame's bytes.
    #[error("a page ends at byte {ends}, but the frame unpacks to {length} bytes")]
    PageOutside {
        /// Byte after the page.
        ends: usize,
        /// Unpacked bytes of the frame.
        length: usize,
    },
    /// Compressed bytes that are no zstd stream of this protocol.
    #[error("the compressed bytes cannot be read: {0}")]
    Compressed(String),
    /// Compressed bytes that become more bytes than the frame states.
    #[error("the compressed bytes expand to more than the stated {0} bytes")]
    Expands(usize),
    /// Bytes that unpack to others than were packed.
    #[error("the unpacked bytes have the check sum {found:016x}, not {stated:016x}")]
    Content {
        /// The check sum in the frame.
        stated: u64,
        /// The check sum of the unpacked bytes.
        found: u64,
    },
    /// A reference in bytes that were asked for without references.
    #[error("it refers to a page that is missing, though MISS asked for these bytes without references")]
    ReferenceAgain,
    /// MISS at an offset that is not between the acknowledged and the sent bytes.
    #[error("it asks for bytes from {offset}, but only {sent} were sent")]
    NeverSentMiss {
        /// The offset.
        offset: u64,
        /// Bytes that were sent.
        sent: u64,
    },
    /// More announced pages than a relay may have.
    #[error("more than {0} pages are announced")]
    TooManyHashes(usize),
}

impl Rule {
    /// The paragraph of `specs/relay.md` that states the rule.
    pub fn paragraph(&self) -> &'static str {
        match self {
            Self::Magic(_)
            | Self::Version(_)
            | Self::Purpose(_)
            | Self::Lane { .. }
            | Self::Route
            | Self::Share
            | Self::Attempt
            | Self::Status(_) => "§2",
            Self::Reserved(_)
            | Self::Kind(_)
            | Self::Length { .. }
            | Self::Flow(_)
            | Self::Offset(_)
            | Self::Reason(_)
            | Self::Flags(_)
            | Self::Verdict(_)
            | Self::Text
            | Self::Payload(_) => "§3",
            Self::UnknownFlow | Self::FlowTwice | Self::Opener | Self::TooManyFlows(_) => "§4",
            Self::Gap { .. } | Self::End { .. } => "§5",
            Self::BeyondCredit { .. }
            | Self::NeverSent { .. }
            | Self::Delivered { .. }
            | Self::Credit { .. }
            | Self::EndNeverSent => "§6",
            Self::SyncTwice | Self::BeforeSync | Self::Pong(_) => "§7",
            Self::AfterOver => "§9",
            Self::Offer(_) => "§2",
            Self::NotAgreed
            | Self::Unpacked(_)
            | Self::Pages(_)
            | Self::Method(_)
            | Self::Short
            | Self::PageOutside { .. }
            | Self::Compressed(_)
            | Self::Expands(_)
            | Self::Content { .. }
            | Self::ReferenceAgain
            | Self::NeverSentMiss { .. }
            | Self::TooManyHashes(_) => "§10",
        }
    }
}
