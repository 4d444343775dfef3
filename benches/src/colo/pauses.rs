//! The pauses of a guest, from its machine's events.

use std::time::{Duration, Instant};

use sterna_qmp::QmpEvent;

use crate::{Failure, Way};

/// Checkpoints before any is counted.
const WARM_UP: usize = 3;
/// There are no checkpoints if they do not come by then.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is measured.
pub(crate) struct Setting {
    pub(crate) way: Way,
    pub(crate) ram_mib: u64,
    /// 0: the guest is idle.
    pub(crate) pages_per_second: u64,
    pub(crate) delay: Duration,
    /// 0: the main channel alone.
    pub(crate) channels: u8,
    /// `x-sterna-checkpoint-copy`.
    pub(crate) copy: String,
    pub(crate) time: Duration,
}

impl Setting {
    /// What stands in a row.
    pub(crate) fn name(&self) -> String {
        match self.copy.as_str() {
            "auto" => self.way.word().to_owned(),
            copy => format!("{}, {copy}", self.way.word()),
        }
    }
}

/// What came of it.
pub(crate) struct Measured {
    /// Sorted.
    pub(crate) pauses: Vec<Duration>,
    /// From the first of them to the last, by the machine's clock.
    span: Duration,
    /// In that time.
    pub(crate) costs: Costs,
    /// Of the standby's process, the guest's memory included.
    pub(crate) standby_resident_bytes: u64,
}

/// What checkpoints have cost so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Costs {
    /// Pages that were sent.
    pub(crate) pages: u64,
    /// All bytes that were sent.
    pub(crate) bytes: u64,
    /// CPU time of the primary's process, the guest included.
    pub(crate) primary_cpu: Duration,
    /// CPU time of the standby's process.
    pub(crate) standby_cpu: Duration,
}

impl Costs {
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            pages: self.pages.saturating_sub(before.pages),
            bytes: self.bytes.saturating_sub(before.bytes),
            primary_cpu: self.primary_cpu.saturating_sub(before.primary_cpu),
            standby_cpu: self.standby_cpu.saturating_sub(before.standby_cpu),
        }
    }
}

/// Memory of the process, shared memory included.
pub(crate) fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}

impl Measured {
    pub(crate) fn mean(&self) -> Duration {
        self.pauses.iter().sum::<Duration>() / self.pauses.len().max(1) as u32
    }

    /// The pause that so many of a thousand do not exceed.
    pub(crate) fn at_most(&self, per_mille: usize) -> Duration {
        let index = (self.pauses.len().saturating_sub(1) * per_mille).div_ceil(1000);
        self.pauses.get(index).copied().unwrap_or_default()
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.pauses.len().saturating_sub(1) as f64 / self.span.as_secs_f64().max(1e-9)
    }
}

/// Follows a machine's events until that time is over, pauses from STOP to RESUME, and asks for the costs when it begins and ends.
pub(crate) fn follow(
    time: Duration,
    mut next_event: impl FnMut() -> Result<Option<QmpEvent>, Failure>,
    mut costs: impl FnMut() -> Result<Costs, Failure>,
    standby: u32,
) -> Result<Measured, Failure> {
    let began = Instant::now();
    let (mut stopped, mut pauses, mut first, mut count) = (None, Vec::new(), None, 0);
    let mut before = Costs::default();
    loop {
        if began.elapsed() > PATIENCE {
            return Err("there are no checkpoints".to_owned());
        }
        let Some(event) = next_event()? else { continue };
        match event.name.as_str() {
            "STOP" => stopped = Some(event.timestamp),
            "COLO_EXIT" => return Err(format!("the protection ended: {}", event.data)),
            "RESUME" => {
                let Some(stopped) = stopped.take() else { continue };
                count += 1;
                // The first is the seeding's.
                if count <= WARM_UP + 1 {
                    continue;
                }
                if first.is_none() {
                    before = costs()?;
                }
                let span = event.timestamp.saturating_sub(*first.get_or_insert(event.timestamp));
                pauses.push(event.timestamp.saturating_sub(stopped));
                if span >= time {
                    pauses.sort_unstable();
                    let costs = costs()?.since(before);
                    return Ok(Measured {
                        pauses,
                        span,
                        costs,
                        standby_resident_bytes: resident_bytes(standby),
                    });
                }
            }
            _ => {}
        }
    }
}
