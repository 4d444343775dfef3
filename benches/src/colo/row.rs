//! The rows of results: of a cell, or of takeovers.

use std::time::Duration;

use serde_json::{Value, json};

use crate::copy;
use crate::pauses::{Measured, Times};
use crate::plan::{Cell, Load, Pair};
use crate::recovery::{Decision, Takeovers};

/// A row of results; times in ms. `None`: not measured, or not reported by any program.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) pair: Pair,
    pub(crate) mode: String,
    pub(crate) channels: u8,
    pub(crate) load: Load,
    pub(crate) delay_ms: f64,
    pub(crate) ram_bytes: u64,
    pub(crate) cell: Option<Figures>,
    pub(crate) recovery: Option<Spread>,
    pub(crate) decision: Option<Decision>,
    /// Of a planned takeover: bytes that arrived between request and decision.
    pub(crate) came_bytes: Option<u64>,
}

/// Results of a cell.
#[derive(Debug, Clone)]
pub(crate) struct Figures {
    pub(crate) checkpoints: usize,
    pub(crate) per_second: f64,
    pub(crate) pause: Spread,
    pub(crate) transfer: Option<Spread>,
    pub(crate) bytes_per_checkpoint: Option<f64>,
    /// Pages of a checkpoint, in bytes.
    pub(crate) dirty_bytes: Option<f64>,
    /// Percentiles p50 and p99, in ms.
    pub(crate) output_delay: Option<[f64; 2]>,
    pub(crate) guest_rate: Option<f64>,
    /// The pause as the guest measures it: median and maximum of its longest times between two pages. As many
    /// times count as there were checkpoints.
    pub(crate) guest_gap: Option<[f64; 2]>,
    pub(crate) standby_resident_bytes: u64,
    /// CPU time in the time of these checkpoints.
    pub(crate) primary_cpu_s: f64,
    pub(crate) standby_cpu_s: f64,
    /// Time of a plain copy of as many pages.
    pub(crate) copy_ms: Option<f64>,
}

/// A distribution, in ms.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spread {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Spread {
    fn of(times: &Times) -> Self {
        let at = |per_mille| ms(times.at_most(per_mille));
        Self { mean: ms(times.mean()), p50: at(500), p99: at(990), p999: at(999) }
    }

    fn value(&self) -> Value {
        json!({"mean": self.mean, "p50": self.p50, "p99": self.p99, "p999": self.p999})
    }
}

impl Row {
    fn new(cell: &Cell) -> Self {
        Self {
            pair: cell.pair,
            mode: cell.mode.clone(),
            channels: cell.channels,
            load: cell.load,
            delay_ms: ms(cell.delay),
            ram_bytes: cell.ram_mib << 20,
            cell: None,
            recovery: None,
            decision: None,
            came_bytes: None,
        }
    }

    pub(crate) fn of(cell: &Cell, measured: &Measured) -> Self {
        Self { cell: Some(Figures::of(cell, measured)), ..Self::new(cell) }
    }

    pub(crate) fn of_takeovers(cell: &Cell, takeovers: &Takeovers) -> Self {
        Self {
            recovery: Some(Spread::of(&takeovers.times)),
            decision: takeovers.decision,
            came_bytes: Some(takeovers.came_bytes).filter(|bytes| *bytes > 0),
            ..Self::new(cell)
        }
    }

    /// Time until the standby decides by itself: lease plus margin.
    pub(crate) fn patience_ms(&self) -> Option<f64> {
        match self.decision {
            Some(Decision::Patience(patience)) => Some(ms(patience)),
            _ => None,
        }
    }

    pub(crate) fn is_planned(&self) -> bool {
        matches!(self.decision, Some(Decision::LastCheckpoint))
    }

    /// The row as a value for `--json`.
    pub(crate) fn value(&self) -> Value {
        let cell = self.cell.as_ref();
        let delays = cell.and_then(|cell| cell.output_delay);
        let gaps = cell.and_then(|cell| cell.guest_gap);
        json!({
            "pair": self.pair.word(),
            "channels": self.channels,
            "mode": self.mode,
            "load": self.load.word(),
            "delay_ms": self.delay_ms,
            "checkpoints": cell.map(|cell| cell.checkpoints),
            "per_second": cell.map(|cell| cell.per_second),
            "pause_ms": cell.map(|cell| cell.pause.value()),
            "transfer_ms": cell.and_then(|cell| cell.transfer).map(|times| times.value()),
            "bytes_per_checkpoint": cell.and_then(|cell| cell.bytes_per_checkpoint),
            "dirty_bytes": cell.and_then(|cell| cell.dirty_bytes),
            "output_delay_ms": delays.map(|[p50, p99]| json!({"p50": p50, "p99": p99})),
            "guest_rate": cell.and_then(|cell| cell.guest_rate),
            "guest_gap_ms": gaps.map(|[p50, most]| json!({"p50": p50, "most": most})),
            "recovery_ms": self.recovery.map(|times| times.p50),
            "decision_ms": self.patience_ms(),
            "is_planned": self.recovery.map(|_| self.is_planned()),
            "came_bytes": self.came_bytes,
            "standby_resident_bytes": cell.map(|cell| cell.standby_resident_bytes),
            "primary_cpu_s": cell.map(|cell| cell.primary_cpu_s),
            "standby_cpu_s": cell.map(|cell| cell.standby_cpu_s),
            "plain_copy_ms": cell.and_then(|cell| cell.copy_ms),
        })
    }
}

impl Figures {
    fn of(cell: &Cell, measured: &Measured) -> Self {
        let (costs, each) = (&measured.costs, measured.checkpoints().max(1) as f64);
        let pages = costs.sent.map(|(pages, _)| pages as f64 / each);
        let others = measured.checkpoints().saturating_sub(1) as u64;
        let gaps = costs.gaps.as_ref().filter(|gaps| gaps.pages() > others);
        Self {
            checkpoints: measured.checkpoints(),
            per_second: measured.per_second(),
            pause: Spread::of(&measured.pauses),
            transfer: measured.transfers.as_ref().map(Spread::of),
            bytes_per_checkpoint: costs.sent.map(|(_, bytes)| bytes as f64 / each),
            dirty_bytes: pages.map(|pages| pages * 4096.0),
            output_delay: measured.output_delay.map(|delays| delays.map(ms)),
            guest_rate: measured.guest_rate(),
            guest_gap: gaps.map(|gaps| [gaps.longest_but(others / 2), gaps.longest_but(0)].map(ms)),
            standby_resident_bytes: measured.standby_resident_bytes,
            primary_cpu_s: costs.primary_cpu.as_secs_f64(),
            standby_cpu_s: costs.standby_cpu.as_secs_f64(),
            copy_ms: pages
                .filter(|_| cell.pair == Pair::SternaSterna)
                .map(|pages| ms(copy::median(pages as u64))),
        }
    }

    pub(crate) fn primary_cpu_ms_each(&self) -> f64 {
        self.primary_cpu_s * 1e3 / self.checkpoints.max(1) as f64
    }

    pub(crate) fn standby_cpu_ms_each(&self) -> f64 {
        self.standby_cpu_s * 1e3 / self.checkpoints.max(1) as f64
    }
}
