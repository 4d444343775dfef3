//! The configuration of a process guest, and the errors of its creation.

use sterna_ram::{Backing, DirtyError, RamError};

use super::Tracking;
use crate::model::{Acts, Fill, Pattern, WordPlan};

/// Largest number of workers in a guest.
pub const MOST_WORKERS: usize = 256;

/// The configuration of a process guest.
///
/// The fields from `workers` to `seed` describe the guest, and are used only where it boots. The other
/// fields are used on both sides.
#[derive(Debug, Clone)]
pub struct ProcessConfig {
    /// The name in messages and in the monitor.
    pub name: String,
    /// The VM's UUID; must be equal on both sides.
    pub uuid: Option<[u8; 16]>,
    /// Names and sizes in bytes of the RAM blocks, the same on both sides.
    pub blocks: Vec<(String, u64)>,
    /// The backing of RAM.
    pub backing: Backing,
    /// The method that finds the guest's writes.
    pub tracking: Tracking,
    /// The machine's level, which simulates a CPU model. A destination refuses a guest that booted on a
    /// higher level before any RAM is sent.
    pub level: u32,
    /// Steps per second and worker; 0 means no limit.
    pub rate: u64,
    /// The point at which a stop interrupts the workers.
    pub stop_point: StopPoint,
    /// Number of threads, 1 to 256.
    pub workers: usize,
    /// The order in which the workers write pages.
    pub pattern: Pattern,
    /// Pages of each worker's working set, at most its share. `None`: the whole share.
    pub working_set_pages: Option<u64>,
    /// The number of words of a page that a step writes.
    pub words: WordPlan,
    /// The steps that zero pages, by stores or by giving memory back.
    pub acts: Acts,
    /// The content of RAM before the first step.
    pub fill: Fill,
    /// Seed of the random patterns, which differ between guests with different seeds.
    pub seed: u64,
}

impl Default for ProcessConfig {
    /// 64 MiB in two blocks, two workers that sweep at full speed, whole pages, zero fill. Every step
    /// writes words.
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
            acts: Acts::WRITES,
            fill: Fill::Zero,
            seed: 1,
        }
    }
}

/// The point at which a stop interrupts a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopPoint {
    /// Between two steps, so that every page is complete.
    StepBoundary,
    /// Within a page, as a vCPU is stopped between two arbitrary instructions. Some words of a step are
    /// written, and the others after the next start. Seed and step determine the position in the page.
    MidPage,
}

/// The reason why a process guest cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The configuration breaks a rule.
    #[error("process guest: {0}")]
    Config(String),
    /// RAM could not be allocated or written.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The tracking is not available.
    #[error(transparent)]
    Dirty(#[from] DirtyError),
}
