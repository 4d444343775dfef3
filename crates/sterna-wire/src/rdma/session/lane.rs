//! Both ends of a lane between two Sternas (`specs/rdma.md §9`).
//!
//! The destination grants credit, so that no message arrives without a posted receive.

use super::receives::Sending;
use super::receives::{END, Receives, local, misbehaved};
use crate::error::WireError;
use crate::rdma::header::Header;
use crate::rdma::message_type::MessageType;

const CREDIT: &str = "specs/rdma.md §9.2";
/// Most messages that are in transit or unread.
const MESSAGES: u32 = 16;
/// Least credit in one READY, so that READYs are fewer than messages.
const BATCH: u32 = MESSAGES / 2;
/// Most READYs in transit: together they grant credit for all messages. The source posts a receive for each.
const READYS: usize = (MESSAGES / BATCH) as usize;

/// The source's end of a lane. It sends FILE messages within its credit.
#[derive(Debug, Clone)]
pub struct LaneSource {
    receives: Receives,
    credit: u32,
    is_over: bool,
}

/// The destination's end of a lane. It grants credit and receives FILE messages.
#[derive(Debug, Clone)]
pub struct LaneDestination {
    receives: Receives,
    /// Number of messages that the source may send now.
    given: u32,
    is_over: bool,
}

/// The meaning of a received message at the source's end of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credit {
    /// The source may send so many additional messages.
    More(u32),
    /// The destination has failed. Disconnect without sending ERROR.
    Failed,
}

impl Default for LaneSource {
    fn default() -> Self {
        Self::new()
    }
}

impl LaneSource {
    /// Most bytes of a message on a lane, including its header.
    pub const MESSAGE_BYTES: usize = 64 << 10;
    /// Most receives that are posted at the same time.
    pub const RECEIVES: usize = READYS + 1;

    /// The source's end of a lane that is not connected yet.
    pub fn new() -> Self {
        Self { receives: Receives::new(1), credit: 0, is_over: false }
    }

    /// Number of receives to post before connecting.
    pub fn starting(&mut self) -> usize {
        self.receives.post_for(READYS)
    }

    /// Whether a message may be sent now.
    pub fn may_send(&self) -> bool {
        self.credit > 0 && !self.is_over
    }

    /// Asks to send a FILE message. On success it counts as sent.
    ///
    /// # Errors The source has no credit, or the session has ended.
    pub fn send(&mut self) -> Result<Sending, WireError> {
        let kind = MessageType::File;
        if self.is_over {
            return Err(local(kind, END, "the session has ended"));
        }
        let Some(left) = self.credit.checked_sub(1) else {
            return Err(local(kind, CREDIT, "there is no credit for it"));
        };
        self.credit = left;
        Ok(Sending { receives: self.receives.post_for(READYS) })
    }

    /// Records a received message.
    ///
    /// # Errors
    /// More credit than [`LaneDestination`] may grant; any message but READY and ERROR.
    pub fn received(&mut self, header: Header) -> Result<Credit, WireError> {
        self.receives.used(header.kind)?;
        let heard = self.hear(header);
        self.is_over |= !matches!(heard, Ok(Credit::More(_)));
        heard
    }

    fn hear(&mut self, header: Header) -> Result<Credit, WireError> {
        match header.kind {
            MessageType::Error => Ok(Credit::Failed),
            MessageType::Ready if header.repeat == 0 || header.repeat > MESSAGES - self.credit => {
                let rule = format!("credit for {} more, but there are {}", header.repeat, self.credit);
                Err(misbehaved(header.kind, CREDIT, rule))
            }
            MessageType::Ready => {
                self.credit += header.repeat;
                Ok(Credit::More(header.repeat))
            }
            kind => Err(misbehaved(kind, CREDIT, "a destination sends only READY and ERROR on a lane")),
        }
    }

    /// Ends the session after the last message.
    pub fn finish(&mut self) {
        self.is_over = true;
    }
}

impl Default for LaneDestination {
    fn default() -> Self {
        Self::new()
    }
}

impl LaneDestination {
    /// Most receives that are posted at the same time.
    pub const RECEIVES: usize = MESSAGES as usize + 1;

    /// The destination's end of a lane that is not accepted yet.
    pub fn new() -> Self {
        // One receive more than the credit: a message without credit then causes a named error, and ERROR has a
        // receive.
        Self { receives: Receives::new(1), given: 0, is_over: false }
    }

    /// Number of receives to post before accepting.
    pub fn starting(&mut self) -> usize {
        self.receives.post_for(MESSAGES as usize)
    }

    /// Credit to grant in one READY now; `None` below half of all messages.
    pub fn due(&self) -> Option<u32> {
        let free = MESSAGES - self.given;
        (free >= BATCH && !self.is_over).then_some(free)
    }

    /// Asks to send a READY that grants all credit that is due. On success it counts as sent.
    ///
    /// # Errors
    /// No credit is due.
    pub fn invite(&mut self) -> Result<(u32, Sending), WireError> {
        let Some(due) = self.due() else {
            return Err(local(MessageType::Ready, CREDIT, "there is no credit to give"));
        };
        self.given += due;
        Ok((due, Sending { receives: self.receives.post_for(self.given as usize) }))
    }

    /// Records a received message: FILE, or ERROR. After ERROR, disconnect without an answer.
    ///
    /// # Errors
    /// A message without credit; any other type.
    pub fn received(&mut self, kind: MessageType) -> Result<(), WireError> {
        self.receives.used(kind)?;
        let heard = self.hear(kind);
        self.is_over |= heard.is_err() || kind == MessageType::Error;
        heard
    }

    fn hear(&mut self, kind: MessageType) -> Result<(), WireError> {
        if self.is_over {
            return Err(misbehaved(kind, END, "the session has ended"));
        }
        match kind {
            MessageType::Error => Ok(()),
            MessageType::File => {
                let no_credit = || misbehaved(kind, CREDIT, "no credit was given for it");
                self.given = self.given.checked_sub(1).ok_or_else(no_credit)?;
                Ok(())
            }
            _ => Err(misbehaved(kind, CREDIT, "a source sends only FILE and ERROR on a lane")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;

    fn header(kind: MessageType, repeat: u32) -> Header {
        Header { kind, length: u32::from(kind == MessageType::File), repeat }
    }

    /// Random orders of reading and sending. Every message has a posted receive and credit.
    #[test]
    fn every_message_meets_a_receive_in_any_order() {
        for seed in 0..500 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut source, mut destination) = (LaneSource::new(), LaneDestination::new());
            let (mut here, mut there) = (source.starting(), destination.starting());
            let (mut readys, mut files) = (std::collections::VecDeque::new(), 0);
            let mut sent = 0;
            while sent < 300 {
                match random.u8(..4) {
                    0 if destination.due().is_some() => {
                        let (count, sending) = destination.invite().unwrap();
                        there += sending.receives;
                        readys.push_back(count);
                        assert!(readys.len() <= here, "seed {seed}: READY without a receive");
                    }
                    1 => {
                        if let Some(count) = readys.pop_front() {
                            here -= 1;
                            let heard = source.received(header(MessageType::Ready, count)).unwrap();
                            assert_eq!(heard, Credit::More(count));
                        }
                    }
                    2 if source.may_send() => {
                        here += source.send().unwrap().receives;
                        files += 1;
                        sent += 1;
                        assert!(files < there, "seed {seed}: no receive is left for ERROR");
                    }
                    3 if files > 0 => {
                        files -= 1;
                        there -= 1;
                        destination.received(MessageType::File).unwrap();
                    }
                    _ => {}
                }
                assert!(here <= LaneSource::RECEIVES && there <= LaneDestination::RECEIVES, "seed {seed}");
            }
        }
    }

    #[test]
    fn message_without_credit_and_credit_without_end_are_the_peers_fault() {
        let mut destination = LaneDestination::new();
        let _ = destination.starting();
        assert_eq!(destination.received(MessageType::File).unwrap_err().fault, Fault::PeerMisbehaved);

        for repeat in [0, MESSAGES + 1] {
            let mut source = LaneSource::new();
            let _ = source.starting();
            let refused = source.received(header(MessageType::Ready, repeat)).unwrap_err();
            assert_eq!(refused.fault, Fault::PeerMisbehaved, "{repeat}");
            assert!(!source.may_send());
        }

        let mut source = LaneSource::new();
        let _ = source.starting();
        assert_eq!(source.send().unwrap_err().fault, Fault::Local, "before any credit");
        assert_eq!(source.received(header(MessageType::File, 0)).unwrap_err().fault, Fault::PeerMisbehaved);

        let mut destination = LaneDestination::new();
        let _ = destination.starting();
        assert_eq!(destination.received(MessageType::Compress).unwrap_err().fault, Fault::PeerMisbehaved);
    }
}
