//! Sterna and QEMU over soft-RoCE, in both directions: a QEMU's machine moves into memory of this process,
//! and from there into another QEMU. Sterna to Sterna runs between the two processes of the bench.

#![allow(clippy::print_stdout)]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::{Arrival, Event, Incoming, Outcome, Status};
use sterna_opaque::MemoryMachine;

use super::Scenario;
use super::bench::{Load, Machines};
use super::blocks::blocks_of;
use super::way::{Path, Source, Way, machine, ram, same, still};
use super::wire::Wire;
use crate::qemu::{PATIENCE, Qemu};
use crate::scenarios::Failure;
use crate::{Builder, Guest, unbroken};

/// A move into memory, and a move out of it.
struct Trip {
    into: Way,
    out: Way,
}

impl Trip {
    fn name(&self) -> String {
        format!("QEMU to Sterna to QEMU; into: {}; out: {}", self.into.name(), self.out.name())
    }

    /// Moves a stopped machine, and checks that its RAM arrives unchanged everywhere.
    fn run(&self, source: &mut Source) -> Result<(), Failure> {
        let (source, left) = source.get()?;
        let here = into_memory(self.into, source).map_err(|why| format!("into memory: {why}"))?;
        same(left, &ram_of(&here)?).map_err(|why| format!("into memory: {why}"))?;
        let destination = out_of_memory(self.out, &here, still()?).map_err(|why| format!("out: {why}"))?;
        same(left, &ram(&destination)?).map_err(|why| format!("out: {why}"))?;
        nothing_pinned()
    }
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let source = Rc::new(RefCell::new(Source::default()));
    let [large, small] = [[64, 1], [1, 8]].map(|chunks_mib| Way { chunks_mib, ..Way::PLAIN });
    let silent = |way: Way| Way { return_path: false, path: Path::Ipv6, ..way };
    let pinned = Way { pin_all: true, ..Way::PLAIN };
    let trip = |into, out| {
        let (trip, source) = (Trip { into, out }, Rc::clone(&source));
        (trip.name(), move || trip.run(&mut source.borrow_mut()))
    };
    let short =
        [trip(silent(Way { chunks_mib: [8, 1], ..Way::PLAIN }), silent(small)), trip(Way::PLAIN, large)];
    let long = [trip(pinned, pinned)];
    let mut all: Vec<_> = short.map(|(name, run)| Scenario::short(name, run)).into();
    all.extend(long.map(|(name, run)| Scenario::long(name, run)));
    all.push(Scenario::long("QEMU to Sterna to QEMU, the guest counts on", counts_on));
    all.push(Scenario::long("QEMU to Sterna to QEMU over a wire", || over("pfifo", true)));
    all.push(Scenario::long("QEMU to Sterna to QEMU, 1 % loss and 5 ms delay", || {
        over("netem loss 1% delay 5ms", false)
    }));
    let ways = [large, Way { pin_all: true, path: Path::Ipv6, ..small }];
    all.extend(ways.map(|way| {
        Scenario::long(format!("Sterna to Sterna, {}", way.name()), move || {
            Machines::start(Load::Random)?.between(way)
        })
    }));
    all
}

/// Checks that a guest that was moved continues to count. The guest is stopped for the move, because under
/// TCG QEMU may skip a page that was written again (`specs/stream.md` §10).
fn counts_on() -> Result<(), Failure> {
    let builder = machine()?.guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(2)?;
    source.stop()?;
    let here = into_memory(Way::PLAIN, &mut source)?;
    let mut destination = out_of_memory(Way::PLAIN, &here, builder)?;
    destination.resume()?;
    destination.wait_for_ticks(2)?;
    unbroken(&[&source, &destination]).map(drop)
}

/// Moves a small guest over a wire. With lost packets, the migration may fail with an error that names the
/// reason. The guest then stays where it was.
fn over(discipline: &str, must_arrive: bool) -> Result<(), Failure> {
    let _wire = Wire::with(discipline)?;
    let way = Way { path: Path::Wire, ..Way::PLAIN };
    let builder = still()?.memory_mib(8);
    let mut source = builder.clone().spawn()?;
    crate::fill(&source.directory().join("ram"), 1)?;
    let left = ram(&source)?;
    let (here, incoming) = place_for(way, &mut source)?;
    way.set_source(&mut source)?;
    source.start_migration(&incoming.address().to_string())?;
    match arrived(&incoming, &mut source)? {
        Arrival::Completed(_) => same(&left, &ram_of(&here)?)?,
        Arrival::Failed(error) if !must_arrive => {
            println!("LAB over a wire with {discipline}: into memory: {error}");
            same(&left, &ram(&source)?)?;
            return nothing_pinned();
        }
        other => return Err(format!("into memory: {other:?}; QEMU said: {}", source.log())),
    }
    let mut destination = builder.incoming_defer().spawn()?;
    let uri = way.uri();
    way.set_destination(&mut destination)?;
    destination.start_incoming(&uri)?;
    match sent(way, &here, &uri)? {
        Outcome::Completed => {
            destination.wait_for_migration()?;
            same(&left, &ram(&destination)?)?;
        }
        Outcome::Failed { error, held: false } if !must_arrive => {
            println!("LAB over a wire with {discipline}: out of memory: {error}");
            same(&left, &ram_of(&here)?)?;
        }
        other => return Err(format!("out of memory: {other:?}; QEMU said: {}", destination.log())),
    }
    nothing_pinned()
}

/// Moves a QEMU's machine into memory of this process.
pub(super) fn into_memory(way: Way, source: &mut Qemu) -> Result<MemoryMachine, Failure> {
    let (here, incoming) = place_for(way, source)?;
    let uri = incoming.address().to_string();
    way.set_source(source)?;
    source.start_migration(&uri)?;
    let arrival = arrived(&incoming, source)?;
    let Arrival::Completed(_) = arrival else {
        return Err(format!("{arrival:?}; QEMU said: {}", source.log()));
    };
    source.wait_for_migration()?;
    Ok(here)
}

/// Waits for a QEMU's machine and returns how it arrived. Does not wait for a destination whose source has
/// failed, because that destination waits for the next source.
fn arrived(incoming: &Incoming, source: &mut Qemu) -> Result<Arrival, Failure> {
    let begin = Instant::now();
    loop {
        if let Some(arrival) = incoming.arrival() {
            return Ok(arrival);
        }
        let told = source.execute("query-migrate", serde_json::Value::Null)?;
        let has_failed = matches!(told["status"].as_str(), Some("failed" | "cancelled"));
        if has_failed && incoming.status() == Status::Setup || begin.elapsed() > PATIENCE / 3 {
            let status = incoming.status();
            return Err(format!(
                "the destination is {status:?}, the source says {told}; log: {}",
                source.log()
            ));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Memory of this process that waits for that QEMU's machine.
pub(super) fn place_for(way: Way, source: &mut Qemu) -> Result<(MemoryMachine, Incoming), Failure> {
    let here = MemoryMachine::new(blocks_of(source)?);
    let incoming = listening(way, &here)?;
    Ok((here, incoming))
}

/// A QEMU that has received a machine from memory.
pub(super) fn out_of_memory(way: Way, here: &MemoryMachine, to: Builder) -> Result<Qemu, Failure> {
    let mut destination = to.incoming_defer().spawn()?;
    let uri = way.uri();
    way.set_destination(&mut destination)?;
    destination.start_incoming(&uri)?;
    let outcome = sent(way, here, &uri)?;
    let Outcome::Completed = outcome else {
        return Err(format!("{outcome:?}; QEMU said: {}", destination.log()));
    };
    destination.wait_for_migration()?;
    Ok(destination)
}

fn listening(way: Way, here: &MemoryMachine) -> Result<Incoming, Failure> {
    let at = way.uri().parse().map_err(|error: sterna_transport::TransportError| error.to_string())?;
    let (params, capabilities) = way.of_sterna(way.chunks_mib[1]);
    here.receive(&at, params, capabilities, Arc::new(warned)).map_err(|error| error.to_string())
}

fn sent(way: Way, here: &MemoryMachine, uri: &str) -> Result<Outcome, Failure> {
    let to = uri.parse().map_err(|error: sterna_transport::TransportError| error.to_string())?;
    let (params, capabilities) = way.of_sterna(way.chunks_mib[0]);
    let migration =
        here.send(&to, params, capabilities, Arc::new(warned)).map_err(|error| error.to_string())?;
    let begin = Instant::now();
    while migration.outcome().is_none() && begin.elapsed() < PATIENCE / 6 {
        std::thread::sleep(Duration::from_millis(20));
    }
    if migration.outcome().is_none() {
        let stuck = format!("stuck in {:?}: {:?}", migration.status(), migration.statistics());
        let refused = migration.cancel();
        return Err(format!("{stuck}; cancelled: {refused:?}"));
    }
    let outcome = migration.wait();
    let statistics = migration.statistics().rdma.ok_or("no statistics of RDMA")?;
    if statistics.receiver_not_ready > 0 || statistics.in_flight_bytes > 0 || statistics.pinned_bytes > 0 {
        return Err(format!("{outcome:?} with {statistics:?}"));
    }
    Ok(outcome)
}

/// Prints warnings for operators to the lab's output.
fn warned(event: &Event) {
    if let Event::Warning(text) = event {
        println!("LAB warning: {text}");
    }
}

fn ram_of(here: &MemoryMachine) -> Result<Vec<u8>, Failure> {
    let block = here.ram().blocks().iter().find(|block| block.name() == "ram0").ok_or("there is no ram0")?;
    let mut bytes = vec![0; block.len_bytes() as usize];
    let slice = block.slice(0, bytes.len()).map_err(|error| error.to_string())?;
    slice.copy_to(&mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Checks that this process has no registered memory. Memory may be deregistered after the end of a
/// migration.
fn nothing_pinned() -> Result<(), Failure> {
    let begin = Instant::now();
    loop {
        let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
        let line = status.lines().find(|line| line.starts_with("VmPin:")).ok_or("no VmPin")?;
        if line.split_whitespace().nth(1) == Some("0") {
            return Ok(());
        }
        if begin.elapsed() > PATIENCE / 10 {
            return Err(format!("memory stays pinned: {line}"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
