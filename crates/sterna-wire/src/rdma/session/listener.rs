//! The side that takes commands (`specs/rdma.md §3.3`, `§3.4`).

use super::{END, Receives, Sending, TOKENS, local, misbehaved};
use crate::error::WireError;
use crate::rdma::header::MessageType;

const AHEAD: &str = "specs/rdma.md §3.4";

/// Tokens of the side that takes commands.
#[derive(Debug, Clone)]
pub struct Listener {
    receives: Receives,
    /// READYs sent minus commands received: 1 while one is unanswered, and -1 when the commander is ahead.
    unanswered: i32,
    /// Messages that the commander may send without a READY.
    ahead: i32,
    /// Each READY follows a message: one that goes before the first message may come before there is a receive for it.
    follows: bool,
    /// The answer that this side owes.
    owes: Option<MessageType>,
    is_over: bool,
}

impl Listener {
    /// The destination on the main connection.
    pub fn of_main() -> Self {
        Self::new(0, 1)
    }

    /// The source on the return path of a Sterna, which waits for a READY before each message.
    pub fn of_return_path() -> Self {
        Self::new(1, 2)
    }

    /// The source on the return path of a QEMU: it sends its first message without a READY, and before that it may not have
    /// posted a receive for one.
    pub fn of_qemus_return_path() -> Self {
        Self { follows: true, ..Self::new(1, 2) }
    }

    fn new(ahead: i32, spare: usize) -> Self {
        let receives = Receives::new(spare);
        Self { receives, unanswered: 0, ahead, follows: false, owes: None, is_over: false }
    }

    /// Receives to post before connecting or accepting.
    pub fn starting(&mut self) -> usize {
        let first = 1 + self.ahead as usize;
        self.receives.post_for(first)
    }

    /// Whether a READY may be sent now.
    pub fn may_invite(&self) -> bool {
        self.unanswered <= self.most_unanswered() && self.owes.is_none() && !self.is_over
    }

    /// Asks to send READY. Afterwards it counts as sent.
    ///
    /// # Errors
    /// One is unanswered, an answer is owed, the session is over.
    pub fn invite(&mut self) -> Result<Sending, WireError> {
        let ready = MessageType::Ready;
        if self.is_over {
            return Err(local(ready, END, "the session is over"));
        }
        if let Some(answer) = self.owes {
            return Err(local(ready, TOKENS, format!("{answer} goes first")));
        }
        if self.unanswered > self.most_unanswered() {
            return Err(local(ready, TOKENS, "the one before is unanswered: one for each command"));
        }
        self.unanswered += 1;
        let expected = (self.unanswered + self.ahead) as usize;
        Ok(Sending { receives: self.receives.post_for(expected) })
    }

    /// Of READYs, before another one.
    fn most_unanswered(&self) -> i32 {
        if self.follows { -self.ahead } else { 0 }
    }

    /// Takes a message that has come: a command, or ERROR (the commander has failed: no ERROR goes back).
    ///
    /// # Errors
    /// A command without READY, or before the answer to the one before; a READY or an answer.
    pub fn received(&mut self, kind: MessageType) -> Result<(), WireError> {
        self.receives.used(kind)?;
        let heard = self.hear(kind);
        if heard.is_err() || kind == MessageType::Error {
            self.is_over = true;
        }
        heard
    }

    fn hear(&mut self, kind: MessageType) -> Result<(), WireError> {
        if self.is_over {
            return Err(misbehaved(kind, END, "the session is over"));
        }
        if kind == MessageType::Error {
            return Ok(());
        }
        if !kind.is_command() {
            return Err(misbehaved(kind, TOKENS, "the side that takes commands does not take it"));
        }
        if let Some(answer) = self.owes {
            return Err(misbehaved(kind, TOKENS, format!("it does not wait for {answer}")));
        }
        if self.unanswered + self.ahead <= 0 {
            let paragraph = if self.ahead > 0 { AHEAD } else { TOKENS };
            return Err(misbehaved(kind, paragraph, "no READY was sent for it"));
        }
        self.unanswered -= 1;
        self.owes = kind.answer();
        Ok(())
    }

    /// Asks to send the answer to the last command. Afterwards it counts as sent.
    ///
    /// # Errors
    /// Another answer is owed, or none.
    pub fn answer(&mut self, kind: MessageType) -> Result<Sending, WireError> {
        if self.is_over {
            return Err(local(kind, END, "the session is over"));
        }
        match self.owes {
            Some(owed) if owed == kind => {
                self.owes = None;
                Ok(Sending { receives: 0 })
            }
            Some(owed) => Err(local(kind, TOKENS, format!("{owed} is owed"))),
            None => Err(local(kind, TOKENS, "nothing was asked")),
        }
    }

    /// The answer that this side owes, if it does.
    pub fn owes(&self) -> Option<MessageType> {
        self.owes
    }

    /// Nothing more is expected.
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
    /// It is over already.
    pub fn say_error(&mut self) -> Result<(), WireError> {
        if self.is_over {
            return Err(local(MessageType::Error, END, "the session is over"));
        }
        self.is_over = true;
        Ok(())
    }
}
