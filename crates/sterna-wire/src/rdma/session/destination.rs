//! The order of messages at the destination's main connection (`specs/rdma.md §5.3`, `§7`).

use super::listener::Listener;
use super::receives::Sending;
use super::receives::{END, PHASES, local, misbehaved};
use crate::error::WireError;
use crate::rdma::message_type::MessageType;

/// READYs and phases of a destination.
///
/// The caller decodes a message to its end before it sends the next READY. A hook inside the message decides
/// which message may follow.
#[derive(Debug, Clone)]
pub struct DestinationSession {
    listener: Listener,
    phase: Phase,
    /// Whether the whole stream has been decoded.
    has_all: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The stream before the first hook.
    Before,
    /// The first phase. `blocks`: whether the source has requested the blocks.
    First { blocks: bool },
    /// The stream after a phase.
    Between,
    /// A phase after the first.
    Later,
}

/// The action that a received message asks of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Decode these bytes of the stream.
    Stream,
    /// Answer with the positions of the blocks.
    Blocks,
    /// Clear the ranges of the message.
    Clear,
    /// Register memory, and answer with its keys.
    Register,
    /// Deregister memory, and answer.
    Unregister,
    /// Continue with the stream: the phase is over.
    PhaseOver,
    /// Disconnect without sending ERROR: the source has failed.
    Failed,
}

impl Default for DestinationSession {
    fn default() -> Self {
        Self::new()
    }
}

impl DestinationSession {
    /// The session of a connection that is not accepted yet.
    pub fn new() -> Self {
        Self { listener: Listener::of_main(), phase: Phase::Before, has_all: false }
    }

    /// Number of receives to post before accepting.
    pub fn starting(&mut self) -> usize {
        self.listener.starting()
    }

    /// Whether a READY may be sent now.
    pub fn may_invite(&self) -> bool {
        self.listener.may_invite()
    }

    /// Asks to send READY. On success it counts as sent.
    ///
    /// # Errors
    /// As [`Listener::invite`].
    pub fn invite(&mut self) -> Result<Sending, WireError> {
        self.listener.invite()
    }

    /// Begins a phase, because the decoder has reached a hook in the stream.
    ///
    /// # Errors
    /// A phase is open already, or a READY is unanswered. In the second case, the source may have sent the next
    /// message without knowledge of the hook.
    pub fn hook(&mut self) -> Result<(), WireError> {
        let no = |rule| Err(local(MessageType::File, PHASES, rule));
        if !self.listener.may_invite() {
            return no("a hook after the next message was invited: read a message to its end before READY");
        }
        self.phase = match self.phase {
            Phase::Before => Phase::First { blocks: false },
            Phase::Between => Phase::Later,
            Phase::First { .. } | Phase::Later => return no("a hook while a phase is open"),
        };
        Ok(())
    }

    /// Whether a phase is open.
    pub fn is_in_phase(&self) -> bool {
        matches!(self.phase, Phase::First { .. } | Phase::Later)
    }

    /// Records a received message.
    ///
    /// # Errors
    /// - the errors of [`Listener::received`]
    /// - a command of a phase outside a phase, or bytes of the stream inside one
    /// - blocks requested twice or in a later phase, or not requested in the first phase
    pub fn received(&mut self, kind: MessageType) -> Result<Arrival, WireError> {
        self.listener.received(kind)?;
        let arrival = self.arrival(kind);
        match arrival {
            Ok(Arrival::PhaseOver) => self.phase = Phase::Between,
            Ok(Arrival::Blocks) => self.phase = Phase::First { blocks: true },
            Ok(_) => {}
            Err(_) => self.listener.finish(),
        }
        arrival
    }

    fn arrival(&self, kind: MessageType) -> Result<Arrival, WireError> {
        let no = |rule| Err(misbehaved(kind, PHASES, rule));
        match (kind, self.phase) {
            (MessageType::Error, _) => Ok(Arrival::Failed),
            (MessageType::File, Phase::Before | Phase::Between) => Ok(Arrival::Stream),
            (MessageType::File, _) => no("stream while a phase is open"),
            (_, Phase::Before | Phase::Between) => no("no phase is open"),
            (MessageType::RamBlocksRequest, Phase::First { blocks: false }) => Ok(Arrival::Blocks),
            (MessageType::RamBlocksRequest, _) => no("the blocks are exchanged once, in the first phase"),
            (_, Phase::First { blocks: false }) => no("the first phase begins with the exchange of blocks"),
            (MessageType::Compress, _) => Ok(Arrival::Clear),
            (MessageType::RegisterRequest, _) => Ok(Arrival::Register),
            (MessageType::UnregisterRequest, _) => Ok(Arrival::Unregister),
            (MessageType::RegisterFinished, _) => Ok(Arrival::PhaseOver),
            _ => no("a destination does not accept it"),
        }
    }

    /// Asks to send the answer to the last command. On success it counts as sent.
    ///
    /// # Errors
    /// As [`Listener::answer`].
    pub fn answer(&mut self, kind: MessageType) -> Result<Sending, WireError> {
        self.listener.answer(kind)
    }

    /// Ends the session after the whole stream has been decoded.
    ///
    /// # Errors
    /// A phase is open.
    pub fn finish(&mut self) -> Result<(), WireError> {
        if self.is_in_phase() {
            return Err(local(MessageType::File, PHASES, "the stream cannot end while a phase is open"));
        }
        self.listener.finish();
        self.has_all = true;
        Ok(())
    }

    /// Records that the connection has ended, after all received messages have been processed.
    ///
    /// # Errors
    /// The stream is not complete.
    pub fn disconnected(&mut self) -> Result<(), WireError> {
        self.listener.finish();
        match self.has_all {
            true => Ok(()),
            false => {
                let rule = "the source disconnected before the end of the stream";
                Err(WireError::misbehaved("RDMA connection", 0, END, rule))
            }
        }
    }

    /// Asks to send ERROR. The session is then over.
    ///
    /// # Errors
    /// The session is over.
    pub fn say_error(&mut self) -> Result<(), WireError> {
        self.listener.say_error()
    }
}
