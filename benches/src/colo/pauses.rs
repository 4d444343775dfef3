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
    pub(crate) time: Duration,
}

/// What came of it.
pub(crate) struct Measured {
    /// Sorted.
    pub(crate) pauses: Vec<Duration>,
    /// From the first of them to the last, by QEMU's clock.
    span: Duration,
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

/// Counts pauses, from STOP to RESUME.
pub(crate) struct Pauses {
    time: Duration,
    began: Instant,
    stopped: Option<Duration>,
    count: usize,
    first: Option<Duration>,
    pauses: Vec<Duration>,
}

impl Pauses {
    pub(crate) fn new(time: Duration) -> Self {
        let (stopped, count, first, pauses) = Default::default();
        Self { time, began: Instant::now(), stopped, count, first, pauses }
    }

    /// Gives them when the time is over.
    pub(crate) fn hear(&mut self, event: Option<&QmpEvent>) -> Result<Option<Measured>, Failure> {
        if self.began.elapsed() > PATIENCE {
            return Err("there are no checkpoints".to_owned());
        }
        let Some(event) = event else { return Ok(None) };
        match event.name.as_str() {
            "STOP" => self.stopped = Some(event.timestamp),
            "COLO_EXIT" => return Err(format!("the protection ended: {}", event.data)),
            "RESUME" => {
                let Some(stopped) = self.stopped.take() else { return Ok(None) };
                self.count += 1;
                // The first is the seeding's.
                if self.count > WARM_UP + 1 {
                    self.pauses.push(event.timestamp.saturating_sub(stopped));
                    let span = event.timestamp.saturating_sub(*self.first.get_or_insert(event.timestamp));
                    if span >= self.time {
                        let mut pauses = std::mem::take(&mut self.pauses);
                        pauses.sort_unstable();
                        return Ok(Some(Measured { pauses, span }));
                    }
                }
            }
            _ => {}
        }
        Ok(None)
    }
}
