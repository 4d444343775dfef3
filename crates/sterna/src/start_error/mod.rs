//! Why a migration cannot start, on either side.

mod image;
mod sharing;
mod system;

use std::sync::Arc;

use sterna_ram::missing_pages::MissingPagesError;
use sterna_ram::{Custody, PoisonedPage};

use crate::error::Cause;
use crate::settings_error::SettingsError;

pub use image::UnusableImage;
pub use sharing::Unsharable;
pub use system::SystemRefusal;

/// Why a migration cannot start. Nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The guest cannot be migrated now: another migration has it, or it is not in this VM.
    #[error("{}", not_free(*.0))]
    Guest(Custody),
    /// Another migration or a measurement tracks the guest's writes.
    #[error(
        "this guest's writes are already tracked, by a migration or a dirty-rate measurement: wait until it ends, or \
         cancel it"
    )]
    Tracked,
    /// A parameter or capability is out of range, or excludes another.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The image to send cannot be restored by any VMM, or not in this way.
    #[error(transparent)]
    Image(#[from] UnusableImage),
    /// The image to send is damaged. `SendOptions::force_damaged` of `sterna-opaque` sends it as it is.
    ///
    /// The error is an `ImageError::Damaged` of `sterna-image`, which names the worst finding.
    #[error("{0}")]
    DamagedImage(#[source] Cause),
    /// Pages of guest RAM have failed, and their content cannot be moved.
    #[error(
        "this guest has failed memory (poisoned): {}. Restart the guest, so that it gets other memory, then migrate it",
        crate::error::name_pages(pages, None)
    )]
    Poisoned {
        /// The failed pages.
        pages: Vec<PoisonedPage>,
    },
    /// The guest's memory cannot be handed to another process of this host.
    #[error("mode cpr-transfer: {0}")]
    NotSharable(#[from] Unsharable),
    /// This side cannot run a guest before its pages are present.
    #[error("postcopy_ram: {0}")]
    Postcopy(#[source] Arc<MissingPagesError>),
    /// The operating system refused a thread, a socket, memory or a file.
    #[error(transparent)]
    System(#[from] SystemRefusal),
}

impl StartError {
    /// The operating system refused a request, of which `error` tells.
    #[doc(hidden)]
    pub fn system(error: impl Into<SystemRefusal>) -> Self {
        Self::System(error.into())
    }
}

/// Why a guest cannot be migrated (or received), and the next step.
fn not_free(custody: Custody) -> &'static str {
    match custody {
        Custody::Free => "no migration involves this VM's guest",
        Custody::Arrived => {
            "a guest has arrived in this VM, and another guest would replace it: use another VM. A VMM that discarded \
             its guest calls GuestRam::has_no_guest"
        }
        Custody::Leaving { .. } => {
            "this VM is already being migrated: cancel that migration, or wait for its end"
        }
        Custody::Undecided => {
            "this VM's guest was handed over, and it is unknown whether the destination runs it: wait for its answer, \
             or end that migration with Migration::decide"
        }
        Custody::Held => {
            "this VM's guest is held, because its last migration failed and could not resume it: fix the cause that \
             the migration names, then call Migration::retry"
        }
        Custody::Saved => {
            "this VM's guest was saved to a file: resume it here with Migration::resume_saved, or load the \
             file elsewhere"
        }
        Custody::Gone => "this VM's guest has migrated to its destination: migrate it from there",
        Custody::Arriving { .. } => {
            "a guest is arriving in this VM: wait for the migration's end (a held guest is started with \
             Incoming::release)"
        }
        Custody::NoGuest => {
            "this VM has no guest, because its incoming migration failed: wait for another. A VMM that booted a new guest \
             calls GuestRam::has_new_guest"
        }
        Custody::Replaced => {
            "the guest's memory was changed while the migration began (GuestRam::with_blocks): start the migration again"
        }
    }
}

#[cfg(test)]
mod tests;
