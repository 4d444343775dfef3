//! Relays that run: sockets and threads around the machines of [`session`](crate::session) and
//! [`phase`](crate::phase).
//!
//! # Threads
//! A session has these threads, on each side: two for each carrier (one reads, one writes), two for each flow, and one
//! for time. The acceptor has one more, which connects to the VMM in the order of the flows. All of them lock the
//! session's state for short times only, never while they wait for a socket. Bytes pass on without a change of threads where that cannot stall a
//! relay (`live/direct`).
//!
//! A connection of a stranger has one thread until its greeting ends; there are at most 256 of them.

mod acceptor;
mod carrier;
mod codec;
mod control_flow;
mod dialer;
mod dictionary;
mod error;
mod figures;
mod greeting;
mod limit;
mod live;
mod main_flow;
mod meter;
mod options;
mod packing;
mod readiness;
mod sending;
mod vmm;

pub use acceptor::Acceptor;
pub use dialer::Dialer;
pub use dictionary::{DictionaryError, ImageDictionary};
pub use error::RelayError;
pub use figures::{Figures, SessionStatus};
pub use limit::{Limit, Share};
pub use options::{Compress, Notice, Notices, Options, Routes, Security};
