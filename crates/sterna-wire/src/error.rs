//! What can be wrong with bytes, and whose fault it is.
//!
//! There is one error type for the whole crate. A caller mostly passes it on: what matters is that it names
//! the byte, the message and the rule, and that [`Fault`] tells an operator where to look.

use std::borrow::Cow;
use std::fmt;

/// Who has to change something so that it works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The peer, or the file, broke the format. No setting of ours can help.
    PeerMisbehaved,
    /// Both sides are sound, but they were set up differently.
    PeerIncompatible,
    /// This side asked for something that it must not ask for.
    Local,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fault::PeerMisbehaved => "the peer broke the format",
            Fault::PeerIncompatible => "the two sides are set up differently",
            Fault::Local => "the fault is on this side",
        })
    }
}

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}, byte {offset}: {rule} ({paragraph}); {fault}")]
#[non_exhaustive]
pub struct WireError {
    /// Position of the offending field in bytes: in the main channel for errors of
    /// [`MainDecoder`](crate::main::MainDecoder), else from the start of the message.
    pub offset: u64,
    /// The message or element that was being read.
    pub message: &'static str,
    /// The rule that was broken and, where there is one, the remedy.
    pub rule: Cow<'static, str>,
    /// The paragraph of the specification that states the rule, such as `specs/stream.md §3.4`.
    pub paragraph: &'static str,
    /// Who is at fault.
    pub fault: Fault,
}

impl WireError {
    /// An error for bytes that no sound peer sends.
    pub fn misbehaved(
        message: &'static str,
        offset: u64,
        paragraph: &'static str,
        rule: impl Into<Cow<'static, str>>,
    ) -> Self {
        let fault = Fault::PeerMisbehaved;
        Self { offset, message, rule: rule.into(), paragraph, fault }
    }

    /// An error for bytes that are sound, but do not fit what this side was told to expect.
    pub fn incompatible(
        message: &'static str,
        offset: u64,
        paragraph: &'static str,
        rule: impl Into<Cow<'static, str>>,
    ) -> Self {
        let fault = Fault::PeerIncompatible;
        Self { offset, message, rule: rule.into(), paragraph, fault }
    }

    /// An error for a request of this side's own that the format cannot express.
    pub fn local(
        message: &'static str,
        offset: u64,
        paragraph: &'static str,
        rule: impl Into<Cow<'static, str>>,
    ) -> Self {
        let fault = Fault::Local;
        Self { offset, message, rule: rule.into(), paragraph, fault }
    }

    /// The same error, with what it is about before the rule.
    #[must_use]
    pub fn about(mut self, what: impl fmt::Display) -> Self {
        self.rule = format!("{what}: {}", self.rule).into();
        self
    }

    /// The same error with `base` bytes added to its offset: turns a position in a message into one in a channel.
    #[must_use]
    pub fn at(mut self, base: u64) -> Self {
        self.offset = self.offset.saturating_add(base);
        self
    }
}
