//! What a migration has done so far: counted by lanes, kept for readers.

mod counters;
mod figures;
mod probe;
mod throughput;

pub(super) use counters::{Counters, ScanClock};
pub(super) use figures::Figures;
pub(super) use probe::Probes;
