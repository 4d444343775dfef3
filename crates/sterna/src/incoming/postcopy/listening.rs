//! Where a source is waited for that comes back: the first address, and one that an operator names.

use std::thread::JoinHandle;

use parking_lot::Mutex;
use sterna_proto::destination::Refusal;
use sterna_transport::{Address, CancelFlag};

use crate::settings_error::SettingsError;

/// Why no other address is listened at. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecoverError {
    /// There is nothing to recover.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No source of its can come to that address.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The address cannot be bound.
    #[error("{0}")]
    System(String),
}

/// The address that an operator has named last.
#[derive(Default)]
pub(in crate::incoming) struct Listening(Mutex<Option<Open>>);

struct Open {
    address: Address,
    cancel: CancelFlag,
    thread: JoinHandle<()>,
}

impl Listening {
    /// Where it is.
    pub(in crate::incoming) fn address(&self) -> Option<Address> {
        self.0.lock().as_ref().map(|open| open.address.clone())
    }

    /// From now on this one is listened at.
    pub(in crate::incoming) fn put(&self, address: Address, cancel: CancelFlag, thread: JoinHandle<()>) {
        let before = self.0.lock().replace(Open { address, cancel, thread });
        end(before);
    }

    /// None any more.
    pub(in crate::incoming) fn end(&self) {
        let open = self.0.lock().take();
        end(open);
    }
}

fn end(open: Option<Open>) {
    let Some(Open { cancel, thread, .. }) = open else { return };
    cancel.cancel();
    // An observer may drop the last handle on that very thread, which then ends by itself.
    if thread.thread().id() != std::thread::current().id() {
        // One that panicked has said so.
        let _ = thread.join();
    }
}
