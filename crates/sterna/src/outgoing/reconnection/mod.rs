//! Replaces a lost connection, so that precopy continues over a new one (specs/extension.md §13).
//!
//! The control thread asks a [`Reconnection`](interface::Reconnection) at each point at which a migration that may
//! connect again differs. Every other migration has [`Off`](interface::Off). Threads share
//! [`SharedReconnection`](shared::SharedReconnection).

#[cfg(feature = "reconnect")]
mod dialling;
#[cfg(feature = "reconnect")]
mod enabled;
pub(super) mod interface;
#[cfg(feature = "reconnect")]
pub(super) mod shared;
#[cfg(not(feature = "reconnect"))]
#[path = "shared/off.rs"]
pub(super) mod shared;
pub(super) mod watch;

use std::sync::Arc;

use super::shared::Shared;
use crate::params::MigrationMode;
use interface::{Off, Reconnection};

/// Reconnection as an operator has set it for `shared`'s migration.
pub(super) fn of(shared: &Arc<Shared>) -> Box<dyn Reconnection> {
    let params = shared.params();
    let can_dial_again = shared.session.facts.can_reconnect
        && shared.guest.source.is_in_memory()
        && shared.protecting.is_none()
        && params.mode == MigrationMode::Normal;
    match can_dial_again && !params.reconnect_window.is_zero() {
        #[cfg(feature = "reconnect")]
        true => Box::new(enabled::Enabled::new(Arc::clone(shared))),
        _ => Box::new(Off),
    }
}
