//! Why a migration cannot begin, on either side.

use sterna_ram::{Custody, PoisonedPage};

/// Why a migration cannot start. Nothing was changed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The guest is not free to be migrated: another migration has to do with it, or it is not here.
    #[error("{}", not_free(*.0))]
    Guest(Custody),
    /// The guest's writes are tracked by somebody else.
    #[error(
        "this guest's writes are tracked already, by a migration or by a measurement of its dirty rate: wait for its \
         end, or cancel it"
    )]
    Tracked,
    /// A parameter or capability makes no sense, or does not go with another.
    #[error("{0}")]
    Settings(String),
    /// The image that is to be sent cannot be restored by anybody.
    #[error("{0}")]
    Image(String),
    /// The image that is to be sent is damaged; [`SendOptions::force_damaged`](crate::foreign::SendOptions::force_damaged)
    /// sends it as it is.
    #[error("{0}")]
    DamagedImage(String),
    /// Pages of guest RAM have failed, and what they held cannot be moved.
    #[error(
        "this guest has memory that has failed (poisoned): {}. Restart it, which gives it other memory, then migrate",
        crate::error::name_pages(pages, None)
    )]
    Poisoned {
        /// Where they are.
        pages: Vec<PoisonedPage>,
    },
    /// The operating system refused a thread or a socket.
    #[error("{0}")]
    System(String),
}

/// Why a guest cannot be migrated (or another taken in), and what to do first.
fn not_free(custody: Custody) -> &'static str {
    match custody {
        Custody::Free => "no migration has to do with this VM's guest",
        Custody::Arrived => {
            "a migration has brought a guest into this VM, and another would take its place: use another VM; a VMM that \
             has discarded its guest says so with GuestRam::has_no_guest"
        }
        Custody::Leaving { .. } => {
            "this VM is being migrated already: cancel that migration, or wait for its end"
        }
        Custody::Undecided => {
            "this VM's guest was handed over and nobody knows yet whether the destination runs it: wait for its answer, \
             or end that migration with Migration::decide"
        }
        Custody::Held => {
            "this VM's guest is held stopped, since its last migration could not give it back: mend what that one \
             names, then bring the guest back with Migration::retry"
        }
        Custody::Saved => {
            "this VM's guest was saved to a file: let it run on here with Migration::resume_saved first, or load the \
             file elsewhere"
        }
        Custody::Gone => "this VM's guest has moved to its destination: migrate it from there",
        Custody::Arriving { .. } => {
            "a migration brings a guest into this VM: wait for its end (a guest that is held is started with \
             Incoming::release)"
        }
        Custody::NoGuest => {
            "this VM has no guest, since the migration that was to bring it has failed: wait for another; a VMM that has \
             booted a new one says so with GuestRam::has_new_guest"
        }
        Custody::Replaced => {
            "the guest's memory was changed while the migration began (GuestRam::with_blocks): start the migration again"
        }
    }
}
