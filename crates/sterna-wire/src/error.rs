//! The error of every decoder and encoder of this crate.
//!
//! One error type is enough because a caller mostly passes the error on. An operator needs the byte, the
//! message, the rule, and a [`Fault`] that shows which side to examine.

use std::borrow::Cow;
use std::fmt;

/// The side that has to change before a retry can succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The peer or the file broke the format. No setting on this side can help.
    PeerMisbehaved,
    /// Both sides follow the format, but their settings differ.
    PeerIncompatible,
    /// This side made a request that the format or the protocol does not allow.
    Local,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fault::PeerMisbehaved => "the peer does not follow the format",
            Fault::PeerIncompatible => "the settings of the two sides differ",
            Fault::Local => "the fault is on this side",
        })
    }
}

/// One broken rule of the specification, with the position of the offending field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}, byte {offset}: {rule} ({paragraph}); {fault}")]
#[non_exhaustive]
pub struct WireError {
    /// Position of the offending field in bytes. Errors of [`MainDecoder`](crate::main::MainDecoder) count from
    /// the start of the main channel, all others from the start of the message.
    pub offset: u64,
    /// The message or element that was being read.
    pub message: &'static str,
    /// The rule that was broken and, where there is one, the remedy.
    pub rule: Cow<'static, str>,
    /// The paragraph of the specification that states the rule, such as `specs/stream.md §3.4`.
    pub paragraph: &'static str,
    /// The side at fault.
    pub fault: Fault,
}

impl WireError {
    /// An error for bytes that break the format.
    pub fn misbehaved(
        message: &'static str,
        offset: u64,
        paragraph: &'static str,
        rule: impl Into<Cow<'static, str>>,
    ) -> Self {
        let fault = Fault::PeerMisbehaved;
        Self { offset, message, rule: rule.into(), paragraph, fault }
    }

    /// An error for bytes that follow the format, but do not match this side's expectations.
    pub fn incompatible(
        message: &'static str,
        offset: u64,
        paragraph: &'static str,
        rule: impl Into<Cow<'static, str>>,
    ) -> Self {
        let fault = Fault::PeerIncompatible;
        Self { offset, message, rule: rule.into(), paragraph, fault }
    }

    /// An error for a request of this side that the format cannot express.
    pub fn local(
        message: &'static str,
        offset: u64,
        paragraph: &'static str,
        rule: impl Into<Cow<'static, str>>,
    ) -> Self {
        let fault = Fault::Local;
        Self { offset, message, rule: rule.into(), paragraph, fault }
    }

    /// The same error, with `what` in front of the rule to name the object concerned.
    #[must_use]
    pub fn about(mut self, what: impl fmt::Display) -> Self {
        self.rule = format!("{what}: {}", self.rule).into();
        self
    }

    /// The same error with `base` bytes added to its offset.
    ///
    /// Turns a position in a message into a position in a channel.
    #[must_use]
    pub fn at(mut self, base: u64) -> Self {
        self.offset = self.offset.saturating_add(base);
        self
    }
}
