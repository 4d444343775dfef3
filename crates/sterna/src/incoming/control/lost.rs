//! The connection was lost, and the source comes back.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Control;
use crate::error::MigrationError;
use crate::events::Event;

impl Control {
    /// Loading has ended. Makes ready for the source to come back.
    pub(super) fn suspend(&mut self) {
        let shared = Arc::clone(&self.shared);
        let why = shared.take_lost();
        let why = why.map_or_else(|| "the connection was lost".to_owned(), |error| error.to_string());
        shared.tell(&Event::ConnectionLost { why: why.clone() });
        self.lost = Some((Instant::now(), why));
        shared.places.suspend();
        let forgotten = shared.streams.end_load().and_then(|()| shared.target.forget_devices());
        if let Err(error) = forgotten {
            return shared.fail_waiting(error);
        }
        shared.streams.restart();
        shared.begin_again();
        shared.stopping.store(false, Ordering::Release);
        shared.lobby.open();
    }

    /// The source did not come back.
    pub(super) fn not_resumed(&self) -> MigrationError {
        let why = self.lost.as_ref().map_or("the connection was lost", |(_, why)| why).to_owned();
        let (why, window) = (MigrationError::Transport(why, None), self.shared.comeback_limit());
        MigrationError::NotReconnected { why: Arc::new(why), window, last: None }
    }
}
