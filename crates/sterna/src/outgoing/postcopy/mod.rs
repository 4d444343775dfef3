//! Postcopy at the source: the guest resumes at the destination, and its pages follow (specs/postcopy.md).
//!
//! From the commit on the guest never runs here again. Its pages do not change any more, and are sent without a
//! copy.
//!
//! The control thread asks a [`Postcopy`](interface::Postcopy) at each point at which postcopy differs. A
//! migration without the capability has [`Off`](interface::Off). Threads share [`SharedPostcopy`](shared::SharedPostcopy).

pub(super) mod background_lanes;
#[cfg(feature = "postcopy")]
mod enabled;
pub(super) mod interface;
#[cfg(feature = "postcopy")]
mod package;
#[cfg(feature = "postcopy")]
mod recovering;
pub(super) mod recovery;
#[cfg(feature = "postcopy")]
mod sender;
#[cfg(feature = "postcopy")]
mod sending;
pub(super) mod shared;
#[cfg(feature = "postcopy")]
mod switching;
mod work;

use std::sync::Arc;

use super::shared::Shared;
use interface::{Off, Postcopy};

/// Postcopy as the capabilities of `shared`'s migration have it.
pub(super) fn of(shared: &Arc<Shared>) -> Box<dyn Postcopy> {
    match shared.capabilities.postcopy_ram {
        #[cfg(feature = "postcopy")]
        true => Box::new(enabled::Enabled::new(Arc::clone(shared))),
        _ => Box::new(Off),
    }
}
