//! A relay for the migrations of unmodified VMMs over connections that break.
//!
//! A VMM opens connections to the relay on its own host; each is a *flow*. All flows of a migration share a
//! *session* between two relays. The session runs over one or more *carriers*, which are connections between the
//! relays. If a carrier breaks, the relays connect again and send the bytes that did not arrive.
//!
//! | module | contents |
//! | --- | --- |
//! | [`frame`] | encoders and decoders of the protocol (`specs/relay.md`), without I/O |
//! | [`session`] | the state of one session, without I/O and without a clock |
//! | [`pack`] | compression, and references to pages that the other relay has |
//! | [`phase`] | how far a migration is, and whether a relay may close its VMM's connections |
//! | [`relay`] | sockets and threads |
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod frame;
pub mod pack;
pub mod phase;
pub mod relay;
pub mod session;
