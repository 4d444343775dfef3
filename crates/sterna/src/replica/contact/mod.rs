//! Primary and standby in contact (`specs/replica.md`): heartbeats and answers over a connection of their own, and the machines
//! of [`sterna_proto::replica`], which decide who may run the guest.
//!
//! Each side runs its machine by one thread, which performs the machine's actions through [`PrimaryGuest`] or [`StandbyGuest`].
//! What may take long (a claim, a fence, making a checkpoint ready) has a thread of its own meanwhile, so the lease is seen to
//! end in time.

mod arbiter;
mod error;
mod greeting;
mod link;
mod primary;
mod runner;
mod standby;

pub use error::ContactError;
pub(in crate::replica) use greeting::Greeting;
pub use greeting::{Protection, Secret, Terms, new_protection};
pub use primary::{PrimaryContact, PrimaryGuest};
pub use runner::{Claims, ContactState};
pub use standby::{StandbyContact, StandbyGuest};
