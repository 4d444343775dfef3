//! Bugs between a state machine and its connection, which the simulation must detect.

use super::world::Pairing;

/// A bug that the simulation plants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// Sends a command without a READY.
    SendWithoutReady,
    /// Sends a command before the answer to the previous one.
    SendBeforeAnswer,
    /// Does not post the receives that a command needs.
    ForgottenReceives,
    /// Sends more bytes after a hook in the same message, and conceals the hook from the machine.
    HookInside,
    /// Ends the phase before its WRITEs are complete.
    FinishedEarly,
    /// Sends bytes of the stream while a phase is open.
    FileInPhase,
    /// Requests the blocks twice.
    BlocksTwice,
    /// Registers memory before the blocks are known.
    RegisterFirst,
    /// Writes beyond the end of a window.
    WriteBeyond,
    /// Sends a second READY immediately after the first.
    ReadyTwice,
    /// Sends READY for the next command before the answer.
    AnswerAfterReady,
    /// Sends READY without a receive for the invited message.
    ReadyWithoutReceive,
    /// Answers with another type of message.
    OtherAnswer,
    /// Never sends an answer.
    NoAnswer,
    /// Answers with a key of 0.
    KeyZero,
    /// Drops the bytes after a hook.
    BytesDropped,
}

impl Plant {
    pub const ALL: [Self; 16] = [
        Self::SendWithoutReady,
        Self::SendBeforeAnswer,
        Self::ForgottenReceives,
        Self::HookInside,
        Self::FinishedEarly,
        Self::FileInPhase,
        Self::BlocksTwice,
        Self::RegisterFirst,
        Self::WriteBeyond,
        Self::ReadyTwice,
        Self::AnswerAfterReady,
        Self::ReadyWithoutReceive,
        Self::OtherAnswer,
        Self::NoAnswer,
        Self::KeyZero,
        Self::BytesDropped,
    ];

    fn is_of_source(self) -> bool {
        (self as usize) < Self::ReadyTwice as usize
    }

    /// The pairings in which the bug is on Sterna's side.
    pub fn pairings(self) -> &'static [Pairing] {
        match self {
            // Only a QEMU loses the bytes after a hook.
            Self::HookInside => &[Pairing::ToQemu],
            // A Sterna ends a message after each hook, so that no bytes could be dropped.
            Self::BytesDropped => &[Pairing::FromQemu],
            // The model of a QEMU accepts every command of its loop in any phase.
            Self::BlocksTwice | Self::RegisterFirst => &[Pairing::Sternas],
            _ if self.is_of_source() => &[Pairing::Sternas, Pairing::ToQemu],
            _ => &[Pairing::Sternas, Pairing::FromQemu],
        }
    }

    /// Whether the finding names this bug. The simulation may find a consequence of the bug first.
    pub fn is_named_by(self, found: &str) -> bool {
        let words: &[&str] = match self {
            Self::SendWithoutReady => &["no receive is posted", "no READY"],
            Self::SendBeforeAnswer => &["no receive is posted", "does not wait for", "no READY"],
            Self::ForgottenReceives | Self::ReadyWithoutReceive => {
                &["no receive is posted", "no receive was posted"]
            }
            Self::HookInside | Self::BytesDropped => &["stuck", "RAM", "element", "footer"],
            Self::FinishedEarly => &["not complete"],
            Self::FileInPhase => &["stream while a phase is open", "in its phase"],
            Self::BlocksTwice => &["exchanged once"],
            Self::RegisterFirst => &["begins with the exchange"],
            Self::WriteBeyond => &["remote access error"],
            Self::ReadyTwice => {
                &["no receive is posted", "the previous one is unused", "before REGISTER", "before RAM"]
            }
            Self::AnswerAfterReady => &["it arrived before", "a QEMU gets READY", "no receive is posted"],
            Self::OtherAnswer => &["is due", "a QEMU gets"],
            Self::NoAnswer => &["stuck", "it arrived before", "a QEMU gets READY"],
            Self::KeyZero => &["key 0"],
        };
        words.iter().any(|word| found.contains(word))
    }
}
