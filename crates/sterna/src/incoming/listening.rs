//! The addresses where a source may reconnect: the first one, and one that an operator names.

use std::thread::JoinHandle;

use parking_lot::Mutex;
use sterna_proto::destination::Refusal;
use sterna_transport::{Address, CancelFlag};

use crate::settings_error::SettingsError;
use crate::start_error::SystemRefusal;

/// Why no additional address could be bound. Nothing has changed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RecoverError {
    /// The migration is not in a state that needs a recovery.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The source of this migration cannot connect to that address.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The system refused to bind the address.
    #[error(transparent)]
    System(#[from] SystemRefusal),
}

/// The address that an operator has named most recently, with its listener thread.
#[derive(Default)]
pub(super) struct Listening(Mutex<Option<Open>>);

struct Open {
    address: Address,
    cancel: CancelFlag,
    thread: JoinHandle<()>,
}

impl Listening {
    /// The bound address, if there is one.
    pub(super) fn address(&self) -> Option<Address> {
        self.0.lock().as_ref().map(|open| open.address.clone())
    }

    /// Stores a new listener, and ends the previous one.
    pub(super) fn put(&self, address: Address, cancel: CancelFlag, thread: JoinHandle<()>) {
        let before = self.0.lock().replace(Open { address, cancel, thread });
        end(before);
    }

    /// Ends the listener, if there is one.
    pub(super) fn end(&self) {
        let open = self.0.lock().take();
        end(open);
    }
}

fn end(open: Option<Open>) {
    let Some(Open { cancel, thread, .. }) = open else { return };
    cancel.cancel();
    // An observer may drop the last handle on the listener thread itself. That thread cannot join itself, and
    // ends alone.
    if thread.thread().id() != std::thread::current().id() {
        // An error of the join is ignored: a panic in the thread was already reported.
        let _ = thread.join();
    }
}
