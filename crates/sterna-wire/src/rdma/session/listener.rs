//! The order of messages at the side that receives commands (`specs/rdma.md §3.3`, `§3.4`).

use super::receives::Sending;
use super::receives::{END, Receives, TOKENS, local, misbehaved};
use crate::error::WireError;
use crate::rdma::message_type::MessageType;

const AHEAD: &str = "specs/rdma.md §3.4";

/// READYs and answers at the side that receives commands.
#[derive(Debug, Clone)]
pub struct Listener {
    receives: Receives,
    /// READYs sent minus commands received.
    ///
    /// 1 while a READY is unanswered, -1 when the commander is ahead.
    unanswered: i32,
    /// Number of messages that the commander may send without a READY.
    ahead: i32,
    /// Whether each READY must follow a message. An earlier READY may arrive before the peer has posted a
    /// receive for it.
    follows: bool,
    /// The answer that this side must send next.
    owes: Option<MessageType>,
    is_over: bool,
}

impl Listener {
    /// The destination on the main connection.
    pub fn of_main() -> Self {
        Self::new(0, 1)
    }

    /// The source on the return path of a Sterna.
    ///
    /// The Sterna waits for a READY before each message.
    pub fn of_return_path() -> Self {
        Self::new(1, 2)
    }

    /// The source on the return path of a QEMU.
    ///
    /// QEMU sends its first message without a READY. Before that message, it may not have posted a receive for
    /// a READY.
    pub fn of_qemus_return_path() -> Self {
        Self { follows: true, ..Self::new(1, 2) }
    }

    fn new(ahead: i32, spare: usize) -> Self {
        let receives = Receives::new(spare);
        Self { receives, unanswered: 0, ahead, follows: false, owes: None, is_over: false }
    }

    /// Number of receives to post before connecting or accepting.
    pub fn starting(&mut self) -> usize {
        let first = 1 + self.ahead as usize;
        self.receives.post_for(first)
    }

    /// Whether a READY may be sent now.
    pub fn may_invite(&self) -> bool {
        self.unanswered <= self.most_unanswered() && self.owes.is_none() && !self.is_over
    }

    /// Asks to send READY. On success it counts as sent.
    ///
    /// # Errors A READY is unanswered, an answer is due, or the session has ended.
    pub fn invite(&mut self) -> Result<Sending, WireError> {
        let ready = MessageType::Ready;
        if self.is_over {
            return Err(local(ready, END, "the session has ended"));
        }
        if let Some(answer) = self.owes {
            return Err(local(ready, TOKENS, format!("{answer} must be sent first")));
        }
        if self.unanswered > self.most_unanswered() {
            return Err(local(ready, TOKENS, "the previous one is unanswered; each command needs one"));
        }
        self.unanswered += 1;
        let expected = (self.unanswered + self.ahead) as usize;
        Ok(Sending { receives: self.receives.post_for(expected) })
    }

    /// Most unanswered READYs at which another READY is allowed.
    fn most_unanswered(&self) -> i32 {
        if self.follows { -self.ahead } else { 0 }
    }

    /// Records a received message: a command, or ERROR. After ERROR, disconnect without an answer.
    ///
    /// # Errors
    /// A command without READY, or before this side has answered the previous one; a READY or an answer.
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
            return Err(misbehaved(kind, END, "the session has ended"));
        }
        if kind == MessageType::Error {
            return Ok(());
        }
        if !kind.is_command() {
            return Err(misbehaved(kind, TOKENS, "the side that receives commands does not accept it"));
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

    /// Asks to send the answer to the last command. On success it counts as sent.
    ///
    /// # Errors Another answer is due, or none, or the session has ended.
    pub fn answer(&mut self, kind: MessageType) -> Result<Sending, WireError> {
        if self.is_over {
            return Err(local(kind, END, "the session has ended"));
        }
        match self.owes {
            Some(owed) if owed == kind => {
                self.owes = None;
                Ok(Sending { receives: 0 })
            }
            Some(owed) => Err(local(kind, TOKENS, format!("{owed} has not been sent yet"))),
            None => Err(local(kind, TOKENS, "no command was received")),
        }
    }

    /// The answer that this side must send; `None` if no answer is due.
    pub fn owes(&self) -> Option<MessageType> {
        self.owes
    }

    /// Ends the session: no further message is expected.
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
    /// The session is over already.
    pub fn say_error(&mut self) -> Result<(), WireError> {
        if self.is_over {
            return Err(local(MessageType::Error, END, "the session has ended"));
        }
        self.is_over = true;
        Ok(())
    }
}
