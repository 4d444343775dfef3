//! What holds output by epochs, whatever it is.

use std::time::{Duration, Instant};

use crate::device_stream::AskCheckpoint;

/// Whether output of this epoch (the first is 1) may leave, now. Asked for every piece at the moment at which it leaves: this process may
/// have stood still since it was released.
pub type MaySay = Box<dyn Fn(u64) -> bool + Send + Sync>;

/// Holds what a guest says. No method but [`EpochGate::let_out`] may wait for the network, or for whoever reads the
/// output: the lease is watched by the same thread.
pub trait EpochGate: Send + Sync {
    /// Holds output from now on. The guest stands: what it has said before leaves.
    fn close(&self, may_say: MaySay);
    /// An epoch ends. The guest stands: what it has said so far is in this epoch or an earlier one.
    fn end_epoch(&self, epoch: u64);
    /// Output of this epoch and earlier ones may leave.
    fn release(&self, epoch: u64);
    /// Waits until what was released has left, no longer than `most`. Called once, for the last checkpoint of a planned takeover: after it
    /// this side may say nothing.
    fn let_out(&self, most: Duration) {
        let _ = most;
    }
    /// Everything may leave, now and later.
    fn open(&self);
    /// Forgets what waits.
    fn drop_output(&self);
    /// Calls `ask`, from any thread, when as much waits as may: the guest cannot say more before a checkpoint lets it go. Called before
    /// [`EpochGate::close`].
    fn ask_when_full(&self, ask: AskCheckpoint) {
        drop(ask);
    }
    /// What waits, and how many bytes the guest had said before. A checkpoint carries it, and the side that goes on says it again.
    fn unsaid(&self) -> (u64, Vec<u8>) {
        (0, Vec::new())
    }
    /// Since when the oldest of what was said in the running epoch waits; none: nothing does.
    fn waits_since(&self) -> Option<Instant> {
        None
    }
    /// What waits, now.
    fn statistics(&self) -> GateStatistics {
        GateStatistics::default()
    }
}

/// What waits in a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GateStatistics {
    /// Pieces that wait.
    pub waiting: u64,
    /// Their bytes.
    pub waiting_bytes: u64,
    /// Pieces that left.
    pub released: u64,
    /// How long the last one that left had waited.
    pub last_delay: Duration,
    /// How long half of the last 1024 pieces that left had waited at most.
    pub delay_p50: Duration,
    /// How long 99 of a hundred had.
    pub delay_p99: Duration,
}

/// The gate of a guest that says nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoOutput;

impl EpochGate for NoOutput {
    fn close(&self, _: MaySay) {}
    fn end_epoch(&self, _: u64) {}
    fn release(&self, _: u64) {}
    fn open(&self) {}
    fn drop_output(&self) {}
}
