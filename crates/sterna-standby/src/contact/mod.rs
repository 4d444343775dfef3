//! Contact between primary and standby (`specs/replica.md`): heartbeats and answers over a separate connection. The
//! machines of [`sterna_proto::replica`] decide which side may run the guest.
//!
//! On each side, one thread runs the machine and performs its actions through [`PrimaryGuest`] or [`StandbyGuest`].
//! Some actions may take long: a claim, a fence, preparing a checkpoint. They run in their own threads, so that the
//! end of the lease is noticed in time.

mod arbiter;
mod error;
mod greeting;
mod link;
mod primary;
mod runner;
mod standby;
#[cfg(test)]
mod tests;
mod watchdog;

pub use error::ContactError;
pub(crate) use greeting::Greeting;
pub use greeting::{Protection, Secret, Terms, new_protection};
pub use primary::{PrimaryContact, PrimaryGuest};
pub use runner::{Claims, ContactState};
pub use standby::{StandbyContact, StandbyGuest};
pub use watchdog::Watchdog;
