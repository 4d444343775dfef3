//! How a migration will go, computed before it begins. Pure: no I/O, no clock, no live VM.
//!
//! # The model
//! A guest dirties pages while a round over its RAM is sent; what it dirtied is the next round. Rounds shrink as
//! long as the channels carry more than the guest dirties *anew* in the same time, which for most guests grows
//! more slowly than time: a page written twice counts once. So the guest is described by how many distinct
//! bytes it dirties in an interval ([`DirtyModel`]), not by one rate.
//!
//! - [`rules`]: closed formulas for a constant rate: which downtime limit is needed, which dirty rate still
//!   converges, by QEMU's way of estimating, by Sterna's, and by physics.
//! - [`dirty`], [`fit`]: the guest, described or measured.
//! - [`DowntimeEstimate`]: whether the remaining pages fit the downtime limit, as the engine decides it.
//! - [`simulate`]: round by round until the remaining pages fit the limit, or until rounds no longer shrink.
//! - [`Forecast`]: that for the expected inputs, and for inputs that are off by [`Inputs::uncertainty`] in
//!   both directions; with [`Advice`] if it would not end.
//! - [`PostcopyForecast`]: what postcopy would do with the same guest.
//!
//! Bandwidth is that of moving bytes, as everywhere in Sterna: time for syncs
//! ([`Inputs::sync`]) is counted apart, and passes while the channels go on.

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
