//! Decodes the standby's messages on the main channel (`specs/colo.md` §2 and §3). Until SHUT they are the return
//! path, afterwards COLO's messages. Pure.

use sterna_wire::WireError;
use sterna_wire::colo::{Message, MessageKind};
use sterna_wire::return_path::ReturnMessage;

/// A message of the standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// A message of the return path, of the given length in bytes, that needs no action here.
    ReturnPath(usize),
    /// SHUT 0 and CHECKPOINT_READY: the seeding is held. QEMU's guest is paused until QEMU reads both.
    Ready,
    /// CHECKPOINT_REPLY: checkpoint `n`, from 1, may be taken. The guest runs until QEMU reads it.
    Reply(u64),
    /// VMSTATE_RECEIVED: checkpoint `n` is held, and the guest is paused.
    Received(u64),
    /// VMSTATE_LOADED: the guest resumes when QEMU reads it.
    Loaded(u64),
}

impl Answer {
    /// The encoding of messages that have constant bytes.
    pub(super) fn bytes(self) -> Vec<u8> {
        let message = |kind: MessageKind| (kind as u32).to_be_bytes().to_vec();
        match self {
            Self::ReturnPath(_) => Vec::new(),
            Self::Ready => {
                let shut = [0, 1, 0, 4, 0, 0, 0, 0];
                [&shut[..], &message(MessageKind::CheckpointReady)].concat()
            }
            Self::Reply(_) => message(MessageKind::CheckpointReply),
            Self::Received(_) => message(MessageKind::VmstateReceived),
            Self::Loaded(_) => message(MessageKind::VmstateLoaded),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    ReturnPath,
    Ready,
    Reply,
    Received,
    Loaded,
}

/// Decoder of the standby's messages, which arrive in pieces.
#[derive(Debug)]
pub(super) struct Answers {
    due: Due,
    /// Number of the checkpoint of the last REPLY.
    number: u64,
    bytes: Vec<u8>,
}

impl Answers {
    pub(super) fn new() -> Self {
        Self { due: Due::ReturnPath, number: 0, bytes: Vec::new() }
    }

    /// Appends received bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, with its bytes if it is of the return path. None until all its bytes have arrived.
    ///
    /// # Errors
    /// The standby broke the format or the order.
    pub(super) fn next(&mut self) -> Result<Option<(Answer, Vec<u8>)>, WireError> {
        if self.due == Due::ReturnPath {
            let Some((message, length)) = ReturnMessage::decode(&self.bytes)? else { return Ok(None) };
            let bytes: Vec<u8> = self.bytes.drain(..length).collect();
            if message != ReturnMessage::Shut(0) {
                return Ok(Some((Answer::ReturnPath(length), bytes)));
            }
            // SHUT and READY are forwarded in one write: between them QEMU's guest would be paused.
            self.due = Due::Ready;
        }
        let Some((message, length)) = Message::decode(&self.bytes)? else { return Ok(None) };
        let (answer, due) = match (self.due, message) {
            (Due::Ready, Message::CheckpointReady) => (Answer::Ready, Due::Reply),
            (Due::Reply, Message::CheckpointReply) => {
                self.number += 1;
                (Answer::Reply(self.number), Due::Received)
            }
            (Due::Received, Message::VmstateReceived) => (Answer::Received(self.number), Due::Loaded),
            (Due::Loaded, Message::VmstateLoaded) => (Answer::Loaded(self.number), Due::Reply),
            (due, message) => {
                let rule = format!("the standby sent {} instead of {due:?}", message.kind());
                return Err(WireError::misbehaved("COLO message", 0, "specs/colo.md §3", rule));
            }
        };
        self.bytes.drain(..length);
        self.due = due;
        Ok(Some((answer, answer.bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pieces: &[&[u8]]) -> Vec<Answer> {
        let mut answers = Answers::new();
        let mut found = Vec::new();
        for piece in pieces {
            answers.push(piece);
            while let Some((answer, bytes)) = answers.next().unwrap() {
                assert!(!bytes.is_empty());
                found.push(answer);
            }
        }
        found
    }

    /// PONG 1, SHUT 0, READY and two checkpoints, as a standby sends them.
    const SAID: [u8; 44] = [
        0, 2, 0, 4, 0, 0, 0, 1, 0, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0,
        0, 2, 0, 0, 0, 5, 0, 0, 0, 6,
    ];

    #[test]
    fn answers_are_found_however_the_bytes_come() {
        use Answer::*;
        let expected =
            [ReturnPath(8), Ready, Reply(1), Received(1), Loaded(1), Reply(2), Received(2), Loaded(2)];
        assert_eq!(all(&[&SAID]), expected);
        assert_eq!(all(&SAID.chunks(1).collect::<Vec<_>>()), expected);
        assert_eq!(all(&SAID.chunks(7).collect::<Vec<_>>()), expected);
        let bytes: Vec<u8> = expected[1..].iter().flat_map(|answer| answer.bytes()).collect();
        assert_eq!(bytes, SAID[8..], "what is handed on is what came");
    }

    #[test]
    fn shut_waits_for_ready() {
        assert_eq!(all(&[&SAID[..16]]), [Answer::ReturnPath(8)]);
    }

    #[test]
    fn failure_of_the_seeding_is_handed_on() {
        let shut = [0, 1, 0, 4, 0, 0, 0, 1];
        assert_eq!(all(&[&shut]), [Answer::ReturnPath(8)]);
    }

    #[test]
    fn other_order_is_refused() {
        for (from, wrong) in [(16, 1), (20, 0), (20, 6), (24, 6), (28, 2), (28, 9)] {
            let mut answers = Answers::new();
            answers.push(&SAID[..from]);
            while answers.next().unwrap().is_some() {}
            answers.push(&u32::to_be_bytes(wrong));
            assert!(answers.next().is_err(), "{wrong} after {from} bytes");
        }
    }
}
