//! One of the two processes, from inside. A guest may be in it, leave it and arrive.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sterna::{
    Address, Arrival, Capabilities, ChunkSize, Decision, Incoming, Migration, Outcome, Parameters,
    RdmaParameters, RunState, SourceVm, Status, TargetVm, WaitLimits,
};
use sterna_guests::process::ProcessConfig;
use sterna_guests::{Fill, Pattern, ProcessGuest};

use super::left::Belongings;
use crate::Failure;
use crate::lab::rdma::child;
use crate::lab::rdma::way::Way;

/// Time limit of a step of a running guest.
const STEP_LIMIT: Duration = Duration::from_secs(60);
/// Time limit of an undisturbed migration. It is so long that no wait reaches it.
const LONG: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_secs(5);

/// Runs the process: performs orders from standard input.
pub(in crate::lab) fn serve() {
    let mut place = Place::default();
    child::serve(|order| place.perform(order));
}

/// The process's guest and its migrations.
#[derive(Default)]
pub(in crate::lab::rdma) struct Place {
    guest: Option<Arc<ProcessGuest>>,
    incoming: Option<Incoming>,
    migration: Option<Migration>,
    /// Resources of the process without a migration: without a guest, and with one.
    idle: Option<[Belongings; 2]>,
}

impl Place {
    pub(in crate::lab::rdma) fn perform(&mut self, order: &Value) -> Result<Value, Failure> {
        match order["do"].as_str() {
            Some("measure") => self.measure(order)?,
            Some("boot") => self.boot(order)?,
            Some("receive") => return self.receive(order),
            Some("send") => self.send(order)?,
            // Refused after the commit.
            Some("cancel") => drop(self.migration()?.cancel()),
            Some("abandon") => {
                return Ok(json!({ "given_up": self.incoming()?.cancel().is_ok() }));
            }
            Some("decide") => {
                let runs_there = order["runs_there"].as_bool().ok_or("no decision")?;
                let decision = if runs_there { Decision::DestinationRuns } else { Decision::SourceRuns };
                // Refused if the source was answered in the meantime.
                let _ = self.migration()?.decide(decision);
            }
            Some("look") => return Ok(self.look()),
            Some("check") => whole(self.guest.as_ref().ok_or("no guest")?)?,
            Some("close") => self.close()?,
            other => return Err(format!("{other:?} is no order")),
        }
        Ok(json!({}))
    }

    /// Counts the resources of the process without a migration. A first migration, from this process to
    /// itself, opens everything that a process opens once and keeps.
    fn measure(&mut self, order: &Value) -> Result<(), Failure> {
        self.boot(order)?;
        let booted = self.guest.take().ok_or("no guest")?;
        let before = Belongings::now();
        let address = self.receive(order)?;
        let there = self.guest.replace(booted).ok_or("no place")?;
        let mut to = order.clone();
        to["uri"] = address["uri"].clone();
        self.send(&to)?;
        let (outcome, arrival) = (self.migration()?.wait(), self.incoming()?.wait());
        if !matches!((&outcome, &arrival), (Outcome::Completed, Arrival::Completed(RunState::Running))) {
            return Err(format!("to itself: {outcome:?}, {arrival:?}"));
        }
        whole(&there)?;
        (self.guest, self.migration, self.incoming) = (None, None, None);
        // Threads need a moment to end. The remaining ones existed before, or belong to at most one superfluous
        // guest.
        std::thread::sleep(Duration::from_secs(1));
        let with = Belongings::now().or(before);
        drop(there);
        std::thread::sleep(Duration::from_secs(1));
        self.idle = Some([Belongings::now(), with]);
        Ok(())
    }

    fn boot(&mut self, order: &Value) -> Result<(), Failure> {
        let guest = ProcessGuest::boot(config(order)?).map_err(said)?;
        guest.cont().map_err(said)?;
        self.guest = Some(guest);
        Ok(())
    }

    fn receive(&mut self, order: &Value) -> Result<Value, Failure> {
        let guest = ProcessGuest::waiting(config(order)?).map_err(said)?;
        let (params, capabilities) = settings(order, 1)?;
        let target = Arc::clone(&guest) as Arc<dyn TargetVm>;
        let incoming = Incoming::listen(target, &address(order)?, params, capabilities, Arc::new(()));
        let incoming = incoming.map_err(said)?;
        let uri = incoming.address().to_string();
        (self.guest, self.incoming) = (Some(guest), Some(incoming));
        Ok(json!({ "uri": uri }))
    }

    fn send(&mut self, order: &Value) -> Result<(), Failure> {
        let guest = self.guest.as_ref().ok_or("no guest")?;
        let (params, capabilities) = settings(order, 0)?;
        let vm = Arc::clone(guest) as Arc<dyn SourceVm>;
        let migration = Migration::start(vm, &address(order)?, params, capabilities, Arc::new(()));
        self.migration = Some(migration.map_err(said)?);
        Ok(())
    }

    fn migration(&self) -> Result<&Migration, Failure> {
        self.migration.as_ref().ok_or_else(|| "nothing is sent".to_owned())
    }

    fn incoming(&self) -> Result<&Incoming, Failure> {
        self.incoming.as_ref().ok_or_else(|| "nobody is waited for".to_owned())
    }

    /// The state of guest and migrations. `end`: `gone`, `here`, `held`, `arrived` or `failed`.
    fn look(&self) -> Value {
        let runs = self.guest.as_ref().is_some_and(|guest| guest.run_state() == RunState::Running);
        let outcome = self.migration.as_ref().and_then(Migration::outcome);
        let arrival = self.incoming.as_ref().and_then(Incoming::arrival);
        let end = match (&outcome, &arrival) {
            (Some(Outcome::Completed), _) => Some("gone"),
            (Some(Outcome::Failed { held: true, .. }), _) => Some("held"),
            (Some(_), _) => Some("here"),
            (None, Some(Arrival::Completed(_))) => Some("arrived"),
            (None, Some(_)) => Some("failed"),
            (None, None) => None,
        };
        let said = match (&outcome, &arrival) {
            (Some(outcome), _) => format!("{outcome:?}"),
            (None, Some(arrival)) => format!("{arrival:?}"),
            (None, None) => String::new(),
        };
        let status = self.migration.as_ref().map(Migration::status);
        let status = status.or_else(|| self.incoming.as_ref().map(Incoming::status));
        json!({
            "end": end,
            "said": said,
            "runs": runs,
            "status": format!("{status:?}"),
            "is_undecided": status == Some(Status::Undecided),
            "waits_for_a_source": matches!(status, Some(Status::Setup | Status::None)),
        })
    }

    /// Drops the migrations that have ended, and checks that nothing of them is left.
    fn close(&mut self) -> Result<(), Failure> {
        (self.migration, self.incoming) = (None, None);
        let runs = |guest: &Arc<ProcessGuest>| guest.run_state() == RunState::Running;
        self.guest = self.guest.take().filter(runs);
        let [without, with] = self.idle.ok_or("nothing was measured")?;
        if self.guest.is_some() { with } else { without }.wait_restored()
    }
}

/// Checks that the guest runs and its memory is one consistent cut.
fn whole(guest: &Arc<ProcessGuest>) -> Result<(), Failure> {
    if !guest.wait_progress(1, STEP_LIMIT) {
        return Err("the guest stands still".into());
    }
    guest.pause().map_err(said)?;
    let verdict = guest.check().map_err(said)?;
    if !verdict.is_consistent() {
        return Err(verdict.to_string());
    }
    guest.cont().map_err(said)
}

fn config(order: &Value) -> Result<ProcessConfig, Failure> {
    let seed = order["guest"].as_u64().ok_or("no guest's seed")?;
    Ok(ProcessConfig {
        blocks: vec![("ram.low".into(), 16 << 20), ("ram.high".into(), 32 << 20)],
        pattern: Pattern::Mixed,
        fill: Fill::Half(seed),
        workers: 1,
        rate: 500,
        seed,
        ..ProcessConfig::default()
    })
}

fn address(order: &Value) -> Result<Address, Failure> {
    order["uri"].as_str().ok_or("no URI")?.parse().map_err(said)
}

/// Settings of one side. `side`: 0 is the source, 1 the destination.
fn settings(order: &Value, side: usize) -> Result<(Parameters, Capabilities), Failure> {
    let way = Way::of_json(&order["way"])?;
    let (params, capabilities) = way.of_sterna(way.chunks_mib[side]);
    let lanes = order["lanes"].as_u64().and_then(|lanes| u8::try_from(lanes).ok()).ok_or("no lanes")?;
    let limit = order["is_disturbed"].as_bool().ok_or("disturbed or not?")?;
    let limit = if limit { SHORT } else { LONG };
    let rdma = RdmaParameters {
        chunk: ChunkSize::new(way.chunks_mib[side] << 20).unwrap_or_default(),
        pinned_limit_bytes: order["pinned_limit_mib"].as_u64().map(|mib| mib << 20),
        ..params.rdma
    };
    let limits = WaitLimits {
        setup: 3 * limit,
        stall: limit,
        switchover: 3 * limit,
        prepare: 3 * limit,
        acknowledge: limit,
        ask_interval: Duration::from_millis(200),
    };
    let params = Parameters {
        multifd_channels: lanes.max(1),
        downtime_limit: Duration::from_secs(1),
        rdma,
        limits,
        ..params
    };
    Ok((params, Capabilities { multifd: lanes > 0, ..capabilities }))
}

fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
