//! The precopy policy: when to sync, when to publish a round, when to throttle, when to stop the guest.
//!
//! Pure: no I/O, no clock, no threads. The [`Policy`] takes what happened ([`Input`]: the time, lane counters, sync
//! results, devices' backlog, settings) and answers what to do next ([`Output`]), and when to give it the time again. Three
//! users run this same code:
//!
//! - the engine (`outgoing`) performs what it asks for;
//! - [`forecast`](crate::forecast) runs it against a modelled guest, before the first byte moves;
//! - its tests run it against seeded guests, with planted bugs that they must find.
//!
//! # The loop
//! ```text
//!  Sending ──nearly sent──► Sync ──does not fit──► Publish ► RunDry (previous round) ► convergence ─► Sending
//!                             │                       ▲
//!                             └─fits─► RunDry ────────┤ does not fit any more: one more Sync
//!                                                     └─fits─► RequestSwitchover ──refused, wait──► Publish …
//! ```
//! Lanes do not wait for a sync. It begins while they send the end of the running round, early enough to end when they
//! do. What it finds is the next round, which they enter as they finish. Only when the remaining pages
//! fit the downtime limit do lanes run dry before the switchover is requested.

mod convergence;
mod costs;
mod counts;
mod downtime;
mod input;
mod meter;
mod pace;
mod policy;
mod recording;
mod settings;

pub(crate) use counts::Counts;
pub use downtime::{DowntimeEstimate, FIXED_DOWNTIME, MARGIN, allowed};
pub(crate) use input::{
    Answer, Backlog, Begun, Input, Output, RoundProgress, Snapshot, Standstill, StreamsRemaining, SyncResult,
};
pub(crate) use meter::{Meter, WINDOW};
pub(crate) use pace::{HALF_LIFE, LONGEST, SHOWN_HALF_LIFE};
pub(crate) use policy::Policy;
pub(crate) use recording::Recorded;
pub use recording::Recording;
pub(crate) use settings::Settings;

#[cfg(test)]
mod tests;
