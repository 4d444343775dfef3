//! Measures a guest's pauses from its machine's events, and the costs of checkpoints.

use std::time::{Duration, Instant};

use sterna_benches::words::Gaps;
use sterna_qmp::QmpEvent;

use crate::Failure;

/// Number of checkpoints before the first one that counts.
const WARM_UP: usize = 3;
/// Time limit of a cell. A timeout means that no checkpoints are taken.
const PATIENCE: Duration = Duration::from_secs(120);

/// Results of a cell.
pub(crate) struct Measured {
    pub(crate) pauses: Times,
    /// From the end of the pause until the checkpoint was held. With QEMU, the guest stays paused meanwhile,
    /// and the time starts at the request. `None` if no program reports it.
    pub(crate) transfers: Option<Times>,
    /// From the first pause that counts to the last, by the machine's clock.
    span: Duration,
    /// Costs in that time.
    pub(crate) costs: Costs,
    /// Resident memory of the standby's process, including the guest's.
    pub(crate) standby_resident_bytes: u64,
    /// Delay of the guest's output: median and 99th percentile.
    pub(crate) output_delay: Option<[Duration; 2]>,
}

/// Durations, in ascending order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Times(Vec<Duration>);

/// Costs of the checkpoints so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Costs {
    /// Pages and total bytes that were sent. `None` if no program counts them.
    pub(crate) sent: Option<(u64, u64)>,
    /// CPU time of the primary's processes, including the guest.
    pub(crate) primary_cpu: Duration,
    /// CPU time of the standby's process.
    pub(crate) standby_cpu: Duration,
    /// Work of the guest. `None` for a guest that does not count.
    pub(crate) gaps: Option<Gaps>,
}

/// The measured values of a primary that is followed.
pub(crate) trait Watched {
    fn next_event(&mut self) -> Result<Option<QmpEvent>, Failure>;
    fn costs(&mut self) -> Result<Costs, Failure>;
    /// Transfer time of the last held checkpoint, if a program reports it.
    fn transfer(&mut self) -> Result<Option<Duration>, Failure>;
    fn output_delay(&mut self) -> Result<Option<[Duration; 2]>, Failure>;
    /// Process number of the standby.
    fn standby(&self) -> u32;
}

impl Costs {
    fn since(self, before: &Self) -> Self {
        let sent = self.sent.zip(before.sent);
        Self {
            sent: sent.map(|(now, before)| (now.0.saturating_sub(before.0), now.1.saturating_sub(before.1))),
            primary_cpu: self.primary_cpu.saturating_sub(before.primary_cpu),
            standby_cpu: self.standby_cpu.saturating_sub(before.standby_cpu),
            gaps: self.gaps.zip(before.gaps.as_ref()).map(|(now, before)| now.since(before)),
        }
    }
}

impl Times {
    pub(crate) fn new(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self(times)
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn mean(&self) -> Duration {
        self.0.iter().sum::<Duration>() / self.count().max(1) as u32
    }

    /// The percentile, in thousandths.
    pub(crate) fn at_most(&self, per_mille: usize) -> Duration {
        let index = (self.count().saturating_sub(1) * per_mille).div_ceil(1000);
        self.0.get(index).copied().unwrap_or_default()
    }
}

impl Measured {
    pub(crate) fn checkpoints(&self) -> usize {
        self.pauses.count()
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.checkpoints().saturating_sub(1) as f64 / self.span.as_secs_f64().max(1e-9)
    }

    /// Pages per second that the guest has written.
    pub(crate) fn guest_rate(&self) -> Option<f64> {
        let gaps = self.costs.gaps.as_ref()?;
        Some(gaps.pages() as f64 / self.span.as_secs_f64().max(1e-9))
    }
}

/// Follows a machine's events for `time`. A pause lasts from STOP to RESUME.
pub(crate) fn follow(time: Duration, watched: &mut impl Watched) -> Result<Measured, Failure> {
    let began = Instant::now();
    let (mut stopped, mut pauses, mut transfers, mut first, mut count) =
        (None, Vec::new(), Vec::new(), None, 0);
    let mut before = Costs::default();
    loop {
        if began.elapsed() > PATIENCE {
            return Err("there are no checkpoints".to_owned());
        }
        let Some(event) = watched.next_event()? else { continue };
        match event.name.as_str() {
            "STOP" => stopped = Some(event.timestamp),
            "COLO_EXIT" => return Err(format!("the protection ended: {}", event.data)),
            "RESUME" => {
                let Some(stopped) = stopped.take() else { continue };
                count += 1;
                // The first pause is the seeding's.
                if count <= WARM_UP + 1 {
                    continue;
                }
                transfers.extend(watched.transfer()?);
                if first.is_none() {
                    before = watched.costs()?;
                }
                let span = event.timestamp.saturating_sub(*first.get_or_insert(event.timestamp));
                pauses.push(event.timestamp.saturating_sub(stopped));
                if span >= time {
                    return Ok(Measured {
                        pauses: Times::new(pauses),
                        transfers: (!transfers.is_empty()).then(|| Times::new(transfers)),
                        span,
                        costs: watched.costs()?.since(&before),
                        standby_resident_bytes: resident_bytes(watched.standby()),
                        output_delay: watched.output_delay()?,
                    });
                }
            }
            _ => {}
        }
    }
}

/// Resident memory of the process in bytes, including shared memory.
fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}
