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
mod limits;
mod route;

pub use error::{FrameError, Rule};
pub use frames::{Frame, Head, Kind, ResetReason, Verdict};
pub use greeting::{Answer, Confirm, Hello, Purpose, Status};
pub use key::{Binding, SessionId, SessionKey, SharedSecret};
pub use limits::{DATA_BYTES, LANES, OFFSETS, TEXT_BYTES, VERSION};
pub use route::{BadRouteName, RouteName};

#[cfg(test)]
mod tests;
