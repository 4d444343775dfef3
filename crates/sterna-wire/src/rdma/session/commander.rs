//! The order of messages at the side that sends commands (`specs/rdma.md §3.3`).

use super::receives::Sending;
use super::receives::{END, Receives, TOKENS, local, misbehaved};
use crate::error::WireError;
use crate::rdma::message_type::MessageType;

/// READYs and answers at the side that sends commands.
#[derive(Debug, Clone)]
pub struct Commander {
    receives: Receives,
    /// Whether a READY has arrived that no command has used.
    has_ready: bool,
    /// Whether another READY may arrive: one for the connection, one for each command.
    ready_due: bool,
    /// The answer that the last command waits for.
    owed: Option<MessageType>,
    is_over: bool,
}

/// The meaning of a received message for a commander.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// The listener accepts a command.
    Ready,
    /// The answer of this type to the last command.
    Answer(MessageType),
    /// The listener has failed. Disconnect without sending ERROR.
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

    /// Number of receives to post before connecting or accepting.
    pub fn starting(&mut self) -> usize {
        self.receives.post_for(1)
    }

    /// Whether a command may be sent now.
    pub fn may_send(&self) -> bool {
        self.has_ready && self.owed.is_none() && !self.is_over
    }

    /// Whether the answer to the last command is missing.
    pub fn is_owed(&self) -> bool {
        self.owed.is_some()
    }

    /// Asks to send a command. On success the command counts as sent.
    ///
    /// # Errors - `command` is not a command - no READY has arrived for it - the answer to the previous command has not
    /// arrived - the session has ended
    pub fn send(&mut self, command: MessageType) -> Result<Sending, WireError> {
        if !command.is_command() {
            return Err(local(command, TOKENS, "it is not a command"));
        }
        if self.is_over {
            return Err(local(command, END, "the session has ended"));
        }
        if let Some(answer) = self.owed {
            return Err(local(command, TOKENS, format!("{answer} has not arrived yet")));
        }
        if !self.has_ready {
            return Err(local(command, TOKENS, "no READY has arrived for it"));
        }
        self.has_ready = false;
        self.ready_due = true;
        self.owed = command.answer();
        let expected = 1 + usize::from(self.owed.is_some());
        Ok(Sending { receives: self.receives.post_for(expected) })
    }

    /// Records a received message.
    ///
    /// # Errors
    /// A READY while one is unused, or before an answer that is due; an answer without a question; a command.
    pub fn received(&mut self, kind: MessageType) -> Result<Heard, WireError> {
        self.receives.used(kind)?;
        let heard = self.hear(kind);
        if !matches!(heard, Ok(Heard::Ready | Heard::Answer(_))) {
            self.is_over = true;
        }
        heard
    }

    fn hear(&mut self, kind: MessageType) -> Result<Heard, WireError> {
        // After the last command, a listener may still fail, and one READY may be left over.
        if self.is_over && !matches!(kind, MessageType::Ready | MessageType::Error) {
            return Err(misbehaved(kind, END, "the session has ended"));
        }
        match (kind, self.owed) {
            (MessageType::Error, _) => Ok(Heard::Failed),
            (MessageType::Ready, Some(answer)) => {
                Err(misbehaved(kind, TOKENS, format!("it arrived before {answer}")))
            }
            (MessageType::Ready, None) if !self.ready_due => {
                Err(misbehaved(kind, TOKENS, "the previous one is unused; each command needs one"))
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
            (_, None) if kind.is_answer() => Err(misbehaved(kind, TOKENS, "no command was sent")),
            (_, None) => Err(misbehaved(kind, TOKENS, "it is a command, but only this side sends commands")),
        }
    }

    /// Ends the session after the last command. One READY may still arrive.
    pub fn finish(&mut self) {
        self.is_over = true;
    }

    /// Whether the session has ended, by success or by failure.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Asks to send ERROR, because this side has failed. The session is then over.
    ///
    /// # Errors
    /// The session is over already. The peer then needs no ERROR.
    pub fn say_error(&mut self) -> Result<(), WireError> {
        if self.is_over {
            return Err(local(MessageType::Error, END, "the session has ended"));
        }
        self.is_over = true;
        Ok(())
    }
}
