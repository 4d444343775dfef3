//! The kind of a flow, by the first bytes that its VMM sends.

use super::control::is_control;
use crate::session::Priority;

/// What a VMM's connection carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamKind {
    /// The main channel of a QEMU migration.
    Main,
    /// The main channel of a recovered postcopy migration, which has no header.
    Recovered,
    /// A multifd channel.
    Multifd,
    /// The preempt channel: pages that the destination's guest waits for.
    Preempt,
    /// A VMM's stream that the relay cannot read, such as TLS inside QEMU.
    Opaque,
    /// libvirt's control connection.
    Control,
    /// A connection whose server speaks first: NBD.
    Server,
    /// Any other stream.
    Raw,
}

impl StreamKind {
    /// Number of first bytes that tell the kind.
    pub const BYTES: usize = 8;

    /// The kind of a connection with these first bytes. `has_main`: the session has a main channel that is open.
    ///
    /// Fewer than [`BYTES`](Self::BYTES) bytes are those of a connection that ended.
    pub fn of(first: &[u8], has_main: bool) -> Self {
        match first {
            [b'Q', b'E', b'V', b'M', ..] => Self::Main,
            [0x11, 0x22, 0x33, 0x44, ..] => Self::Multifd,
            // The flags of a page's address never have the last bytes of libvirt's programs.
            _ if is_control(first) == Some(true) => Self::Control,
            // Elements of a main channel: a command, or RAM's PART or END. A preempt channel begins with a page's
            // address, whose first byte is 0 for any RAM below 64 PiB.
            [0x08 | 0x02 | 0x03, ..] if !has_main => Self::Recovered,
            // A record of TLS: ClientHello.
            [0x16, 0x03, ..] => Self::Opaque,
            [0, ..] if has_main => Self::Preempt,
            _ if has_main => Self::Raw,
            _ => Self::Opaque,
        }
    }

    /// The priority of what the source's VMM sends.
    pub fn priority(self) -> Priority {
        if matches!(self, Self::Preempt | Self::Control) { Priority::Urgent } else { Priority::Bulk }
    }

    /// Whether the flow is the one whose end decides which side runs the guest.
    pub fn is_main(self) -> bool {
        matches!(self, Self::Main | Self::Recovered)
    }

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "main channel",
            Self::Recovered => "recovered main channel",
            Self::Multifd => "multifd channel",
            Self::Preempt => "preempt channel",
            Self::Opaque => "stream that the relay cannot read",
            Self::Control => "control connection of libvirt",
            Self::Server => "connection whose server speaks first",
            Self::Raw => "other stream",
        }
    }
}
