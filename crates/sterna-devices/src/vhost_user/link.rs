//! A device's connection, with the thread that talks over it.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::error::VhostUserError;
use super::session::{Session, Terms};
use super::turn::Turn;
use super::worker::Worker;

/// Dropping it closes the connection, or this process's descriptors of it ([`Worker::set_shared`]).
pub(super) struct Link {
    pub(super) worker: Worker<Session>,
    /// The connection, to see its end and to hand it over.
    pub(super) socket: UnixStream,
    /// It came from another process, whose guest has not come yet.
    pub(super) is_awaited: AtomicBool,
}

impl Link {
    /// Nothing is said yet. `limit` is how long an answer is waited for.
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
                what: "doubling the socket",
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
