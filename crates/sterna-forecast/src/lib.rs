//! Decides how the memory of a running guest is sent before the guest is stopped, and forecasts the course.
//!
//! | module | contains |
//! | --- | --- |
//! | [`precopy`] | the precopy policy: when to sync, when to publish a round, when to throttle, when to stop the guest |
//! | [`forecast`] | runs the policy with a modelled guest, and proposes changes if it does not converge |
//! | [`time_forms`] | reads both JSON forms of durations |
//!
//! Pure: no I/O, no clock, no threads. The engine (`sterna`) performs the policy's outputs, and re-exports
//! [`forecast`].
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod forecast;
mod lane_times;
pub mod precopy;
pub mod time_forms;

pub use lane_times::LaneTimes;

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
