//! The order of RDMA control messages (`specs/rdma.md §3.3`, `§3.4`, `§5.3`, `§7`).
//!
//! These state machines have no connection. The owner of the connection reports each received message, and asks
//! before it sends one. The answer is the number of receives to post first, or the rule that forbids the
//! message. The machines decide only by message types. [`BlockPlaces`](super::BlockPlaces) and the main
//! channel's decoder check the content.
//!
//! | machine | side |
//! | --- | --- |
//! | [`Commander`] | the side that sends commands: READYs and answers |
//! | [`Listener`] | the side that receives commands: READYs and answers |
//! | [`SourceSession`] | the source on the main connection: a commander with phases and WRITEs |
//! | [`DestinationSession`] | the destination on the main connection: a listener with phases |
//! | [`LaneSource`], [`LaneDestination`] | both ends of a lane: FILE messages with credit |
//!
//! On the return path the destination is a [`Commander`] of FILE messages and the source a [`Listener`].
//!
//! If the peer breaks a rule, the error is [`PeerMisbehaved`](crate::Fault::PeerMisbehaved). The session is
//! then over: disconnect without sending ERROR. If this side breaks a rule, the error is
//! [`Local`](crate::Fault::Local), and the state does not change. A side that fails for another reason calls
//! `say_error` first.

mod commander;
mod destination;
mod lane;
mod listener;
mod receives;
mod source;

pub use commander::{Commander, Heard};
pub use destination::{Arrival, DestinationSession};
pub use lane::{Credit, LaneDestination, LaneSource};
pub use listener::Listener;
pub use receives::Sending;
pub use source::{Command, Peer, SourceSession};
