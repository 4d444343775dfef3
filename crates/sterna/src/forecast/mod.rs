//! How a migration will go, computed before it begins. Pure: no I/O, no clock, no live VM.
//!
//! # The model
//! A guest dirties pages while a pass over its RAM is sent; what it dirtied is the next pass. Passes shrink as
//! long as the channels carry more than the guest dirties *anew* in the same time, which for most guests grows
//! more slowly than time: a page written twice counts once. So the guest is described by how many distinct
//! bytes it dirties in an interval ([`DirtyModel`]), not by one rate.
//!
//! - [`rules`]: closed formulas for a constant rate: which downtime limit is needed, which dirty rate still
//!   converges, by QEMU's way of estimating, by Sterna's, and by physics.
//! - [`dirty`], [`fit`]: the guest, described or measured.
//! - [`Pause`]: whether the rest fits the pause, as the engine decides it.
//! - [`simulate`]: pass by pass until the rest fits the limit, or until passes no longer shrink.
//! - [`Forecast`]: that for the expected figures, and for figures that are off by [`Inputs::uncertainty`] in
//!   both directions; with [`Advice`] where it would not end.
//!
//! Bandwidth is that of moving bytes, as everywhere in Sterna: time that goes into looking for dirty pages
//! ([`Inputs::sync`]) is counted apart, and happens while the channels carry on.

mod advice;
mod class;
pub mod dirty;
pub mod fit;
mod inputs;
mod outlook;
pub mod rules;
mod seconds;
pub mod simulate;

pub use crate::precopy::{FIXED_PAUSE, MARGIN, Pause};
pub use advice::Advice;
pub use class::{Class, Order, Point};
pub use dirty::DirtyModel;
pub use inputs::{Fixed, Inputs, UNCERTAINTY};
pub use outlook::{Forecast, Range};
pub use simulate::{Luck, PlannedRound, Run, Walk};

#[cfg(test)]
mod tests;
