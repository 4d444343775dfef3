//! Joins several gates of one guest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::device_stream::AskCheckpoint;

use super::epoch_gate::{EpochGate, GateStatistics, MaySay};

/// The gates of one guest: its console's, and those of its network cards. All of them have the same epochs.
pub struct JoinedGate {
    /// The gate whose bytes a checkpoint carries, and the standby repeats.
    console: Arc<dyn EpochGate>,
    others: Vec<Arc<dyn EpochGate>>,
}

impl JoinedGate {
    /// Joins the gates of a console and of other devices. A checkpoint carries the console's bytes. Waiting output of
    /// the other gates is lost if the primary fails.
    pub fn new(console: Arc<dyn EpochGate>, others: Vec<Arc<dyn EpochGate>>) -> Self {
        Self { console, others }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<dyn EpochGate>> {
        std::iter::once(&self.console).chain(&self.others)
    }
}

impl EpochGate for JoinedGate {
    fn close(&self, may_say: MaySay) {
        let may_say: Arc<dyn Fn(u64) -> bool + Send + Sync> = may_say.into();
        for gate in self.all() {
            let may_say = Arc::clone(&may_say);
            gate.close(Box::new(move |epoch| may_say(epoch)));
        }
    }

    fn end_epoch(&self, epoch: u64) {
        self.all().for_each(|gate| gate.end_epoch(epoch));
    }

    fn release(&self, epoch: u64) {
        self.all().for_each(|gate| gate.release(epoch));
    }

    fn let_out(&self, most: Duration) {
        let until = Instant::now() + most;
        self.all().for_each(|gate| gate.let_out(until.saturating_duration_since(Instant::now())));
    }

    fn open(&self) {
        self.all().for_each(|gate| gate.open());
    }

    fn drop_output(&self) {
        self.all().for_each(|gate| gate.drop_output());
    }

    fn ask_when_full(&self, ask: AskCheckpoint) {
        self.all().for_each(|gate| gate.ask_when_full(Arc::clone(&ask)));
    }

    fn unsaid(&self) -> (u64, Vec<u8>) {
        self.console.unsaid()
    }

    fn waits_since(&self) -> Option<Instant> {
        self.all().filter_map(|gate| gate.waits_since()).min()
    }

    fn statistics(&self) -> GateStatistics {
        self.all().map(|gate| gate.statistics()).fold(GateStatistics::default(), |sum, gate| GateStatistics {
            waiting: sum.waiting + gate.waiting,
            waiting_bytes: sum.waiting_bytes + gate.waiting_bytes,
            released: sum.released + gate.released,
            last_delay: sum.last_delay.max(gate.last_delay),
            delay_p50: sum.delay_p50.max(gate.delay_p50),
            delay_p99: sum.delay_p99.max(gate.delay_p99),
        })
    }
}
