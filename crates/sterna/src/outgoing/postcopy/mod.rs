//! Postcopy at the source: the guest resumes at the destination, and its pages follow (specs/postcopy.md).
//!
//! From the commit on the guest never runs here again. Its pages do not change any more, and are sent without a
//! copy.
//!
//! The control thread asks a [`Postcopy`](interface::Postcopy) at each point at which postcopy differs. A
//! migration without the capability has [`Off`](interface::Off). Threads share [`SharedPostcopy`](shared::SharedPostcopy).

pub(super) mod background_lanes;
mod enabled;
pub(super) mod interface;
mod package;
mod recovering;
pub(super) mod recovery;
mod sender;
mod sending;
pub(super) mod shared;
mod switching;
mod work;

use std::sync::Arc;

use super::shared::Shared;
use interface::{Off, Postcopy};

/// Postcopy as the capabilities of `shared`'s migration have it.
pub(super) fn of(shared: &Arc<Shared>) -> Box<dyn Postcopy> {
    match shared.capabilities.postcopy_ram {
        true => Box::new(enabled::Enabled::new(Arc::clone(shared))),
        _ => Box::new(Off),
    }
}
