//! The destination on the main connection (`specs/rdma.md §5.3`, `§7`).

use super::{END, Listener, PHASES, Sending, local, misbehaved};
use crate::error::WireError;
use crate::rdma::header::MessageType;

/// Tokens and phases of a destination.
///
/// A message is read to its end before the next READY goes out: whether it holds a hook decides what may come next.
#[derive(Debug, Clone)]
pub struct DestinationSession {
    listener: Listener,
    phase: Phase,
    /// Whether all of the stream has come.
    has_all: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Stream, before the first hook.
    Before,
    /// The first phase; whether the blocks were asked for.
    First { blocks: bool },
    /// Stream, after it.
    Between,
    /// A later phase.
    Later,
}

/// What a message asks of a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Decode these bytes of stream.
    Stream,
    /// Answer where the blocks are.
    Blocks,
    /// Clear ranges.
    Clear,
    /// Register memory, and answer its keys.
    Register,
    /// Deregister memory, and answer.
    Unregister,
    /// Go on with the stream.
    PhaseOver,
    /// The source has failed. No ERROR goes back; disconnect.
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

    /// Receives to post before accepting.
    pub fn starting(&mut self) -> usize {
        self.listener.starting()
    }

    /// Whether a READY may be sent now.
    pub fn may_invite(&self) -> bool {
        self.listener.may_invite()
    }

    /// Asks to send READY. Afterwards it counts as sent.
    ///
    /// # Errors
    /// As [`Listener::invite`].
    pub fn invite(&mut self) -> Result<Sending, WireError> {
        self.listener.invite()
    }

    /// The stream has come to a hook: a phase begins.
    ///
    /// # Errors
    /// One is open; a READY is unanswered, so that the next message may have come before this was known.
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

    /// Takes a message that has come.
    ///
    /// # Errors
    /// As [`Listener::received`]; a command of a phase outside of one, or stream in it; the blocks asked for twice or in
    /// a later phase, or not at all in the first.
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
            _ => no("a destination does not take it"),
        }
    }

    /// Asks to send the answer to the last command. Afterwards it counts as sent.
    ///
    /// # Errors
    /// As [`Listener::answer`].
    pub fn answer(&mut self, kind: MessageType) -> Result<Sending, WireError> {
        self.listener.answer(kind)
    }

    /// All of the stream has been decoded.
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

    /// The connection has ended, and no message that came before is left.
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

    /// Asks to say ERROR.
    ///
    /// # Errors
    /// The session is over.
    pub fn say_error(&mut self) -> Result<(), WireError> {
        self.listener.say_error()
    }
}
