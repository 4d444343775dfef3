//! What the workspace's crates above the engine need of its inside: `sterna-opaque` and `sterna-standby`.
//!
//! Hidden from the documentation, because it changes with the engine, in any version. The engine knows neither crate.
//! It calls them through traits that it declares: [`Target`] and [`Follower`] receive a guest, [`GuestSource`] and
//! [`PageReader`] send one, an [`Overseer`] decides when a protected guest may run, and a [`Staging`] keeps the pages
//! of checkpoints.

pub use crate::clock::Clock;
pub use crate::driver::Driver;
pub use crate::identity::nonce;
pub use crate::incoming::WeakIncoming;
pub use crate::incoming::follower::Follower;
pub use crate::incoming::target::{Layout, RamStart, RamStarted, Section, Target};
pub use crate::incoming::vm_target::emptied;
pub use crate::machine_type::flushes_silently;
pub use crate::order::PageRun;
pub use crate::outgoing::guest_source::{GuestSource, PageReader, RamReader};
pub use crate::outgoing::main_stream::MainStream;
#[cfg(feature = "standby")]
pub use crate::outgoing::protection::{
    CheckpointMode, Counts, DeltaCounts, MOST_IN_FLIGHT, Overseer, Pace, Protecting, Staging,
};
pub use crate::pages::{PageSink, RamSink};

/// Devices with a stream of their own.
pub mod streams {
    pub use crate::streams::{
        MOST_CHUNK_BYTES, Streamed, device_of_section, failed_in_parallel, in_parallel,
    };
}

/// Threads and calls of the VMM that may panic.
pub mod threads {
    pub use crate::threads::{
        NewThread, OnThreadStart, ThreadRole, call, caught, copied_in_parts, hooked, in_part, spawn, tried,
    };
}

/// The order and the rate of pages in postcopy, and the destination's answers.
#[cfg(feature = "postcopy")]
pub mod postcopy {
    pub use crate::postcopy::answers::{
        Answer, Answers, DEVICES_PING, HELLO_PING, LISTED_PING, LOADED_PING, PACKAGE_PING,
    };
    pub use crate::postcopy::order::{CHUNK_PAGES, PageOrder};
    pub use crate::postcopy::pace::Pace;
}
