//! Bugs between a machine and its connection, which the simulation must notice.

use super::world::Pairing;

/// One bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// A command goes out although no READY is there.
    SendWithoutReady,
    /// A command goes out before the answer to the one before.
    SendBeforeAnswer,
    /// The receives that a command needs are not posted.
    ForgottenReceives,
    /// A message goes on after its hook, as far as the machine knows without one.
    HookInside,
    /// The phase ends before its WRITEs are complete.
    FinishedEarly,
    /// Stream goes out while a phase is open.
    FileInPhase,
    /// The blocks are asked for twice.
    BlocksTwice,
    /// Memory is registered before the blocks are known.
    RegisterFirst,
    /// A WRITE leaves its window.
    WriteBeyond,
    /// The second READY goes out at once.
    ReadyTwice,
    /// The next command is invited before the answer goes out.
    AnswerAfterReady,
    /// READY goes out without a receive for what it invites.
    ReadyWithoutReceive,
    /// An answer is of another type.
    OtherAnswer,
    /// An answer never comes.
    NoAnswer,
    /// A key is 0.
    KeyZero,
    /// The bytes after a hook are dropped.
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

    /// Where the bug is on Sterna's side.
    pub fn pairings(self) -> &'static [Pairing] {
        match self {
            // Only a QEMU loses what comes after a hook.
            Self::HookInside => &[Pairing::ToQemu],
            // A Sterna cuts after each hook: nothing would be dropped.
            Self::BytesDropped => &[Pairing::FromQemu],
            // A QEMU in the model takes what its loop takes, in any phase.
            Self::BlocksTwice | Self::RegisterFirst => &[Pairing::Sternas],
            _ if self.is_of_source() => &[Pairing::Sternas, Pairing::ToQemu],
            _ => &[Pairing::Sternas, Pairing::FromQemu],
        }
    }

    /// Whether the finding is about this bug. What follows from a bug may be found first.
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
                &["no receive is posted", "the one before is unused", "before REGISTER", "before RAM"]
            }
            Self::AnswerAfterReady => &["which is due first", "a QEMU gets READY", "no receive is posted"],
            Self::OtherAnswer => &["is due", "a QEMU gets"],
            Self::NoAnswer => &["stuck", "which is due first", "a QEMU gets READY"],
            Self::KeyZero => &["key 0"],
        };
        words.iter().any(|word| found.contains(word))
    }
}
