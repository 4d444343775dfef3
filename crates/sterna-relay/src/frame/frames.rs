//! The frames of a carrier after its greeting (`specs/relay.md §3`).

use super::error::{FrameError, Rule};
use super::limits::{DATA_BYTES, HAVE_HASHES, HEAD_BYTES, OFFSETS, PACKED_BYTES, PACKED_PAGES, TEXT_BYTES};
use super::packed::{Method, PackedHead};

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A flow begins.
    Open,
    /// Bytes of a flow.
    Data,
    /// The sender's direction of a flow ends in order.
    Finish,
    /// The sender's direction of a flow ends because its connection broke.
    Reset,
    /// The sender cannot deliver further bytes of a flow.
    Stop,
    /// How far a flow is at the sender of this frame, and its credit.
    Ack,
    /// All acknowledgements at the start of a carrier were sent.
    Sync,
    /// Asks for a PONG.
    Ping,
    /// Answers a PING.
    Pong,
    /// The session is over.
    Over,
    /// Bytes of a flow, compressed, or with references to pages that the peer has.
    Packed,
    /// A page of a PACKED frame is missing: bytes of the flow must come again.
    Miss,
    /// Pages that the sender of this frame has.
    Have,
}

/// Kind, its number, its name, the shortest and the longest body, and whether it has a flow.
const KINDS: [(Kind, u8, &str, usize, usize, bool); 13] = [
    (Kind::Open, 1, "OPEN", 8, 8, true),
    (Kind::Data, 2, "DATA", 9, 8 + DATA_BYTES, true),
    (Kind::Finish, 3, "FINISH", 8, 8, true),
    (Kind::Reset, 4, "RESET", 12, 12, true),
    (Kind::Stop, 5, "STOP", 4, 4, true),
    (Kind::Ack, 6, "ACK", 28, 28, true),
    (Kind::Sync, 7, "SYNC", 0, 0, false),
    (Kind::Ping, 8, "PING", 8, 8, false),
    (Kind::Pong, 9, "PONG", 8, 8, false),
    (Kind::Over, 10, "OVER", 4, 4 + TEXT_BYTES, false),
    (Kind::Packed, 11, "PACKED", PackedHead::BYTES + 1, PackedHead::BYTES + PACKED_BYTES, true),
    (Kind::Miss, 12, "MISS", 8, 8, true),
    (Kind::Have, 13, "HAVE", 12, 4 + 8 * HAVE_HASHES, false),
];

impl Kind {
    /// Every kind, in the order of their numbers.
    pub const ALL: [Kind; 13] = {
        let mut all = [Kind::Open; 13];
        let mut at = 0;
        while at < all.len() {
            all[at] = KINDS[at].0;
            at += 1;
        }
        all
    };

    /// The name in the specification.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    fn row(self) -> &'static (Kind, u8, &'static str, usize, usize, bool) {
        &KINDS[self as usize]
    }
}

/// Why a direction of a flow ends without an orderly end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetReason {
    /// The VMM's connection broke.
    Broken,
    /// The relay could not connect to its VMM.
    Unreachable,
    /// The session ended before the flow did.
    SessionOver,
    /// The relay refuses the stream.
    Refused,
}

const REASONS: [ResetReason; 4] =
    [ResetReason::Broken, ResetReason::Unreachable, ResetReason::SessionOver, ResetReason::Refused];

impl ResetReason {
    fn code(self) -> u32 {
        self as u32 + 1
    }

    fn from_code(code: u32) -> Option<Self> {
        REASONS.into_iter().find(|reason| reason.code() == code)
    }
}

impl std::fmt::Display for ResetReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ResetReason::Broken => "the VMM's connection broke",
            ResetReason::Unreachable => "the relay could not connect to its VMM",
            ResetReason::SessionOver => "the session ended",
            ResetReason::Refused => "the relay refused the stream",
        })
    }
}

/// The relay's knowledge, at the end of a session, about the end of the migration's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// This relay has not passed on the end of the stream and never will.
    Never,
    /// This relay has passed on the end of the stream, or may have.
    Passed,
}

/// A frame. The payload of DATA and PACKED follows the frame on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// The flow begins.
    Open {
        /// Number of the flow, from 1.
        flow: u32,
        /// Offset up to which the peer may send.
        credit: u64,
    },
    /// Bytes of the flow.
    Data {
        /// Number of the flow.
        flow: u32,
        /// Offset of the first byte in the sender's direction.
        offset: u64,
        /// Number of bytes that follow, 1 to [`DATA_BYTES`].
        length: usize,
    },
    /// The sender's direction has ended in order.
    Finish {
        /// Number of the flow.
        flow: u32,
        /// Bytes of the whole direction.
        offset: u64,
    },
    /// The sender's direction has ended without order.
    Reset {
        /// Number of the flow.
        flow: u32,
        /// Bytes of the whole direction.
        offset: u64,
        /// The cause.
        reason: ResetReason,
    },
    /// The sender cannot deliver further bytes of this flow.
    Stop {
        /// Number of the flow.
        flow: u32,
        /// The cause.
        reason: ResetReason,
    },
    /// How far the other direction of the flow is at the sender of this frame.
    Ack {
        /// Number of the flow.
        flow: u32,
        /// Bytes received in order. They need not be sent again.
        received: u64,
        /// Bytes that the VMM's connection has accepted.
        delivered: u64,
        /// Offset up to which the peer may send.
        credit: u64,
        /// Whether FINISH or RESET has been received.
        has_end: bool,
        /// Whether STOP has been received.
        has_stop: bool,
    },
    /// All acknowledgements at the start of this carrier were sent.
    Sync,
    /// Asks for a PONG with the same value.
    Ping(u64),
    /// Answers the PING with the same value.
    Pong(u64),
    /// The session is over.
    Over {
        /// What the sender knows about the end of the stream.
        verdict: Verdict,
        /// The reason, for the operator.
        text: String,
    },
    /// Bytes of the flow, compressed, or with references to pages that the peer has.
    Packed {
        /// Number of the flow.
        flow: u32,
        /// The place of the bytes, and how to unpack them.
        head: PackedHead,
        /// Bytes of the payload that follows, 1 to [`PACKED_BYTES`].
        payload: usize,
    },
    /// A page of a PACKED frame is missing here.
    Miss {
        /// Number of the flow.
        flow: u32,
        /// Bytes that were received in order: the peer continues here, without references.
        offset: u64,
    },
    /// Pages that the sender of this frame has.
    Have {
        /// Whether they stay for the whole session.
        stay: bool,
        /// The first 8 bytes of the pages' hashes, 1 to [`HAVE_HASHES`].
        hashes: Vec<u64>,
    },
}

impl Frame {
    /// The kind of this frame.
    pub fn kind(&self) -> Kind {
        match self {
            Frame::Open { .. } => Kind::Open,
            Frame::Data { .. } => Kind::Data,
            Frame::Finish { .. } => Kind::Finish,
            Frame::Reset { .. } => Kind::Reset,
            Frame::Stop { .. } => Kind::Stop,
            Frame::Ack { .. } => Kind::Ack,
            Frame::Sync => Kind::Sync,
            Frame::Ping(_) => Kind::Ping,
            Frame::Pong(_) => Kind::Pong,
            Frame::Over { .. } => Kind::Over,
            Frame::Packed { .. } => Kind::Packed,
            Frame::Miss { .. } => Kind::Miss,
            Frame::Have { .. } => Kind::Have,
        }
    }

    /// The flow that the frame names; 0 if it names none.
    pub fn flow(&self) -> u32 {
        match self {
            Frame::Open { flow, .. }
            | Frame::Data { flow, .. }
            | Frame::Finish { flow, .. }
            | Frame::Reset { flow, .. }
            | Frame::Stop { flow, .. }
            | Frame::Ack { flow, .. }
            | Frame::Packed { flow, .. }
            | Frame::Miss { flow, .. } => *flow,
            Frame::Sync | Frame::Ping(_) | Frame::Pong(_) | Frame::Over { .. } | Frame::Have { .. } => 0,
        }
    }

    /// Appends the bytes on the wire, without the payload of DATA and PACKED.
    ///
    /// # Errors
    /// A field that the protocol does not allow: flow 0, an offset that is too large, too much payload or text.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        let (kind, flow) = (self.kind(), self.flow());
        let bad = |offset, rule| FrameError::new(kind.name(), flow, offset, rule);
        let mut body = Vec::with_capacity(32);
        let mut payload = 0;
        match self {
            Frame::Open { credit, .. } => put_offset(&mut body, *credit),
            Frame::Data { offset, length, .. } => {
                if !(1..=DATA_BYTES).contains(length) {
                    return Err(bad(1, Rule::Payload(*length)));
                }
                payload = *length;
                put_offset(&mut body, *offset);
            }
            Frame::Finish { offset, .. } => put_offset(&mut body, *offset),
            Frame::Reset { offset, reason, .. } => {
                put_offset(&mut body, *offset);
                body.extend_from_slice(&reason.code().to_be_bytes());
            }
            Frame::Stop { reason, .. } => body.extend_from_slice(&reason.code().to_be_bytes()),
            Frame::Ack { received, delivered, credit, has_end, has_stop, .. } => {
                [received, delivered, credit].into_iter().for_each(|offset| put_offset(&mut body, *offset));
                let flags = u32::from(*has_end) | u32::from(*has_stop) << 1;
                body.extend_from_slice(&flags.to_be_bytes());
            }
            Frame::Sync => {}
            Frame::Ping(value) | Frame::Pong(value) => put_offset(&mut body, *value),
            Frame::Over { verdict, text } => {
                if text.len() > TEXT_BYTES {
                    return Err(bad(Head::BYTES + 4, Rule::Text));
                }
                body.extend_from_slice(&(*verdict as u32).to_be_bytes());
                body.extend_from_slice(text.as_bytes());
            }
            Frame::Packed { head, payload: bytes, .. } => {
                if !(1..=PACKED_BYTES).contains(bytes) {
                    return Err(bad(1, Rule::Payload(*bytes)));
                }
                payload = *bytes;
                put_offset(&mut body, head.offset);
                put_offset(&mut body, head.check);
                body.extend_from_slice(&(head.length as u32).to_be_bytes());
                body.extend_from_slice(&(head.pages as u16).to_be_bytes());
                body.extend_from_slice(&(head.method as u16).to_be_bytes());
            }
            Frame::Miss { offset, .. } => put_offset(&mut body, *offset),
            Frame::Have { stay, hashes } => {
                body.extend_from_slice(&u32::from(*stay).to_be_bytes());
                hashes.iter().for_each(|hash| put_offset(&mut body, *hash));
            }
        }
        let head = Head { kind, flow, body_bytes: body.len() + payload };
        let bytes = head.to_bytes();
        Head::decode(&bytes)?;
        head.body(&body)?;
        out.extend_from_slice(&bytes);
        out.extend_from_slice(&body);
        Ok(())
    }
}

/// The first 8 bytes of a frame: kind, length of the body, flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    kind: Kind,
    flow: u32,
    body_bytes: usize,
}

impl Head {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = HEAD_BYTES;

    /// Reads a head.
    ///
    /// # Errors
    /// An unknown kind; a length that the kind does not have; a flow where none belongs, or none where one
    /// belongs.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, FrameError> {
        let flow = u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let row = KINDS.iter().find(|row| row.1 == bytes[0]);
        let Some(&(kind, _, name, least, most, has_flow)) = row else {
            return Err(FrameError::new("of unknown kind", flow, 0, Rule::Kind(bytes[0])));
        };
        let body_bytes = u32::from_be_bytes([0, bytes[1], bytes[2], bytes[3]]) as usize;
        if !(least..=most).contains(&body_bytes) {
            return Err(FrameError::new(name, flow, 1, Rule::Length { bytes: body_bytes, least, most }));
        }
        if (flow != 0) != has_flow {
            return Err(FrameError::new(name, flow, 4, Rule::Flow(flow)));
        }
        Ok(Self { kind, flow, body_bytes })
    }

    /// The kind of the frame.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Number of bytes that [`body`](Self::body) needs: the whole body, but of DATA and PACKED what precedes the
    /// payload.
    pub fn fixed_bytes(&self) -> usize {
        match self.kind {
            Kind::Data => 8,
            Kind::Packed => PackedHead::BYTES,
            _ => self.body_bytes,
        }
    }

    /// Number of bytes of payload after these.
    pub fn payload_bytes(&self) -> usize {
        self.body_bytes - self.fixed_bytes()
    }

    /// Reads the body. `body` has exactly [`fixed_bytes`](Self::fixed_bytes).
    ///
    /// # Errors
    /// A field that breaks a rule of `specs/relay.md §3`.
    pub fn body(&self, body: &[u8]) -> Result<Frame, FrameError> {
        let Self { kind, flow, .. } = *self;
        let bad = |at: usize, rule| FrameError::new(kind.name(), flow, Self::BYTES + at, rule);
        if body.len() != self.fixed_bytes() {
            let (bytes, wanted) = (body.len(), self.fixed_bytes());
            return Err(bad(0, Rule::Length { bytes, least: wanted, most: wanted }));
        }
        let u32_at = |at: usize| u32::from_be_bytes([body[at], body[at + 1], body[at + 2], body[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));
        let offset_at = |at: usize| match u64_at(at) {
            offset @ 0..OFFSETS => Ok(offset),
            offset => Err(bad(at, Rule::Offset(offset))),
        };
        let reason_at = |at: usize| {
            let code = u32_at(at);
            ResetReason::from_code(code).ok_or_else(|| bad(at, Rule::Reason(code)))
        };
        Ok(match kind {
            Kind::Open => Frame::Open { flow, credit: offset_at(0)? },
            Kind::Data => Frame::Data { flow, offset: offset_at(0)?, length: self.payload_bytes() },
            Kind::Finish => Frame::Finish { flow, offset: offset_at(0)? },
            Kind::Reset => Frame::Reset { flow, offset: offset_at(0)?, reason: reason_at(8)? },
            Kind::Stop => Frame::Stop { flow, reason: reason_at(0)? },
            Kind::Ack => {
                let (received, delivered, credit) = (offset_at(0)?, offset_at(8)?, offset_at(16)?);
                let flags = u32_at(24);
                if flags > 3 {
                    return Err(bad(24, Rule::Flags(flags)));
                }
                let (has_end, has_stop) = (flags & 1 != 0, flags & 2 != 0);
                Frame::Ack { flow, received, delivered, credit, has_end, has_stop }
            }
            Kind::Sync => Frame::Sync,
            Kind::Ping => Frame::Ping(u64_at(0)),
            Kind::Pong => Frame::Pong(u64_at(0)),
            Kind::Over => {
                let verdict = match u32_at(0) {
                    0 => Verdict::Never,
                    1 => Verdict::Passed,
                    other => return Err(bad(0, Rule::Verdict(other))),
                };
                let text = std::str::from_utf8(&body[4..]).map_err(|_| bad(4, Rule::Text))?;
                Frame::Over { verdict, text: text.to_owned() }
            }
            Kind::Packed => {
                let (length, pages, code) = (u32_at(16) as usize, u32_at(20) >> 16, u32_at(20) & 0xffff);
                if !(1..=DATA_BYTES).contains(&length) {
                    return Err(bad(16, Rule::Unpacked(length)));
                }
                let pages = pages as usize;
                if pages > PACKED_PAGES {
                    return Err(bad(20, Rule::Pages(pages)));
                }
                let method = Method::from_code(code).ok_or_else(|| bad(22, Rule::Method(code)))?;
                let head = PackedHead { offset: offset_at(0)?, check: u64_at(8), length, pages, method };
                Frame::Packed { flow, head, payload: self.payload_bytes() }
            }
            Kind::Miss => Frame::Miss { flow, offset: offset_at(0)? },
            Kind::Have => {
                if body.len() % 8 != 4 {
                    let bytes = body.len();
                    return Err(bad(0, Rule::Length { bytes, least: 12, most: 4 + 8 * HAVE_HASHES }));
                }
                let flags = u32_at(0);
                if flags > 1 {
                    return Err(bad(0, Rule::Flags(flags)));
                }
                let hashes = (4..body.len()).step_by(8).map(u64_at).collect();
                Frame::Have { stay: flags == 1, hashes }
            }
        })
    }

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let [_, length @ ..] = (self.body_bytes as u32).to_be_bytes();
        let flow = self.flow.to_be_bytes();
        let number = self.kind.row().1;
        [number, length[0], length[1], length[2], flow[0], flow[1], flow[2], flow[3]]
    }
}

fn put_offset(out: &mut Vec<u8>, offset: u64) {
    out.extend_from_slice(&offset.to_be_bytes());
}
