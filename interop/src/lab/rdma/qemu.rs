//! QEMU to QEMU: controls that the lab works, and tests of the statements about QEMU in specs/rdma.md. No
//! Sterna takes part in the controls. Under load, a QEMU's connection can fail before it is established ("cm
//! event is 10") or hang. A control is therefore repeated with new QEMUs, and its failure is not an error.

use std::cell::RefCell;
use std::rc::Rc;

use super::Scenario;
use super::way::{Path, Source, Way, machine, ram, same, still};
use super::wire::Wire;
use crate::scenarios::Failure;
use crate::{Guest, Qemu, unbroken};

/// Number of chances of a migration between two QEMUs. With the return path, a QEMU source may send its first
/// READY too early, before a QEMU destination has posted a receive. That ends the migration. Two QEMUs
/// therefore get several chances, and no such scenario is in the tests. With a Sterna on either side, one
/// chance suffices.
const CHANCES: usize = 8;

/// Number of tries of a control, each with new QEMUs.
const TRIES: usize = 3;

pub(super) fn scenarios() -> Vec<Scenario> {
    let short = [
        Way { chunks_mib: [1, 8], return_path: false, ..Way::PLAIN },
        Way { pin_all: true, return_path: false, path: Path::Ipv6, ..Way::PLAIN },
    ];
    let long = [
        Way::PLAIN,
        Way { chunks_mib: [64, 64], path: Path::Ipv6, ..Way::PLAIN },
        Way { chunks_mib: [64, 1], pin_all: true, return_path: false, ..Way::PLAIN },
    ];
    let source = Rc::new(RefCell::new(Source::default()));
    let named = |way: Way| {
        let source = Rc::clone(&source);
        (format!("QEMU to QEMU, {}", way.name()), move || tried(&mut source.borrow_mut(), way))
    };
    let mut all: Vec<_> = short.map(named).map(|(name, run)| Scenario::short(name, run).control()).into();
    all.extend(long.map(named).map(|(name, run)| Scenario::long(name, run).control()));
    all.push(Scenario::long("QEMU to QEMU, a smaller chunk at the destination", mismatch));
    all.push(Scenario::long("QEMU to QEMU, the guest counts on", counts_on));
    all.push(Scenario::long("QEMU to QEMU over a wire", || {
        let _wire = Wire::with("pfifo")?;
        moves(&mut Source::default(), Way { path: Path::Wire, ..Way::PLAIN })
    }));
    all
}

/// Runs [`moves`] with a few tries. A source that failed is not used again.
fn tried(source: &mut Source, way: Way) -> Result<(), Failure> {
    let mut failures = Vec::new();
    for _ in 0..TRIES {
        match moves(source, way) {
            Ok(()) => return Ok(()),
            Err(why) => failures.push(why),
        }
        *source = Source::default();
    }
    Err(format!("{TRIES} tries: {}", failures.join("; ")))
}

/// Moves a stopped machine, and checks that its RAM arrives unchanged.
fn moves(source: &mut Source, way: Way) -> Result<(), Failure> {
    let (source, left) = source.get()?;
    let destination = moved(way, source, || still()?.incoming_defer().spawn())?;
    same(left, &ram(&destination)?)
}

/// Migrates and returns the destination, which has the guest afterwards.
fn moved(
    way: Way,
    source: &mut Qemu,
    destination: impl Fn() -> Result<Qemu, Failure>,
) -> Result<Qemu, Failure> {
    let mut chances = if way.return_path { CHANCES } else { 1 };
    loop {
        let mut destination = destination()?;
        let result = migrate(way, source, &mut destination);
        chances -= 1;
        match result {
            Ok(()) => return Ok(destination),
            Err(why) if chances == 0 => return Err(why),
            Err(_) => {}
        }
    }
}

fn migrate(way: Way, source: &mut Qemu, destination: &mut Qemu) -> Result<(), Failure> {
    let uri = way.uri();
    way.set_destination(destination)?;
    way.set_source(source)?;
    destination.start_incoming(&uri)?;
    source.start_migration(&uri)?;
    source.wait_for_migration()?;
    destination.wait_for_migration().map(drop)
}

/// The source's chunk must not be larger than the destination's. Otherwise the migration fails, and the guest
/// stays at the source.
fn mismatch() -> Result<(), Failure> {
    let way = Way { chunks_mib: [2, 1], return_path: false, ..Way::PLAIN };
    let mut source = Source::default();
    let (source, left) = source.get()?;
    let mut destination = still()?.incoming_defer().spawn()?;
    match migrate(way, source, &mut destination) {
        Ok(()) => Err("QEMU took chunks of 2 MiB where the destination registers 1 MiB".into()),
        Err(_) => same(left, &ram(source)?),
    }
}

/// Checks that a guest that was moved continues to count. The guest is stopped for the move, because under
/// TCG QEMU may skip a page that was written again (`specs/stream.md` §10).
fn counts_on() -> Result<(), Failure> {
    let builder = machine()?.guest(Guest::Boot);
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(2)?;
    source.stop()?;
    let mut destination = moved(Way::PLAIN, &mut source, || builder.clone().incoming_defer().spawn())?;
    destination.resume()?;
    destination.wait_for_ticks(2)?;
    unbroken(&[&source, &destination]).map(drop)
}
