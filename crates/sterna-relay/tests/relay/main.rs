//! Tests of the relay: its pure machines in simulators, and whole relays over loopback.

mod compressed;
mod control;
mod figures;
mod limit;
mod missing;
mod phases;
mod rate;
mod sessions;
mod whole;
