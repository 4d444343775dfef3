//! Debian's kernel in the reference machine: it boots, moves while it works, and switches itself off.

pub mod guest;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::{Arrival, Capabilities, Incoming, Migration, Outcome, Parameters};
use sterna_vmm::{EndReason, GuestImage, KvmMachine, LinuxImage, MachineConfig};

use crate::cpio::Archive;
use crate::scenarios::{Failure, ensure};

/// Where the lab has the kernel that guests boot.
pub(crate) const KERNEL: &str = "guest/vmlinuz";
const RAM: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(180);
/// How long a clock of the guest may seem to stand still.
const LONGEST_GAP: Duration = Duration::from_secs(5);

/// A scenario by its name.
pub(crate) type Named = (String, Run);
type Run = fn() -> Result<(), Failure>;

/// All of them.
pub(crate) fn scenarios() -> Vec<Named> {
    let all: [(&str, Run); 5] = [
        ("linux boots and switches itself off", || boots(1)),
        ("linux boots with 2 vCPUs", || boots(2)),
        ("linux resets the machine", || ends(guest::RESETS, &EndReason::Reset)),
        ("linux moves three times while it works", || moves(1, false)),
        ("linux moves over multifd, writes tracked by rings", || moves(1, true)),
    ];
    all.into_iter().map(|(name, run)| (name.to_owned(), run)).collect()
}

fn boots(vcpus: u8) -> Result<(), Failure> {
    let (machine, console) = booted(vcpus, 20, "")?;
    over(&machine, &console, &EndReason::PoweredOff)?;
    console.check(vcpus, 20)
}

fn ends(how: &str, reason: &EndReason) -> Result<(), Failure> {
    let (machine, console) = booted(1, 1, how)?;
    over(&machine, &console, reason)
}

fn moves(vcpus: u8, with_lanes: bool) -> Result<(), Failure> {
    const TICKS: u64 = 150;
    let (mut here, console) = booted(vcpus, TICKS, "")?;
    for round in 1..=3 {
        console.wait_for(&here, &format!("{} {} ", guest::TICK, round * 30))?;
        let there = machine(vcpus, with_lanes, None, &console)?;
        migrate(&here, &there, with_lanes)?;
        here = there;
    }
    over(&here, &console, &EndReason::PoweredOff)?;
    console.check(vcpus, TICKS)
}

fn migrate(from: &Arc<KvmMachine>, to: &Arc<KvmMachine>, with_lanes: bool) -> Result<(), Failure> {
    // The lab has no /tmp.
    let directory = tempfile::tempdir_in("/").map_err(said)?;
    let address = format!("unix:{}", directory.path().join("s").display()).parse().map_err(said)?;
    let params = || Parameters { multifd_channels: 2, ..Parameters::default() };
    let capabilities = || Capabilities { return_path: true, multifd: with_lanes, ..Capabilities::default() };
    let observer = || Arc::new(());
    let incoming = Incoming::listen(Arc::clone(to) as _, &address, params(), capabilities(), observer())
        .map_err(said)?;
    let migration = Migration::start(Arc::clone(from) as _, &address, params(), capabilities(), observer())
        .map_err(said)?;
    let outcome = migration.wait();
    ensure(matches!(outcome, Outcome::Completed), || format!("{outcome:?}"))?;
    let arrival = incoming.wait();
    ensure(matches!(arrival, Arrival::Completed(_)), || format!("{arrival:?}"))
}

/// Under QEMU 7.2's TCG a nested guest's XSETBV passes KVM by, so that the sizes that KVM tells of XSAVE's area are wrong.
const WITHOUT_XSAVE: &str = "noxsave";

/// A running machine whose guest ticks so many times.
fn booted(vcpus: u8, ticks: u64, how: &str) -> Result<(Arc<KvmMachine>, Console), Failure> {
    let console = Console::default();
    let command_line = format!(
        "console=ttyS0 panic=-1 {WITHOUT_XSAVE} LAB={} {}={ticks} {}={how}",
        guest::NAME,
        guest::TICKS,
        guest::ENDS
    );
    let image = LinuxImage {
        kernel: Path::new("/").join(KERNEL),
        initrd: Some(initramfs()?),
        command_line: command_line.trim_end().to_owned(),
    };
    let machine = machine(vcpus, false, Some(GuestImage::Linux(image)), &console)?;
    machine.resume().map_err(said)?;
    Ok((machine, console))
}

fn machine(
    vcpus: u8,
    with_rings: bool,
    guest: Option<GuestImage>,
    console: &Console,
) -> Result<Arc<KvmMachine>, Failure> {
    let config = MachineConfig {
        vcpus,
        ram_bytes: RAM,
        dirty_ring_size: with_rings.then_some(1024),
        incoming: guest.is_none(),
        guest,
        serial: Box::new(console.clone()),
        ..MachineConfig::new("linux")
    };
    KvmMachine::new(config).map_err(said)
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
        for file in files {
            let bytes = std::fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
            archive.file(file.to_string_lossy().trim_start_matches('/'), &bytes);
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

/// What the guest says, in whichever machine it is.
#[derive(Clone, Default)]
struct Console(Arc<Mutex<Vec<u8>>>);

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Console {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }

    fn last(&self) -> String {
        let text = self.text();
        let lines: Vec<&str> = text.lines().rev().take(12).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
    }

    fn wait_for(&self, machine: &KvmMachine, text: &str) -> Result<(), Failure> {
        let begin = Instant::now();
        while !self.text().contains(text) {
            if let Some(reason) = machine.ended() {
                return Err(format!("{reason}; it said last: {}", self.last()));
            }
            ensure(begin.elapsed() < PATIENCE, || format!("no `{text}`; it said last: {}", self.last()))?;
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// It has ticked so often, its clocks never went back or stood still for long, and its kernel has nothing to complain of.
    fn check(&self, vcpus: u8, ticks: u64) -> Result<(), Failure> {
        let text = self.text();
        let of = |word: &str| -> Vec<Vec<u64>> {
            let lines = text.lines().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
            lines
                .map(|line| line.split(' ').filter_map(|number| number.trim().parse().ok()).collect())
                .collect()
        };
        ensure(of(guest::CPUS) == [[u64::from(vcpus)]], || format!("CPUs: {:?}", of(guest::CPUS)))?;
        let seen = of(guest::TICK);
        ensure(seen.len() as u64 == ticks, || {
            format!("{} ticks; it said last: {}", seen.len(), self.last())
        })?;
        for (number, pair) in (1..).zip(seen.windows(2)) {
            let [[before, realtime, monotonic], [after, later_realtime, later_monotonic]] =
                [&pair[0][..], &pair[1][..]]
            else {
                return Err(format!("{pair:?} are no ticks"));
            };
            ensure(*before == number && *after == number + 1, || {
                format!("tick {after} comes after {before}")
            })?;
            for (clock, before, after) in
                [("real time", realtime, later_realtime), ("monotonic time", monotonic, later_monotonic)]
            {
                let gap = after.checked_sub(*before).map(Duration::from_millis);
                ensure(gap.is_some_and(|gap| gap < LONGEST_GAP), || {
                    format!("{clock} went from {before} to {after} ms at tick {number}")
                })?;
            }
        }
        ensure(of(guest::WRONG) == [[0]], || format!("wrong words of memory: {:?}", of(guest::WRONG)))?;
        let complaints: Vec<&str> = text.lines().filter(|line| line.starts_with(guest::COMPLAINT)).collect();
        ensure(complaints.is_empty(), || format!("{complaints:?}"))
    }
}

fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
