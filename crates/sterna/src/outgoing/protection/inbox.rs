//! What the standby says after the seeding (`specs/colo.md §2`), from the thread that reads it to the one that waits for it.

use std::collections::VecDeque;

use parking_lot::Mutex;
use sterna_wire::colo::{Message, MessageKind};

use crate::error::MigrationError;

/// More than a standby that keeps to the order ever says unheard.
const MOST: usize = 16;

/// Messages that were read and not heard yet.
#[derive(Default)]
pub(crate) struct Inbox(Mutex<State>);

#[derive(Default)]
struct State {
    messages: VecDeque<MessageKind>,
    error: Option<MigrationError>,
}

impl Inbox {
    /// A message was read.
    pub(crate) fn push(&self, message: &Message) -> Result<(), MigrationError> {
        let mut state = self.0.lock();
        if state.messages.len() >= MOST {
            let what = format!("the standby said {MOST} messages that were not due");
            return Err(MigrationError::PeerMisbehaved { what });
        }
        state.messages.push_back(message.kind());
        Ok(())
    }

    /// Nothing more comes. The first reason counts.
    pub(crate) fn fail(&self, error: MigrationError) {
        self.0.lock().error.get_or_insert(error);
    }

    /// Takes the next message, which has to be `due`; `None` if there is none yet.
    ///
    /// # Errors
    /// Another one came, or nothing more comes.
    pub(crate) fn take(&self, due: MessageKind) -> Option<Result<(), MigrationError>> {
        let mut state = self.0.lock();
        match state.messages.pop_front() {
            Some(came) if came == due => Some(Ok(())),
            Some(came) => {
                let what = format!("the standby said {came}, and {due} was due (specs/colo.md §3)");
                Some(Err(MigrationError::PeerMisbehaved { what }))
            }
            None => state.error.clone().map(Err),
        }
    }

    /// Whether there is something to take, or nothing more comes.
    pub(crate) fn has_news(&self) -> bool {
        let state = self.0.lock();
        !state.messages.is_empty() || state.error.is_some()
    }

    /// Why nothing more comes, if that is so.
    pub(crate) fn error(&self) -> Option<MigrationError> {
        self.0.lock().error.clone()
    }
}
