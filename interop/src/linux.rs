//! Debian's kernel in the reference machine: it boots, moves while it works, and switches itself off.
#![allow(clippy::print_stdout)]

mod console;
pub mod guest;
mod network;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sterna::{
    Arrival, Capabilities, Compression, Incoming, Migration, Outcome, Parameters, SourceVm, TargetVm,
};
use sterna_vmm::{
    DiskMigration, DiskOptions, EndReason, GuestImage, KvmMachine, LinuxImage, MachineConfig, NetOptions,
};

use self::console::Console;
use crate::cpio::Archive;
use crate::scenarios::{Failure, ensure};

/// Where the lab has the kernel that guests boot.
pub(crate) const KERNEL: &str = "guest/vmlinuz";
/// What a guest's kernel needs to find its devices, and where the lab has it.
pub(crate) const MODULES: [&str; 5] =
    ["virtio_mmio", "virtio_blk", "virtio_net", "virtio_balloon", "virtio_rng"];
pub(crate) const GUEST_MODULES: &str = "guest/m";
const RAM: u64 = 160 << 20;
/// Of a guest that says what it does not use: Linux keeps 64 MiB more than it needs before it does.
const AMPLE_RAM: u64 = 512 << 20;
const DISK_BYTES: u64 = 8 << 20;
const PATIENCE: Duration = Duration::from_secs(180);
/// How long a clock of the guest may seem to stand still.
const LONGEST_GAP: Duration = Duration::from_secs(20);

/// A scenario.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// It runs only when it is chosen.
    pub(crate) is_long: bool,
    pub(crate) run: fn() -> Result<(), Failure>,
}

/// All of them. The short ones have between them everything that a guest may use.
pub(crate) fn scenarios() -> Vec<Scenario> {
    let short = |name, run| Scenario { name, is_long: false, run };
    let long = |name, run| Scenario { name, is_long: true, run };
    vec![
        short("linux boots with 2 vCPUs and switches itself off", || boots(2)),
        short("linux moves with its disk and its connection", || {
            moves(&working(1, DiskMigration::Shared), 2)
        }),
        long("linux boots with 1 vCPU", || boots(1)),
        long("linux resets the machine", || ends(guest::RESETS, &EndReason::Reset)),
        long("linux moves while it does nothing but write memory", || moves(&Setup::default(), 3)),
        long("linux with 2 vCPUs moves", || moves(&working(2, DiskMigration::Shared), 5)),
        short("linux takes its disk along", || {
            let setup = Setup { disk: Some(DiskMigration::Copy), ways: &Way::WITH_DISK, ..Setup::default() };
            moves(&setup, 1)
        }),
        long("linux gives back what it has freed, and that does not move", gives_back),
    ]
}

/// So many moves in a row of one guest that works, in every way.
pub(crate) fn many_moves(count: u64) -> Scenario {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    COUNT.store(count, Ordering::Relaxed);
    let run = || moves(&working(1, DiskMigration::Shared), COUNT.load(Ordering::Relaxed));
    Scenario { name: "linux moves many times in a row", is_long: false, run }
}

/// How a guest moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Multifd,
    Zstd,
    /// Into an image with RAM mapped, and out of it.
    MappedRam,
    /// Into a file as over a socket, and out of it.
    File,
}

impl Way {
    /// In turns.
    const ALL: [Self; 5] = [Self::Plain, Self::Multifd, Self::MappedRam, Self::Zstd, Self::File];
    /// Those that send a disk while its guest runs.
    const WITH_DISK: [Self; 2] = [Self::Multifd, Self::Zstd];

    fn parameters(self) -> (Parameters, Capabilities) {
        let multifd_compression = if self == Self::Zstd { Compression::Zstd } else { Compression::None };
        let params = Parameters { multifd_channels: 2, multifd_compression, ..Parameters::default() };
        let capabilities = Capabilities {
            return_path: !self.is_file(),
            multifd: matches!(self, Self::Multifd | Self::Zstd | Self::MappedRam),
            mapped_ram: self == Self::MappedRam,
            ..Capabilities::default()
        };
        (params, capabilities)
    }

    fn is_file(self) -> bool {
        matches!(self, Self::MappedRam | Self::File)
    }
}

/// How a machine is made, and what its guest does.
#[derive(Default)]
struct Setup {
    /// 0 is 1.
    vcpus: u8,
    /// Moves go in these ways in turns, and then rings track writes: in every second machine, in all with several vCPUs. Without
    /// any they are plain.
    ways: &'static [Way],
    disk: Option<DiskMigration>,
    has_network: bool,
    /// It says which memory it does not use.
    reports: bool,
    /// [`guest::RESETS`], or by switching the machine off.
    ends: &'static str,
}

/// A guest that uses everything.
fn working(vcpus: u8, disk: DiskMigration) -> Setup {
    Setup { vcpus, ways: &Way::ALL, disk: Some(disk), has_network: true, ..Setup::default() }
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
    /// Of the guest between two moves.
    const TICKS: u64 = 10;
    let peer = setup.has_network.then(network::Peer::start).transpose()?;
    let mut disk = setup.disk.map(|_| disk_image()).transpose()?;
    let (mut here, console) = booted(setup, disk.as_deref(), guest::UNTIL_TOLD)?;
    console.wait_for_tick(&here, TICKS)?;
    let mut longest_gap = LONGEST_GAP;
    for round in 1..=count {
        let ways = setup.ways;
        let way = ways.get(round as usize % ways.len().max(1)).copied().unwrap_or(Way::Plain);
        let rings = (ways.len() > 1 && (setup.vcpus > 1 || round.is_multiple_of(2))).then_some(1024);
        if setup.disk == Some(DiskMigration::Copy) {
            disk = Some(disk_image()?);
        }
        let there = machine(setup, disk.as_deref(), None, rings, &console)?;
        let begin = Instant::now();
        let moved = move_guest(&here, &there, way);
        if way.is_file() {
            // It stands still from the image's first byte to its last.
            longest_gap = longest_gap.max(LONGEST_GAP + begin.elapsed());
        }
        let arrived = moved.and_then(|()| {
            here = there;
            console.wait_for_tick(&here, console.ticks() + TICKS)
        });
        arrived.map_err(|why| format!("move {round}, {way:?}: {why}"))?;
    }
    // It reads its console, wherever it is.
    ensure(here.type_in(guest::END.as_bytes()) == guest::END.len(), || {
        "the console takes nothing".to_owned()
    })?;
    over(&here, &console, &EndReason::PoweredOff)?;
    let ticks = console.check(setup, None, longest_gap)?;
    if let Some(peer) = peer {
        let seen = peer.seen()?;
        println!("LAB the guest's peer: {} numbers, longest gap {:?}", seen.numbers, seen.longest_gap);
        let sent = console.of(guest::NETWORK);
        ensure(sent == [[seen.numbers, 0]], || format!("{seen:?}, and the guest says {sent:?}"))?;
        ensure(seen.longest_gap < longest_gap, || format!("{seen:?}"))?;
    }
    disk.map_or(Ok(()), |disk| guest::disk::check(&disk, ticks))
}

/// What the guest has freed is neither here any more nor there after a move.
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
    move_guest(&here, &there, Way::Plain)?;
    let moved = resident(&there)?;
    ensure(moved < after + freed / 4, || format!("{after} bytes moved, and {moved} arrived"))?;
    over(&there, &console, &EndReason::PoweredOff)?;
    console.check(&setup, Some(TICKS), LONGEST_GAP).map(drop)
}

/// A new disk of zeros.
fn disk_image() -> Result<PathBuf, Failure> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let path = PathBuf::from(format!("/disk{}", NEXT.fetch_add(1, Ordering::Relaxed)));
    let file = std::fs::File::create(&path).map_err(said)?;
    file.set_len(DISK_BYTES).map_err(said)?;
    Ok(path)
}

fn move_guest(from: &Arc<KvmMachine>, to: &Arc<KvmMachine>, way: Way) -> Result<(), Failure> {
    // The lab has no /tmp.
    let directory = tempfile::tempdir_in("/").map_err(said)?;
    let path = directory.path().join("s");
    let scheme = if way.is_file() { "file" } else { "unix" };
    let address = format!("{scheme}:{}", path.display()).parse().map_err(said)?;
    let (params, capabilities) = way.parameters();
    let receive = || {
        let to: Arc<dyn TargetVm> = Arc::clone(to) as _;
        Incoming::listen(to, &address, params.clone(), capabilities, Arc::new(())).map_err(said)
    };
    let send = || {
        let from: Arc<dyn SourceVm> = Arc::clone(from) as _;
        let migration = Migration::start(from, &address, params.clone(), capabilities, Arc::new(()));
        let migration = migration.map_err(said)?;
        let outcome = migration.wait();
        ensure(matches!(outcome, Outcome::Completed), || format!("{outcome:?}"))
    };
    let incoming = if way.is_file() {
        send()?;
        receive()?
    } else {
        let incoming = receive()?;
        send()?;
        incoming
    };
    let arrival = incoming.wait();
    ensure(matches!(arrival, Arrival::Completed(_)), || format!("{arrival:?}"))
}

/// Under QEMU 7.2's TCG a nested guest's XSETBV passes KVM by, so that the sizes that KVM tells of XSAVE's area are wrong.
const WITHOUT_XSAVE: &str = "noxsave";

/// A running machine whose guest ticks so many times.
fn booted(setup: &Setup, disk: Option<&Path>, ticks: u64) -> Result<(Arc<KvmMachine>, Console), Failure> {
    let console = Console::default();
    let command_line = format!(
        "console=ttyS0 panic=-1 {WITHOUT_XSAVE} LAB={} {}={ticks} {}={} {}={} {}={} {}={}",
        guest::NAME,
        guest::TICKS,
        guest::USES_DISK,
        if setup.disk.is_some() { "yes" } else { "no" },
        guest::USES_NETWORK,
        if setup.has_network { "yes" } else { "no" },
        guest::REPORTS,
        if setup.reports { "yes" } else { "no" },
        guest::ENDS,
        setup.ends,
    );
    let image = LinuxImage {
        kernel: Path::new("/").join(KERNEL),
        initrd: Some(initramfs()?),
        command_line: command_line.trim_end().to_owned(),
    };
    let machine = machine(setup, disk, Some(GuestImage::Linux(image)), None, &console)?;
    machine.resume().map_err(said)?;
    Ok((machine, console))
}

fn machine(
    setup: &Setup,
    disk: Option<&Path>,
    guest: Option<GuestImage>,
    dirty_ring_size: Option<u32>,
    console: &Console,
) -> Result<Arc<KvmMachine>, Failure> {
    let nets = if setup.has_network { vec![card()] } else { Vec::new() };
    let taps: Vec<String> = nets.iter().map(|net| net.tap.clone()).collect();
    let options = |(path, migration)| {
        let mut options = DiskOptions::new(path);
        options.migration = migration;
        options
    };
    let disks = disk.zip(setup.disk).map(options).into_iter().collect();
    let config = MachineConfig {
        vcpus: setup.vcpus.max(1),
        ram_bytes: if setup.reports { AMPLE_RAM } else { RAM },
        dirty_ring_size,
        incoming: guest.is_none(),
        disks,
        nets,
        free_page_reporting: setup.reports,
        entropy: setup.disk.is_some(),
        guest,
        serial: Box::new(console.clone()),
        ..MachineConfig::new("linux")
    };
    let machine = KvmMachine::new(config).map_err(said)?;
    taps.iter().try_for_each(|tap| network::join(tap))?;
    Ok(machine)
}

/// At a tap that no other machine has.
fn card() -> NetOptions {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NetOptions::new(format!("tap{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// This program and its libraries, made once.
fn initramfs() -> Result<PathBuf, Failure> {
    let path = PathBuf::from("/guest/initrd");
    if !path.exists() {
        let mut archive = Archive::default();
        for directory in ["dev", "proc", "sys"] {
            archive.directory(directory);
        }
        let mut files = vec![PathBuf::from("/init")];
        for directory in ["/lib", "/lib64"] {
            files.extend(libraries(directory.as_ref())?);
        }
        let modules = Path::new("/").join(GUEST_MODULES);
        files.extend(libraries(&modules)?);
        archive.directory("m");
        for file in files {
            let bytes = std::fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
            let name = match file.strip_prefix(&modules) {
                Ok(module) => Path::new("m").join(module),
                Err(_) => file,
            };
            archive.file(name.to_string_lossy().trim_start_matches('/'), &bytes);
        }
        std::fs::write(&path, archive.finish()).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(path)
}

fn libraries(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type().map_err(said)?.is_dir() {
            true => files.extend(libraries(&entry.path())?),
            false => files.push(entry.path()),
        }
    }
    Ok(files)
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
