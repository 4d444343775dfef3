//! What a process guest is made from.

use sterna_ram::{Backing, DirtyError, RamError};

use super::Tracking;
use crate::model::{Fill, Pattern, WordPlan};

/// Most workers that a guest may have.
pub const MOST_WORKERS: usize = 256;

/// What a process guest is made from. Fields that say what the guest does (workers to seed) are looked at
/// only where it boots; the others on both sides.
#[derive(Debug, Clone)]
pub struct ProcessConfig {
    /// For messages and the monitor.
    pub name: String,
    /// The VM's UUID; must be equal on both sides.
    pub uuid: Option<[u8; 16]>,
    /// RAM: names and bytes of the blocks, the same on both sides.
    pub blocks: Vec<(String, u64)>,
    /// What RAM is made of.
    pub backing: Backing,
    /// How writes are found.
    pub tracking: Tracking,
    /// The machine's level: a guest that booted on a level above the destination's is refused there
    /// before any RAM moves. Stands for a CPU model.
    pub level: u32,
    /// Steps per second and worker; 0: as many as it can.
    pub rate: u64,
    /// Where a stop stops the workers.
    pub stop_point: StopPoint,
    /// Threads, 1 to 256.
    pub workers: usize,
    /// The order in which pages are written.
    pub pattern: Pattern,
    /// Pages of each worker's working set; None: its whole share. More than the share: the share.
    pub working_set_pages: Option<u64>,
    /// How many words of a page a step writes.
    pub words: WordPlan,
    /// What RAM holds before.
    pub fill: Fill,
    /// Tells one guest's random patterns from another's.
    pub seed: u64,
}

impl Default for ProcessConfig {
    /// 64 MiB in two blocks, two workers that sweep at full speed, whole pages, zero fill.
    fn default() -> Self {
        Self {
            name: "process".into(),
            uuid: None,
            blocks: vec![("ram.low".into(), 48 << 20), ("ram.high".into(), 16 << 20)],
            backing: Backing::Memfd,
            tracking: Tracking::Automatic,
            level: 1,
            rate: 0,
            stop_point: StopPoint::StepBoundary,
            workers: 2,
            pattern: Pattern::Sequential,
            working_set_pages: None,
            words: WordPlan::FULL,
            fill: Fill::Zero,
            seed: 1,
        }
    }
}

/// Where a stop finds the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopPoint {
    /// Between two steps.
    StepBoundary,
    /// Within a page: some of a step's words are written, the rest after the next start. As a vCPU, which
    /// is stopped between any two instructions. Where in the page is derived from seed and step.
    MidPage,
}

/// Why there is no process guest.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The configuration breaks a rule.
    #[error("process guest: {0}")]
    Config(String),
    /// RAM cannot be had or written.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// Tracking cannot be had.
    #[error(transparent)]
    Dirty(#[from] DirtyError),
}
