//! A Sterna in its own process, so that its CPU time can be measured. Its memory contains a QEMU's machine.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::{Value, json};
use sterna::{Arrival, Incoming, Migration, Outcome};
use sterna_image::Shape;
use sterna_opaque::MemoryMachine;
use sterna_ram::GuestRam;
use sterna_transport::TransportError;

use super::BLOCK;
use super::content::{self, Load};
use crate::Failure;
use crate::lab::rdma::blocks::made;
use crate::lab::rdma::child;
use crate::lab::rdma::way::{Way, digest};

/// Runs the process: performs orders from standard input.
pub(in crate::lab) fn serve() {
    let mut machine = Machine::default();
    child::serve(|order| machine.perform(order));
}

/// A machine in memory, and the migration that moves it.
#[derive(Default)]
pub(in crate::lab::rdma) struct Machine {
    here: Option<MemoryMachine>,
    incoming: Option<Incoming>,
}

impl Machine {
    pub(in crate::lab::rdma) fn perform(&mut self, order: &Value) -> Result<Value, Failure> {
        let way = || Way::of_json(&order["way"]);
        match order["do"].as_str() {
            Some("receive") => self.receive(order, way()?),
            Some("await") => self.arrived(),
            Some("digest") => self.digest(),
            Some("fill") => self.fill(order),
            Some("send") => self.send(order, way()?),
            other => Err(format!("{other:?} is no order")),
        }
    }

    /// Receives a machine into untouched memory.
    fn receive(&mut self, order: &Value, way: Way) -> Result<Value, Failure> {
        (self.here, self.incoming) = (None, None);
        let block = |pair: &Value| Some((pair[0].as_str()?.to_owned(), pair[1].as_u64()?));
        let blocks: Option<Vec<_>> =
            order["blocks"].as_array().ok_or("no blocks")?.iter().map(block).collect();
        let here = MemoryMachine::new(made(blocks.ok_or("blocks without a name or a length")?.into_iter())?);
        let (params, capabilities) = way.of_sterna(way.chunks_mib[1]);
        let at = uri(order)?.parse().map_err(|error: TransportError| error.to_string())?;
        self.incoming = Some(here.receive(&at, params, capabilities, Arc::new(())).map_err(said)?);
        let address = here.ram().blocks().iter().find(|block| block.name() == BLOCK).map(address_of);
        self.here = Some(here);
        Ok(json!({ "address": address.ok_or("no RAM")? }))
    }

    fn arrived(&mut self) -> Result<Value, Failure> {
        let incoming = self.incoming.as_ref().ok_or("nobody is waited for")?;
        match incoming.wait() {
            Arrival::Completed(_) => Ok(json!({ "rdma": incoming.statistics().rdma })),
            other => Err(format!("{other:?}")),
        }
    }

    /// A digest of the machine's RAM.
    fn digest(&self) -> Result<Value, Failure> {
        let here = self.here.as_ref().ok_or("no memory")?;
        let block = here.ram().blocks().iter().find(|block| block.name() == BLOCK).ok_or("no RAM")?;
        let mut bytes = vec![0; block.len_bytes() as usize];
        block.read(0, &mut bytes).map_err(said)?;
        Ok(json!({ "digest": digest(&bytes) }))
    }

    fn fill(&mut self, order: &Value) -> Result<Value, Failure> {
        let load = order["load"].as_str().and_then(Load::named).ok_or("no such load")?;
        let (ram, shape) = self.held()?;
        // The memory is new, so that zero pages were never touched.
        let blocks = ram.blocks().iter().map(|block| (block.name().to_owned(), block.len_bytes()));
        let fresh = made(blocks)?;
        for (old, new) in ram.blocks().iter().zip(fresh.blocks()) {
            if new.name() == BLOCK {
                content::fill(new, load)?;
            } else {
                let mut bytes = vec![0; old.len_bytes() as usize];
                old.read(0, &mut bytes).map_err(said)?;
                new.write(0, &bytes).map_err(said)?;
            }
        }
        self.here = Some(MemoryMachine::of(fresh, shape).map_err(said)?);
        Ok(json!({}))
    }

    /// Sends the machine. It stays here unchanged, so that it can be sent again.
    fn send(&mut self, order: &Value, way: Way) -> Result<Value, Failure> {
        let (ram, shape) = self.held()?;
        let again = GuestRam::new(ram.blocks().to_vec()).map_err(said)?;
        let here = MemoryMachine::of(again, shape).map_err(said)?;
        let (params, capabilities) = way.of_sterna(way.chunks_mib[0]);
        let to = uri(order)?.parse().map_err(|error: TransportError| error.to_string())?;
        let migration = here.send(&to, params, capabilities, Arc::new(())).map_err(said)?;
        self.here = Some(here);
        let (outcome, pinned) = watched(&migration);
        match outcome {
            Outcome::Completed => Ok(json!({ "rdma": migration.statistics().rdma, "pinned_bytes": pinned })),
            other => Err(format!("{other:?}")),
        }
    }

    fn held(&self) -> Result<(GuestRam, Shape), Failure> {
        let here = self.here.as_ref().ok_or("no memory")?;
        Ok((here.ram().clone(), here.shape().ok_or("no machine")?))
    }
}

/// Waits for the end of the migration. Returns the outcome and the maximum of pinned bytes. More frequent
/// polling would use time of the only core.
fn watched(migration: &Migration) -> (Outcome, u64) {
    const EVERY: Duration = Duration::from_millis(250);
    std::thread::scope(|scope| {
        let (is_over, over) = channel::<()>();
        let looking = scope.spawn(move || {
            let mut most = 0;
            loop {
                most = most.max(migration.statistics().rdma.map_or(0, |rdma| rdma.pinned_bytes));
                if over.recv_timeout(EVERY) == Err(RecvTimeoutError::Disconnected) {
                    return most;
                }
            }
        });
        let outcome = migration.wait();
        drop(is_over);
        (outcome, looking.join().unwrap_or_default())
    })
}

fn address_of(block: &sterna_ram::RamBlock) -> u64 {
    block.slice(0, 1).map_or(0, |slice| slice.as_ptr() as u64)
}

fn uri(order: &Value) -> Result<&str, Failure> {
    order["uri"].as_str().ok_or_else(|| "no URI".to_owned())
}

fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
