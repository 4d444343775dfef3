//! Measurements of a migration: lanes count, and the statistics keep values for readers.

mod counters;
mod probe;
pub(super) mod rdma_counts;
mod statistics;
mod throughput;

pub(super) use counters::{Counters, ScanClock};
pub(super) use probe::Probes;
pub(super) use statistics::LiveStatistics;
