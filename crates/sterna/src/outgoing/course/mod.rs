//! The purpose of a migration: to move the guest, or to seed a standby.
//!
//! The control thread asks a [`Course`](interface::Course) at the points where the two differ.

pub(super) mod choice;
mod handover;
pub(super) mod interface;
