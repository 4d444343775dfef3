//! Tests of the relay: its pure machines in simulators, and whole relays over loopback.

mod rate;
mod sessions;
