//! What a migration has done so far: counted by lanes, kept for readers.

mod counters;
mod probe;
mod statistics;
mod throughput;

pub(super) use counters::{Counters, ScanClock};
pub(super) use probe::Probes;
pub(super) use statistics::LiveStatistics;
