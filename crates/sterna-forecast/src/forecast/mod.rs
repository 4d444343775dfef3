//! Computes how a migration will go, before it begins. Pure: no I/O, no clock, no live VM.
//!
//! # The model
//! A guest dirties pages while a round over its RAM is sent. These pages are the next round. Rounds shrink as long as
//! the channels send more pages than the guest dirties for the first time since the last sync. For most guests this
//! number grows more slowly than time, because a page written twice counts once. So the guest is described by the
//! distinct bytes that it dirties in an interval ([`DirtyModel`]), not by one rate.
//!
//! - [`rules`]: closed formulas for a constant rate: the downtime limit that is needed, and the dirty rate that still
//!   converges, by QEMU's estimate, by Sterna's, and by physics.
//! - [`dirty`], [`fit`]: the guest, described or measured.
//! - [`DowntimeEstimate`]: the engine's decision whether the remaining pages fit the downtime limit.
//! - [`simulate`]: round by round until the remaining pages fit the limit, or until rounds no longer shrink.
//! - [`Forecast`]: simulations with the expected inputs, and with inputs that are off by [`Inputs::uncertainty`] in
//!   both directions. If the migration would not end, with [`Advice`].
//! - [`PostcopyForecast`]: the effect of postcopy on the same guest.
//!
//! Bandwidth is bytes per time in which bytes move, as everywhere in Sterna. The time of syncs ([`Inputs::sync`]) is
//! counted separately, and the channels continue to send during a sync.

mod advice;
mod class;
pub mod dirty;
pub mod fit;
mod inputs;
mod outlook;
mod postcopy;
mod range;
pub mod rules;
mod seconds;
pub mod simulate;

pub use crate::precopy::{DowntimeEstimate, FIXED_DOWNTIME, MARGIN};
pub use advice::Advice;
pub use class::{Class, Order, Point};
pub use dirty::DirtyModel;
pub use inputs::{Fixed, Inputs, PostcopyInputs, UNCERTAINTY};
pub use outlook::Forecast;
pub use postcopy::{POSTCOPY_ASSUMPTIONS, PostcopyForecast, SwitchReason};
pub use range::Range;
pub use simulate::{Luck, PlannedRound, Run, Walk};

#[cfg(test)]
mod tests;
