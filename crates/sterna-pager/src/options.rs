//! The settings of a pager.

use std::path::PathBuf;

use crate::working_set::WorkingSet;

/// How fast memory is filled in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FillRate {
    /// As fast as the guests keep nine tenths of their speed: a tenth of one processor, and up to half of one while the host
    /// has an idle processor.
    #[default]
    Adaptive,
    /// At most so many bytes per second, for all guests together.
    BytesPerSecond(u64),
    /// Without a pause, except while faults wait.
    Max,
    /// Only pages that a guest touches are placed, except while an operation needs all of the memory
    /// (`sterna_ram::GuestRam::complete`). The guests need the pager until they end.
    Off,
}

/// One socket, and the number of guests that may connect to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketPlan {
    /// Path of the socket.
    pub path: PathBuf,
    /// Number of guests. The socket is removed when the last one has connected.
    pub guests: u32,
}

/// The settings of a pager.
#[derive(Debug, Clone)]
pub struct PagerOptions {
    /// Most memory for frames of the image, in bytes, for all guests together (default 64 MiB, at least 4 MiB). One frame for
    /// each thread can come on top.
    pub cache_limit_bytes: u64,
    /// How fast memory is filled in the background.
    pub fill: FillRate,
    /// Pages that are filled first; none for those that the image contains.
    pub working_set: Option<WorkingSet>,
    /// Record the touched pages ([`Pager::working_set`](crate::Pager::working_set)).
    pub record: bool,
    /// Threads that answer faults (default: one for each processor, 2 to 8).
    pub fault_threads: usize,
    /// Threads that read frames for faults (default 8).
    pub reader_threads: usize,
}

impl PagerOptions {
    /// The least memory for frames: 4 MiB.
    pub const LEAST_CACHE_BYTES: u64 = 4 << 20;
}

impl Default for PagerOptions {
    fn default() -> Self {
        Self {
            cache_limit_bytes: 64 << 20,
            fill: FillRate::default(),
            working_set: None,
            record: false,
            fault_threads: sterna_ram::processors().clamp(2, 8),
            reader_threads: 8,
        }
    }
}
