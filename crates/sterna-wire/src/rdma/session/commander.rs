//! The side that sends commands (`specs/rdma.md §3.3`).

use super::{END, Receives, Sending, TOKENS, local, misbehaved};
use crate::error::WireError;
use crate::rdma::header::MessageType;

/// Tokens of the side that sends commands.
#[derive(Debug, Clone)]
pub struct Commander {
    receives: Receives,
    /// READYs that no command has used, 0 or 1.
    has_ready: bool,
    /// READYs that may still come: one for the connection, one for each command.
    ready_due: bool,
    /// The answer that the last command waits for.
    owed: Option<MessageType>,
    is_over: bool,
}

/// What a message means for a commander.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// A command may be sent.
    Ready,
    /// The answer of this type to the last command.
    Answer(MessageType),
    /// The listener has failed. No ERROR goes back; disconnect.
    Failed,
}

impl Default for Commander {
    fn default() -> Self {
        Self::new()
    }
}

impl Commander {
    /// The commander of a connection that is not open yet.
    pub fn new() -> Self {
        Self { receives: Receives::new(1), has_ready: false, ready_due: true, owed: None, is_over: false }
    }

    /// Receives to post before connecting or accepting.
    pub fn starting(&mut self) -> usize {
        self.receives.post_for(1)
    }

    /// Whether a command may be sent now.
    pub fn may_send(&self) -> bool {
        self.has_ready && self.owed.is_none() && !self.is_over
    }

    /// Whether an answer is still to come.
    pub fn is_owed(&self) -> bool {
        self.owed.is_some()
    }

    /// Asks to send a command. Afterwards it counts as sent.
    ///
    /// # Errors
    /// It is none; no READY is there; the answer to the command before has not come; the session is over.
    pub fn send(&mut self, command: MessageType) -> Result<Sending, WireError> {
        if !command.is_command() {
            return Err(local(command, TOKENS, "it is no command"));
        }
        if self.is_over {
            return Err(local(command, END, "the session is over"));
        }
        if let Some(answer) = self.owed {
            return Err(local(command, TOKENS, format!("{answer} has not come yet")));
        }
        if !self.has_ready {
            return Err(local(command, TOKENS, "no READY is there for it"));
        }
        self.has_ready = false;
        self.ready_due = true;
        self.owed = command.answer();
        let expected = 1 + usize::from(self.owed.is_some());
        Ok(Sending { receives: self.receives.post_for(expected) })
    }

    /// Takes a message that has come.
    ///
    /// # Errors
    /// A READY although one is unused or before the answer that is due, an answer that nobody asked for, a command.
    pub fn received(&mut self, kind: MessageType) -> Result<Heard, WireError> {
        self.receives.used(kind)?;
        let heard = self.hear(kind);
        if !matches!(heard, Ok(Heard::Ready | Heard::Answer(_))) {
            self.is_over = true;
        }
        heard
    }

    fn hear(&mut self, kind: MessageType) -> Result<Heard, WireError> {
        // A listener may fail when everything has been sent; a READY may be left over.
        if self.is_over && !matches!(kind, MessageType::Ready | MessageType::Error) {
            return Err(misbehaved(kind, END, "the session is over"));
        }
        match (kind, self.owed) {
            (MessageType::Error, _) => Ok(Heard::Failed),
            (MessageType::Ready, Some(answer)) => {
                Err(misbehaved(kind, TOKENS, format!("it comes before {answer}, which is due first")))
            }
            (MessageType::Ready, None) if !self.ready_due => {
                Err(misbehaved(kind, TOKENS, "the one before is unused: one for each command"))
            }
            (MessageType::Ready, None) => {
                self.ready_due = false;
                self.has_ready = true;
                Ok(Heard::Ready)
            }
            (_, Some(answer)) if kind == answer => {
                self.owed = None;
                Ok(Heard::Answer(kind))
            }
            (_, Some(answer)) => Err(misbehaved(kind, TOKENS, format!("{answer} is due"))),
            (_, None) if kind.is_answer() => Err(misbehaved(kind, TOKENS, "nothing was asked")),
            (_, None) => Err(misbehaved(kind, TOKENS, "it is a command, and this side sends them")),
        }
    }

    /// Nothing more is sent. A READY that is left over may still come.
    pub fn finish(&mut self) {
        self.is_over = true;
    }

    /// Whether the session is over: finished, or failed.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Asks to say ERROR, since this side has failed. Then the session is over.
    ///
    /// # Errors
    /// It is over already: the peer knows, or needs not know.
    pub fn say_error(&mut self) -> Result<(), WireError> {
        if self.is_over {
            return Err(local(MessageType::Error, END, "the session is over"));
        }
        self.is_over = true;
        Ok(())
    }
}
