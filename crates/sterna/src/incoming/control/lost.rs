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
        if let Err(error) = self.forget_devices() {
            return shared.fail_waiting(error);
        }
        shared.begin_again();
        shared.stopping.store(false, Ordering::Release);
        shared.lobby.open();
    }

    /// What came of devices is as old as their stop, which the source takes back. Of their streams, what was read before stays.
    fn forget_devices(&self) -> Result<(), MigrationError> {
        let shared = &self.shared;
        let had_come = shared.target.forget_devices()?;
        // On the main channel all of a stream comes after the stop.
        if had_come || !shared.capabilities.multifd {
            shared.streams.end_load()?;
            shared.streams.restart();
        } else {
            shared.streams.suspend();
        }
        Ok(())
    }

    /// The source did not come back.
    pub(super) fn not_resumed(&self) -> MigrationError {
        let why = self.lost.as_ref().map_or("the connection was lost", |(_, why)| why).to_owned();
        let (why, window) = (MigrationError::Transport(why, None), self.shared.comeback_limit());
        MigrationError::NotReconnected { why: Arc::new(why), window, last: None }
    }
}
