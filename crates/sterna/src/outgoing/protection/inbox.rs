//! Messages of the standby after the seeding (`specs/colo.md §2`).
//!
//! One thread reads them, and another one waits for them.

use std::collections::VecDeque;

use parking_lot::Mutex;
use sterna_wire::colo::{Message, MessageKind};

use crate::error::{BadProtection, MigrationError};

/// Limit of unread messages. A standby that keeps to the protocol's order never sends so many in advance.
const MOST: usize = 16;

/// Messages that were received, and that no thread has taken yet.
#[derive(Default)]
pub(crate) struct Inbox(Mutex<State>);

#[derive(Default)]
struct State {
    messages: VecDeque<MessageKind>,
    error: Option<MigrationError>,
}

impl Inbox {
    /// Adds a received message.
    pub(crate) fn push(&self, message: &Message) -> Result<(), MigrationError> {
        let mut state = self.0.lock();
        if state.messages.len() >= MOST {
            return Err(BadProtection::TooManyMessages { most: MOST }.into());
        }
        state.messages.push_back(message.kind());
        Ok(())
    }

    /// Ends the inbox: no message follows. The first error is kept.
    pub(crate) fn fail(&self, error: MigrationError) {
        self.0.lock().error.get_or_insert(error);
    }

    /// Takes the next message, which must be `due`; `None` if there is none yet.
    ///
    /// # Errors
    /// The next message is another one, or no message follows because the connection failed.
    pub(crate) fn take(&self, due: MessageKind) -> Option<Result<(), MigrationError>> {
        let mut state = self.0.lock();
        match state.messages.pop_front() {
            Some(came) if came == due => Some(Ok(())),
            Some(came) => Some(Err(BadProtection::OtherMessage { came, due }.into())),
            None => state.error.clone().map(Err),
        }
    }

    /// Whether a message waits, or no message follows any more.
    pub(crate) fn has_news(&self) -> bool {
        let state = self.0.lock();
        !state.messages.is_empty() || state.error.is_some()
    }

    /// The error because of which no message follows.
    pub(crate) fn error(&self) -> Option<MigrationError> {
        self.0.lock().error.clone()
    }
}
