//! Debian's kernel in the reference machine: it boots, moves while it works, and switches itself off.
#![allow(clippy::print_stdout)]

pub(crate) mod bench;
mod console;
mod days;
mod disturbed;
mod files;
pub mod guest;
mod killed;
mod machine;
mod network;
mod processes;
mod protected;
mod watchdog;
mod ways;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sterna_vmm::{DiskMigration, EndReason, KvmMachine};

use self::console::{Console, PATIENCE};
use self::disturbed::move_disturbed;
pub(crate) use self::files::{Files, MODULES};
use self::machine::{Image, ROOT_DISK, Setup, booted, check_disk, disk_image, machine};
use self::ways::{Way, move_guest};
use crate::scenarios::{Failure, ensure};
use crate::sterna_does;

/// Limit of the clock error between two ticks. A guest's clock may advance by this much more than this host's
/// time.
const LONGEST_GAP: Duration = Duration::from_secs(20);

/// Limit of the guest's absence in addition to the pause. On a busy host, one core does all the work.
const LATE: Duration = Duration::from_secs(2);

/// A scenario with Linux guests.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Whether it runs only if it is selected.
    pub(crate) is_long: bool,
    pub(crate) run: fn() -> Result<(), Failure>,
}

/// All scenarios. Together, the short ones use every feature that a guest can use.
pub(crate) fn scenarios() -> Vec<Scenario> {
    let short = |name, run| Scenario { name, is_long: false, run };
    let long = |name, run| Scenario { name, is_long: true, run };
    vec![
        short("linux boots with 2 vCPUs, works, moves in each way, and switches itself off", || {
            moves(&Setup { is_brief: true, ..Setup::working(2) }, Way::ALL.len() as u64)
        }),
        short(
            "the host's watchdog ends a primary that stands still",
            watchdog::ends_a_primary_that_stands_still,
        ),
        long("linux works and moves ten times", || moves(&Setup::working(1), 10)),
        long("linux boots with 1 vCPU", || boots(1)),
        long("linux boots with 2 vCPUs and switches itself off", || boots(2)),
        long("linux boots with 4 vCPUs", || boots(4)),
        long("linux boots with memory above 4 GiB, and moves", || {
            moves(&Setup { ram_bytes: 5 << 30, ..Setup::default() }, 1)
        }),
        long("linux resets the machine", || ends(guest::RESETS, &EndReason::Reset)),
        long("linux moves while it does nothing but write memory", || moves(&Setup::default(), 3)),
        long("linux with 2 vCPUs works and moves", || moves(&Setup::working(2), 5)),
        long("linux with 4 vCPUs works and moves", || moves(&Setup::working(4), 5)),
        long("linux moves with a disk that both sides see", || {
            moves(&Setup { disk: Some(DiskMigration::Shared), ways: &Way::ALL, ..Setup::default() }, 5)
        }),
        long("the demo with linux", demo),
        long("linux moves with a qcow2 disk that both sides see", || {
            let disk = Some(DiskMigration::Shared);
            moves(&Setup { disk, is_qcow2: true, ways: &Way::ALL, ..Setup::default() }, 3)
        }),
        long("linux moves with devices of other processes", || {
            let disk = Some(DiskMigration::Shared);
            moves(&Setup { disk, has_processes: true, ways: &Way::OVER_SOCKETS, ..Setup::default() }, 4)
        }),
        long("linux lies in an image for days", days::sleeps_for_days),
        long("linux moves while processes are killed", killed::is_killed),
        long("linux outlives its host by a standby", protected::outlives_its_host),
        // The guest does not move: two passts on one host cannot both own the guest's sockets, and a
        // connection may end.
        long("linux talks over a network that is another process", || {
            moves(&Setup { has_passt: true, ..Setup::default() }, 0)
        }),
        long("linux gives back what it has freed, and that does not move", gives_back),
        long("linux says what it has freed when it is asked, and that does not move", says_what_is_free),
        long("linux does both", || {
            frees(&Setup { reports: true, hints: true, ..Setup::default() }).map(drop)
        }),
    ]
}

/// Moves one working guest `count` times, in every way. With a seed, disturbed moves occur between the
/// others.
pub(crate) fn many_moves(count: u64, seed: u64) -> Scenario {
    static CHOICE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
    CHOICE.iter().zip([count, seed]).for_each(|(choice, value)| choice.store(value, Ordering::Relaxed));
    let run = || {
        let [count, seed] = [0, 1].map(|index| CHOICE[index].load(Ordering::Relaxed));
        moves(&Setup { disturbed: (seed != 0).then_some(seed), ..Setup::working(1) }, count)
    };
    Scenario { name: "linux moves many times in a row", is_long: false, run }
}

fn boots(vcpus: u8) -> Result<(), Failure> {
    const TICKS: u64 = 20;
    let setup = Setup { vcpus, ..Setup::default() };
    let (machine, console) = booted(&setup, None, TICKS)?;
    over(&machine, &console, &EndReason::PoweredOff)?;
    console.check(&setup, Some(TICKS), LONGEST_GAP).map(drop)
}

fn ends(how: &'static str, reason: &EndReason) -> Result<(), Failure> {
    let (machine, console) = booted(&Setup { ends: how, ..Setup::default() }, None, 1)?;
    over(&machine, &console, reason)
}

fn moves(setup: &Setup, count: u64) -> Result<(), Failure> {
    // Number of the guest's ticks between two moves.
    let ticks = if setup.is_brief { 2 } else { 5 };
    let peer = (setup.has_network || setup.has_passt).then(network::Peer::start).transpose()?;
    let mut disk = setup.disk.map(|_| disk_image(setup)).transpose()?;
    let (mut here, console) = booted(setup, path(disk.as_ref()), guest::UNTIL_TOLD)?;
    console.wait_for_tick(&here, ticks)?;
    let pings = setup.has_network.then(network::Pings::start).transpose()?;
    let mut random = setup.disturbed.map(fastrand::Rng::with_seed);
    let (mut longest_gap, mut longest_move, mut pauses) = (LONGEST_GAP, Duration::ZERO, Duration::ZERO);
    // A brief guest moves between machines with both kinds of write tracking, however many vCPUs it has.
    let is_smp = setup.vcpus > 1 && !setup.is_brief;
    for round in 1..=count {
        let ways = setup.ways;
        let way = ways.get(round as usize % ways.len().max(1)).copied().unwrap_or(Way::Plain);
        let rings = (ways.len() > 1 && (is_smp || round.is_multiple_of(2))).then_some(1024);
        if let Some(random) = random.as_mut().filter(|_| !way.is_file()) {
            let image = disk_there(setup, disk.as_ref())?;
            let there = machine(setup, path(image.as_ref()), None, rings, &console)?;
            if move_disturbed(&here, &there, way, random)
                .map_err(|why| format!("before move {round}: {why}"))?
            {
                (here, disk) = (there, image);
            }
            console.wait_for_tick(&here, console.ticks() + ticks)?;
        }
        let image = disk_there(setup, disk.as_ref())?;
        let there = machine(setup, path(image.as_ref()), None, rings, &console)?;
        let moved = move_guest(&here, &there, way);
        let arrived = moved.and_then(|moved| {
            println!("LAB move {round}, {way:?}: {moved}");
            pauses += moved.pause;
            longest_move = longest_move.max(moved.total);
            if way.is_file() {
                longest_gap = longest_gap.max(LONGEST_GAP + moved.pause);
            }
            (here, disk) = (there, image);
            console.wait_for_tick(&here, console.ticks() + ticks)
        });
        arrived.map_err(|why| format!("move {round}, {way:?}: {why}"))?;
    }
    let pings = pings.map(network::Pings::finish).transpose()?;
    // The guest reads its console in every machine.
    ensure(here.type_in(guest::END.as_bytes()) == guest::END.len(), || {
        "the console takes nothing".to_owned()
    })?;
    over(&here, &console, &EndReason::PoweredOff)?;
    let heard = console.lines(guest::HEARD);
    ensure(
        heard.iter().map(|line| line.trim_end()).eq(setup.has_console.then_some(guest::END.trim_end())),
        || format!("it heard {heard:?}"),
    )?;
    let ticks = console.check(setup, None, longest_gap)?;
    if let Some(pings) = pings {
        println!("LAB {pings}");
        let most = pauses + LATE * u32::try_from(count).unwrap_or(u32::MAX);
        ensure(pings.lost() < most, || format!("{pings}, and the guest stood still for {pauses:?}"))?;
    }
    if let Some(peer) = peer {
        let seen = peer.seen()?;
        println!("LAB the guest's peer: {} numbers, longest gap {:?}", seen.numbers, seen.longest_gap);
        let sent = console.of(guest::SENT);
        ensure(sent == [[seen.numbers, 0]], || format!("{seen:?}, and the guest says {sent:?}"))?;
        // On a host that is too busy for the move itself, TCP of the guest repeats lost segments at growing intervals.
        let longest_gap = longest_gap.max(longest_move);
        ensure(seen.longest_gap < longest_gap, || format!("{seen:?}"))?;
    }
    drop(here);
    if setup.has_processes {
        guest::share::check(processes::SHARED.as_ref(), ticks)?;
    }
    if setup.has_root {
        files::check_file_system(ROOT_DISK.as_ref())?;
    }
    disk.map_or(Ok(()), |disk| check_disk(setup, &disk, ticks))
}

fn path(image: Option<&Image>) -> Option<&Path> {
    image.map(|image| &***image)
}

/// The disk of the next machine: the same disk, or an empty one if the content is copied.
fn disk_there(setup: &Setup, here: Option<&Image>) -> Result<Option<Image>, Failure> {
    match setup.disk {
        Some(DiskMigration::Copy) => disk_image(setup).map(Some),
        _ => Ok(here.cloned()),
    }
}

/// Memory that the guest has freed is returned to the host. It is not sent in a move.
fn gives_back() -> Result<(), Failure> {
    const TICKS: u64 = 150;
    let setup = Setup { reports: true, ..Setup::default() };
    let (here, console) = booted(&setup, None, TICKS)?;
    console.wait_for(&here, guest::FREED)?;
    let resident = |machine: &KvmMachine| machine.ram().blocks()[0].resident_bytes().map_err(said);
    let before = resident(&here)?;
    console.wait_for(&here, &format!("{} 100 ", guest::TICK))?;
    let after = resident(&here)?;
    println!("LAB resident: {} MiB, {} MiB later", before >> 20, after >> 20);
    let freed = guest::FREED_BYTES as u64;
    ensure(after + freed * 3 / 4 < before, || format!("{before} bytes were resident, {after} still are"))?;
    let there = machine(&setup, None, None, None, &console)?;
    move_guest(&here, &there, Way::Plain).map(drop)?;
    let moved = resident(&there)?;
    ensure(moved < after + freed / 4, || format!("{after} bytes moved, and {moved} arrived"))?;
    over(&there, &console, &EndReason::PoweredOff)?;
    console.check(&setup, Some(TICKS), LONGEST_GAP).map(drop)
}

/// Memory that the guest has freed stays allocated here and is not sent. Afterwards, the guest uses its
/// memory again.
fn says_what_is_free() -> Result<(), Failure> {
    let freed = guest::FREED_BYTES as u64;
    let [before, moved, sent] = frees(&Setup { hints: true, ..Setup::default() })?;
    // Linux reports free memory in pieces of 4 MiB, its largest size. On the lab's processor this is slow,
    // and lanes do not wait for all of it.
    ensure(moved + freed / 2 < before, || format!("{before} bytes were resident, {moved} arrived"))?;
    ensure(sent + freed / 2 < before, || format!("{before} bytes were resident, {sent} were sent"))
}

/// Moves a guest that has freed memory twice. Returns the resident bytes before and after the first move, and
/// the bytes sent.
fn frees(setup: &Setup) -> Result<[u64; 3], Failure> {
    const TICKS: u64 = 200;
    const FIRST: u64 = 60;
    let (here, console) = booted(setup, None, TICKS)?;
    console.wait_for(&here, guest::FREED)?;
    console.wait_for_tick(&here, FIRST)?;
    let resident = |machine: &KvmMachine| machine.ram().blocks()[0].resident_bytes().map_err(said);
    let before = resident(&here)?;
    let there = machine(setup, None, None, None, &console)?;
    let first = move_guest(&here, &there, Way::Plain)?;
    let moved = resident(&there)?;
    println!(
        "LAB resident: {} MiB, {} MiB there; {first}, {} MiB free",
        before >> 20,
        moved >> 20,
        first.free_bytes >> 20
    );
    // By then, the driver has got its memory back and can report it again.
    console.wait_for_tick(&there, FIRST + 40)?;
    let last = machine(setup, None, None, Some(1024), &console)?;
    let second = move_guest(&there, &last, Way::MappedRam)?;
    println!("LAB then: {second}, {} MiB free", second.free_bytes >> 20);
    over(&last, &console, &EndReason::PoweredOff)?;
    let unused = console.of(guest::UNUSED);
    println!("LAB unused at its end: {unused:?}");
    let least = guest::FREED_BYTES as u64;
    ensure([first, second].iter().all(|moved| moved.free_bytes > 0), || {
        format!("{} and {} bytes were free", first.free_bytes, second.free_bytes)
    })?;
    ensure(unused.concat().iter().sum::<u64>() > 2 * least, || format!("{unused:?} bytes are unused"))?;
    console.check(setup, Some(TICKS), LONGEST_GAP + second.pause)?;
    Ok([before, moved, first.sent_bytes])
}

/// Runs the demo as an operator does, in separate programs.
fn demo() -> Result<(), Failure> {
    let kernel = Files::new()?.kernel();
    network::up("lo", None)?;
    let report = sterna_does(&[
        "demo".as_ref(),
        "--linux".as_ref(),
        "--ram=256M".as_ref(),
        "--kernel".as_ref(),
        kernel.as_os_str(),
    ])?;
    println!("LAB {}", report.replace('\n', "\nLAB "));
    ensure(report.contains("none lost, no word wrong"), || "it does not say that nothing was lost".to_owned())
}

fn over(machine: &KvmMachine, console: &Console, reason: &EndReason) -> Result<(), Failure> {
    match machine.wait_ended(PATIENCE) {
        Some(ended) if ended == *reason => Ok(()),
        Some(other) => Err(format!("{other}; it said last: {}", console.last())),
        None => Err(format!("it goes on after {PATIENCE:?}; it said last: {}", console.last())),
    }
}

fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
