//! The connection of a device to its back end, with the thread that uses it.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::error::VhostUserError;
use super::session::{Session, Terms};
use super::turn::Turn;
use super::worker::Worker;

/// A connection and its thread. Dropping it closes the connection, or only this process's descriptors
/// ([`Worker::set_shared`]).
pub(super) struct Link {
    pub(super) worker: Worker<Session>,
    /// The connection, used to detect its end and to hand it over.
    pub(super) socket: UnixStream,
    /// Whether the connection came from another process whose guest has not arrived yet.
    pub(super) is_awaited: AtomicBool,
}

impl Link {
    /// Creates a link without sending a request. `limit` is the time limit of an answer.
    pub(super) fn over(
        main: UnixStream,
        turn: Turn,
        limit: Duration,
        terms: Terms,
    ) -> Result<Self, VhostUserError> {
        let device = Arc::clone(&terms.device);
        let clone = || {
            main.try_clone().map_err(|source: io::Error| VhostUserError::System {
                device: Arc::clone(&device),
                what: "duplicating the socket",
                source,
            })
        };
        let (by_hand, to_close, socket) = (clone()?, clone()?, clone()?);
        let asking = terms.asking.clone();
        let session = Session::new([main, by_hand], turn, terms);
        let worker = Worker::start(device, asking, limit, to_close, session)?;
        Ok(Self { worker, socket, is_awaited: AtomicBool::new(turn == Turn::Theirs) })
    }
}
