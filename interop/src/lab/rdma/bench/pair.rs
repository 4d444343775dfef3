//! Times one migration: from the command until both sides have completed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::content::{self, Load};
use super::{BLOCK, MEMORY_MIB, MIB, cpu_of};
use crate::lab::inside::PEER;
use crate::lab::rdma::blocks::{address_of, table_of};
use crate::lab::rdma::child::Sterna;
use crate::lab::rdma::way::Way;
use crate::qemu::PATIENCE;
use crate::{Accelerator, Builder, Failure, Qemu, Ram, Root};

/// The programs of source and destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pair {
    from_sterna: bool,
    to_sterna: bool,
}

impl Pair {
    pub(super) const STERNAS: Self = Self { from_sterna: true, to_sterna: true };

    pub(super) const ALL: [Self; 4] = [
        Self { from_sterna: false, to_sterna: false },
        Self::STERNAS,
        Self { from_sterna: true, to_sterna: false },
        Self { from_sterna: false, to_sterna: true },
    ];

    pub(super) fn name(self) -> String {
        let side = |is_sterna| if is_sterna { "Sterna" } else { "QEMU" };
        format!("{}→{}", side(self.from_sterna), side(self.to_sterna))
    }
}

/// Measurements of one migration.
#[derive(Debug, Clone, Default)]
pub(super) struct Sample {
    pub(super) seconds: f64,
    pub(super) source_cpu: f64,
    pub(super) destination_cpu: f64,
    /// Statistics of the source, if it is a Sterna.
    pub(super) source: Value,
    /// Statistics of the destination, if it is a Sterna.
    pub(super) destination: Value,
    /// Maximum of bytes that a Sterna source had registered.
    pub(super) pinned_bytes: Value,
}

/// Sources with the same content, and a Sterna process as destination.
pub(in crate::lab::rdma) struct Machines {
    qemu: Qemu,
    source: Sterna,
    destination: Sterna,
    load: Load,
    blocks: Value,
}

impl Machines {
    pub(in crate::lab::rdma) fn start(load: Load) -> Result<Self, Failure> {
        let mut qemu = machine()?.spawn()?;
        let table = table_of(&mut qemu)?;
        let blocks = json!(table.iter().map(|(name, length)| json!([name, length])).collect::<Vec<_>>());
        let (mut source, destination) = (Sterna::start(PEER)?, Sterna::start(PEER)?);
        // The Sterna gets the QEMU's devices first, and RAM of its own later.
        let way = Way { return_path: false, ..Way::PLAIN };
        let uri = "tcp:127.0.0.1:4000";
        source.ask(&json!({ "do": "receive", "blocks": blocks, "uri": uri, "way": way.to_json() }))?;
        way.set_source(&mut qemu)?;
        qemu.start_migration(uri)?;
        source.ask(&json!({ "do": "await" }))?;
        qemu.wait_for_migration()?;
        source.ask(&json!({ "do": "fill", "load": load.name() }))?;
        let address = address_of(&mut qemu, BLOCK)?;
        content::fill_of(qemu.pid(), address, MEMORY_MIB * MIB, load)?;
        qemu.capabilities(&["events"])?;
        Ok(Self { qemu, source, destination, load, blocks })
    }

    /// Migrates between the two Sternas, and checks the received bytes.
    pub(in crate::lab::rdma) fn between(&mut self, way: Way) -> Result<(), Failure> {
        self.run(Pair::STERNAS, way, true).map(drop)
    }

    /// Runs one migration. With `check`, the received bytes are checked.
    pub(super) fn run(&mut self, pair: Pair, way: Way, check: bool) -> Result<Sample, Failure> {
        let uri = way.uri();
        let mut qemu = None;
        let (pid, address) = if pair.to_sterna {
            let order = json!({ "do": "receive", "blocks": self.blocks, "uri": uri, "way": way.to_json() });
            let answer = self.destination.ask(&order)?;
            (self.destination.pid(), answer["address"].as_u64().ok_or("no address")?)
        } else {
            let qemu: &mut Qemu = qemu.insert(machine()?.incoming_defer().spawn()?);
            way.set_destination(qemu)?;
            qemu.capabilities(&["events"])?;
            qemu.start_incoming(&uri)?;
            (qemu.pid(), address_of(qemu, BLOCK)?)
        };
        if !pair.from_sterna {
            // A machine can start another migration only after it has resumed.
            self.qemu.resume()?;
            way.set_source(&mut self.qemu)?;
            forget_events(&mut self.qemu)?;
        }
        let source = if pair.from_sterna { self.source.pid() } else { self.qemu.pid() };
        let (cpu, began) = ([cpu_of(source)?, cpu_of(pid)?], Instant::now());
        let mut sample = Sample::default();
        if pair.from_sterna {
            let answer = self.source.ask(&json!({ "do": "send", "uri": uri, "way": way.to_json() }))?;
            (sample.source, sample.pinned_bytes) = (answer["rdma"].clone(), answer["pinned_bytes"].clone());
        } else {
            self.qemu.start_migration(&uri)?;
            completed(&mut self.qemu)?;
        }
        match &mut qemu {
            Some(qemu) => completed(qemu)?,
            None => sample.destination = self.destination.ask(&json!({ "do": "await" }))?["rdma"].clone(),
        }
        sample.seconds = began.elapsed().as_secs_f64();
        [sample.source_cpu, sample.destination_cpu] = [cpu_of(source)? - cpu[0], cpu_of(pid)? - cpu[1]];
        if check {
            content::check_of(pid, address, MEMORY_MIB * MIB, self.load)?;
        }
        Ok(sample)
    }
}

/// Waits for the event that reports the end of the migration. Polling would use time of the only core.
fn completed(qemu: &mut Qemu) -> Result<(), Failure> {
    let begin = Instant::now();
    loop {
        let left = PATIENCE.saturating_sub(begin.elapsed());
        let event =
            qemu.qmp().next_event(left).map_err(|error| format!("{error}; QEMU said: {}", qemu.log()))?;
        let event = event.ok_or("QEMU's migration does not end")?;
        match event.data["status"].as_str().filter(|_| event.name == "MIGRATION") {
            Some("completed") => return Ok(()),
            // The call returns the reason of the failure.
            Some("failed" | "cancelled") => return qemu.wait_for_migration().map(drop),
            _ => {}
        }
    }
}

/// Discards the events of earlier migrations.
fn forget_events(qemu: &mut Qemu) -> Result<(), Failure> {
    while qemu.qmp().next_event(Duration::ZERO).map_err(|error| error.to_string())?.is_some() {}
    Ok(())
}

fn machine() -> Result<Builder, Failure> {
    let root = Root::qemu().ok_or("there is no QEMU in the tree")?;
    let builder = Qemu::builder(&root).memory_mib(MEMORY_MIB).ram(Ram::Object);
    Ok(builder.accelerator(Accelerator::Nothing))
}
