//! Prepares this side for a source that reconnects after the connection was lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Control;
use crate::error::{Ending, MigrationError};
use crate::events::Event;

impl Control {
    /// Called when loading has ended: opens this side for the source's return.
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
        shared.autostart.end_use();
        shared.begin_again();
        shared.stopping.store(false, Ordering::Release);
        shared.lobby.open();
    }

    /// Discards the state of devices, because the source resumes the guest that it had stopped for this state.
    /// Chunks of streams that were read before the stop are kept.
    fn forget_devices(&self) -> Result<(), MigrationError> {
        let shared = &self.shared;
        let had_come = shared.target.forget_devices()?;
        // On the main channel, all chunks of a stream arrive after the stop.
        if had_come || !shared.capabilities.multifd {
            shared.streams.end_load()?;
            shared.streams.restart();
        } else {
            shared.streams.suspend();
        }
        Ok(())
    }

    /// The error for a source that did not reconnect in time.
    pub(super) fn not_resumed(&self) -> MigrationError {
        let why = self.lost.as_ref().map_or(Ending::Lost, |(_, why)| Ending::LostBecause(why.clone()));
        let (why, window) = (Arc::new(why.into()), self.shared.comeback_limit());
        MigrationError::NotReconnected { why, window, last: None }
    }
}
