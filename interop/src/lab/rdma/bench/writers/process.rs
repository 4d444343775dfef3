//! A Sterna in a process of its own, with a guest that writes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna::{Address, Arrival, Incoming, Migration, Outcome, SourceVm, TargetVm};

use super::guest::Writer;
use crate::Failure;
use crate::lab::rdma::way::Way;

/// The process's state between orders.
#[derive(Default)]
pub(in super::super) struct Process {
    writer: Option<Arc<Writer>>,
    incoming: Option<Incoming>,
}

impl Process {
    pub(in super::super) fn perform(&mut self, order: &Value) -> Result<Value, Failure> {
        let pace = || order["pace_ns"].as_u64().map(Duration::from_nanos).ok_or("no pace");
        match order["do"].as_str() {
            Some("boot") => {
                let writer = self.writer.insert(Arc::new(Writer::boot(pace()?)?));
                writer.run()?;
                Ok(json!({ "address": writer.address() }))
            }
            Some("receive") => {
                let writer = Arc::new(Writer::waiting(pace()?)?);
                let (params, capabilities) = of(order, 1)?;
                let target = Arc::clone(&writer) as Arc<dyn TargetVm>;
                let incoming = Incoming::listen(target, &uri(order)?, params, capabilities, Arc::new(()));
                self.incoming = Some(incoming.map_err(said)?);
                let address = writer.address();
                self.writer = Some(writer);
                Ok(json!({ "address": address }))
            }
            Some("await") => match self.incoming.as_ref().ok_or("nobody is waited for")?.wait() {
                Arrival::Completed(_) => Ok(json!({})),
                other => Err(format!("{other:?}")),
            },
            Some("send") => self.send(order),
            Some("stop") => {
                let progress = self.writer.as_ref().ok_or("no writer")?.stopped()?;
                Ok(json!({ "wrong_pages": progress.wrong_pages, "gap_ns": progress.longest_gap_ns }))
            }
            other => Err(format!("{other:?} is no order")),
        }
    }

    /// Sends the guest. A migration that exceeds the time limit is cancelled.
    fn send(&mut self, order: &Value) -> Result<Value, Failure> {
        let vm = Arc::clone(self.writer.as_ref().ok_or("no writer")?) as Arc<dyn SourceVm>;
        let (params, capabilities) = of(order, 0)?;
        let migration =
            Migration::start(vm, &uri(order)?, params, capabilities, Arc::new(())).map_err(said)?;
        let until = Instant::now() + Duration::from_secs(order["limit_s"].as_u64().ok_or("no limit")?);
        let mut pinned = 0;
        while migration.outcome().is_none() {
            std::thread::sleep(Duration::from_millis(20));
            pinned = pinned.max(migration.statistics().rdma.map_or(0, |rdma| rdma.pinned_bytes));
            if Instant::now() > until {
                // Refused if the migration has passed the commit.
                let _ = migration.cancel();
            }
        }
        let outcome = migration.wait();
        let found = migration.statistics();
        match outcome {
            Outcome::Completed => Ok(json!({
                "rdma": found.rdma,
                "pinned_bytes": pinned,
                "rounds": found.rounds_begun,
                "switchover": format!("{:?}", found.switchover),
                "downtime_ms": found.downtime.map(|time| time.as_secs_f64() * 1e3),
            })),
            Outcome::Cancelled => Err(format!("it did not converge, {} rounds", found.rounds_begun)),
            other => Err(format!("{other:?}")),
        }
    }
}

fn of(order: &Value, side: usize) -> Result<(sterna::Parameters, sterna::Capabilities), Failure> {
    let way = Way::of_json(&order["way"])?;
    Ok(way.of_sterna(way.chunks_mib[side]))
}

fn uri(order: &Value) -> Result<Address, Failure> {
    order["uri"].as_str().ok_or("no URI")?.parse().map_err(said)
}

fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
