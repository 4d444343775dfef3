//! The messages between two relays (`specs/relay.md`).
//!
//! A carrier begins with the [`Hello`] of the relay that connects, the [`Answer`] and the [`Confirm`]. After that
//! both directions carry [`Frame`]s. A frame has a [`Head`] of 8 bytes and a body; the payload of DATA and PACKED is not
//! decoded, so that the caller reads it directly to its place.
//!
//! Decoders check each length before the caller reads so many bytes. A [`FrameError`] names the frame, the flow,
//! the byte and the rule.

mod error;
mod frames;
mod greeting;
mod key;
mod limits;
mod packed;
mod route;

pub use error::{FrameError, Rule};
pub use frames::{Frame, Head, Kind, ResetReason, Verdict};
pub use greeting::{Answer, Confirm, Hello, Offer, Purpose, Status};
pub use key::{Binding, SessionId, SessionKey, SharedSecret};
pub use limits::{
    DATA_BYTES, HAVE_HASHES, LANES, OFFSETS, OLDEST_VERSION, PACKED_BYTES, PACKED_PAGES, PAGE_BYTES,
    TEXT_BYTES, VERSION,
};
pub use packed::{Method, NamedPage, PackedHead};
pub use route::{BadRouteName, RouteName};

#[cfg(test)]
mod tests;
