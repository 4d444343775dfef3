//! The messages between two relays (`specs/relay.md`).
//!
//! A carrier begins with the [`Hello`] of the relay that connects, the [`Answer`] and the [`Confirm`]. After that
//! both directions carry [`Frame`]s. A frame has a [`Head`] of 8 bytes and a body; the payload of DATA is not
//! decoded, so that the caller reads it directly to its place.
//!
//! Decoders check each length before the caller reads so many bytes. A [`FrameError`] names the frame, the flow,
//! the byte and the rule.

mod error;
mod frames;
mod greeting;
mod key;
mod route;

pub use error::{FrameError, Rule};
pub use frames::{Frame, Head, Kind, ResetReason, Verdict};
pub use greeting::{Answer, Confirm, Hello, Purpose, Status};
pub use key::{Binding, SessionId, SessionKey, SharedSecret};
pub use route::{BadRouteName, RouteName};

/// Version of the protocol.
pub const VERSION: u32 = 1;
/// Most bytes of payload in one DATA frame.
pub const DATA_BYTES: usize = 256 << 10;
/// Most carriers of a session.
pub const LANES: u8 = 16;
/// Most bytes of the text in OVER.
pub const TEXT_BYTES: usize = 1024;
/// Offsets in a flow are below this number.
pub const OFFSETS: u64 = 1 << 62;

#[cfg(test)]
mod tests;
