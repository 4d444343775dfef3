//! Interface of every gate that keeps a guest's output by epochs.

use std::time::{Duration, Instant};

use sterna::device_stream::AskCheckpoint;

/// Returns whether output of this epoch (the first is 1) may leave now. Called for every piece at the moment at which
/// it leaves, because this process may have been suspended since the release.
pub type MaySay = Box<dyn Fn(u64) -> bool + Send + Sync>;

/// Keeps a guest's output until its checkpoint is held.
///
/// Except for [`EpochGate::let_out`], no method may wait for the network, or for a reader of the output, because the
/// same thread watches the lease.
pub trait EpochGate: Send + Sync {
    /// Keeps output from now on. The guest is paused; its earlier output leaves.
    fn close(&self, may_say: MaySay);
    /// Ends an epoch. The guest is paused; its output so far belongs to this epoch or an earlier one.
    fn end_epoch(&self, epoch: u64);
    /// Releases output of this epoch and earlier ones.
    fn release(&self, epoch: u64);
    /// Waits, at most `most`, until released output has left. Called once, for the last checkpoint of a planned
    /// takeover. Afterwards this side may send no output.
    fn let_out(&self, most: Duration) {
        let _ = most;
    }
    /// Releases all output, now and later.
    fn open(&self);
    /// Drops waiting output.
    fn drop_output(&self);
    /// Sets `ask`, which any thread calls when the gate reaches its limit. The guest can output more only after a
    /// checkpoint. Called before [`EpochGate::close`].
    fn ask_when_full(&self, ask: AskCheckpoint) {
        drop(ask);
    }
    /// The waiting output, and the number of bytes output before it. A checkpoint carries both, and the standby
    /// repeats the output after a takeover.
    fn unsaid(&self) -> (u64, Vec<u8>) {
        (0, Vec::new())
    }
    /// When the oldest waiting output of the current epoch arrived; `None` if none waits.
    fn waits_since(&self) -> Option<Instant> {
        None
    }
    /// Counters of the gate, now.
    fn statistics(&self) -> GateStatistics {
        GateStatistics::default()
    }
}

/// Counters of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GateStatistics {
    /// Pieces that wait.
    pub waiting: u64,
    /// Bytes of the waiting pieces.
    pub waiting_bytes: u64,
    /// Pieces that have left.
    pub released: u64,
    /// Waiting time of the last piece that left.
    pub last_delay: Duration,
    /// Median waiting time of the last 1024 pieces that left.
    pub delay_p50: Duration,
    /// 99th percentile of these waiting times.
    pub delay_p99: Duration,
}

/// The gate of a guest without output.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoOutput;

impl EpochGate for NoOutput {
    fn close(&self, _: MaySay) {}
    fn end_epoch(&self, _: u64) {}
    fn release(&self, _: u64) {}
    fn open(&self) {}
    fn drop_output(&self) {}
}
