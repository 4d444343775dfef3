//! The precopy policy: when to sync, when to publish a round, when to throttle, when to stop the guest.
//!
//! Pure: no I/O, no clock, no threads. The [`Policy`] takes events ([`Input`]: the time, lane counters, sync results,
//! the backlog of devices, settings). It returns the next steps ([`Output`]), and the time of the next call. Three
//! users run the same code:
//!
//! - the engine (`sterna`) performs the outputs;
//! - [`forecast`](crate::forecast) runs it with a modelled guest, before the first byte moves;
//! - its tests run it with seeded guests, and must find planted bugs.
//!
//! # The loop
//! ```text
//!  Sending ──nearly sent──► Sync ──does not fit──► Publish ► RunDry (previous round) ► convergence ─► Sending
//!                             │                       ▲
//!                             └─fits─► RunDry ────────┤ does not fit any more: one more Sync
//!                                                     └─fits─► RequestSwitchover ──refused, wait──► Publish …
//! ```
//! Lanes do not wait for a sync. It begins while they send the end of the present round, early enough to end at the
//! same time. The pages that it finds are the next round, which each lane enters when it has finished. Only when the
//! remaining pages fit the downtime limit, lanes run dry before the switchover is requested.

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

pub use counts::Counts;
pub use downtime::{DowntimeEstimate, FIXED_DOWNTIME, MARGIN, allowed};
pub use input::{
    Answer, Backlog, Begun, Input, Output, RoundProgress, Snapshot, Standstill, StreamsRemaining, SyncResult,
};
pub use meter::{Meter, WINDOW};
pub use pace::{HALF_LIFE, LONGEST, SHOWN_HALF_LIFE};
pub use policy::{Policy, TRIED_PAGES};
pub use recording::Recorded;
pub use recording::Recording;
pub use settings::Settings;

#[cfg(test)]
mod tests;
