//! Why a migration cannot begin, on either side.

use sterna_ram::{Custody, PoisonedPage};

use crate::settings_error::SettingsError;

/// Why a migration cannot start. Nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The guest is not free to be migrated: another migration has to do with it, or it is not here.
    #[error("{}", not_free(*.0))]
    Guest(Custody),
    /// The guest's writes are tracked by somebody else.
    #[error(
        "this guest's writes are already tracked, by a migration or a dirty-rate measurement: wait for its \
         end, or cancel it"
    )]
    Tracked,
    /// A parameter or capability makes no sense, or does not go with another.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The image that is to be sent cannot be restored by anybody.
    #[error("{0}")]
    Image(String),
    /// The image that is to be sent is damaged; [`SendOptions::force_damaged`](crate::opaque::SendOptions::force_damaged)
    /// sends it as it is.
    #[error("{0}")]
    DamagedImage(String),
    /// Pages of guest RAM have failed, and what they held cannot be moved.
    #[error(
        "this guest has failed memory (poisoned): {}. Restart it, which gives it other memory, then migrate",
        crate::error::name_pages(pages, None)
    )]
    Poisoned {
        /// Where they are.
        pages: Vec<PoisonedPage>,
    },
    /// The guest's memory cannot be handed to another process of this host.
    #[error("mode cpr-transfer: {0}")]
    NotSharable(String),
    /// This side cannot run a guest before its pages are there.
    #[error("postcopy_ram: {0}")]
    Postcopy(String),
    /// The operating system refused a thread or a socket.
    #[error("{0}")]
    System(String),
}

/// Why a guest cannot be migrated (or another taken in), and what to do first.
fn not_free(custody: Custody) -> &'static str {
    match custody {
        Custody::Free => "no migration involves this VM's guest",
        Custody::Arrived => {
            "a guest has arrived in this VM, and another one would replace it: use another VM. A VMM that discarded its \
             guest calls GuestRam::has_no_guest"
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
