//! What the threads of a migration know of lost connections and of those that replace them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sterna_ram::GuestRam;
use sterna_transport::Address;

use crate::error::MigrationError;
use crate::order::RoundPages;
use crate::outgoing::postcopy::recovery::Recovery;
use crate::reconnect::Unconfirmed;

/// State for a new session that replaces a lost one.
pub(in crate::outgoing) struct SharedReconnection {
    /// Recovery of a postcopy.
    pub recovery: Recovery,
    /// Pages that were sent and may be lost; set if this side would reconnect.
    unconfirmed: OnceLock<Unconfirmed>,
    /// The destination has promised to wait after a loss.
    is_waited_for: AtomicBool,
    /// The error that broke the connection. The next field: the last attempt's result.
    pub lost: Mutex<Option<MigrationError>>,
    pub last_attempt: Mutex<Option<String>>,
}

impl SharedReconnection {
    pub(in crate::outgoing) fn new(to: Address) -> Self {
        Self {
            recovery: Recovery::new(to),
            unconfirmed: OnceLock::new(),
            is_waited_for: AtomicBool::new(false),
            lost: Mutex::default(),
            last_attempt: Mutex::default(),
        }
    }

    /// Records from now on which pages may be lost.
    pub(in crate::outgoing) fn begin(&self, ram: &GuestRam) {
        let _ = self.unconfirmed.set(Unconfirmed::new(ram));
    }

    /// The pages that may be lost; `None` if this side would not reconnect.
    pub(in crate::outgoing) fn unconfirmed(&self) -> Option<&Unconfirmed> {
        self.unconfirmed.get()
    }

    /// Whether the destination confirms the end of each round.
    pub(in crate::outgoing) fn confirms_rounds(&self) -> bool {
        self.unconfirmed.get().is_some()
    }

    /// Records that no page of `round`, which begins, is confirmed by the destination yet.
    pub(in crate::outgoing) fn begin_round(&self, round: &RoundPages) {
        if let Some(unconfirmed) = self.unconfirmed.get() {
            unconfirmed.begin_round(round.unsent(), round.looks_for_absent());
        }
    }

    /// The destination has read the end of a round.
    pub(in crate::outgoing) fn round_is_confirmed(&self) -> Result<(), MigrationError> {
        self.unconfirmed.get().map_or(Ok(()), Unconfirmed::confirmed)
    }

    /// Records that the destination waits after a loss.
    pub(in crate::outgoing) fn is_promised(&self) {
        self.is_waited_for.store(true, Ordering::Release);
    }

    pub(in crate::outgoing) fn is_waited_for(&self) -> bool {
        self.is_waited_for.load(Ordering::Acquire)
    }
}
