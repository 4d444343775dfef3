//! A QEMU as primary, with QEMU or Sterna as the standby.

use std::io::Read as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::json;
use sterna_benches::clock::CpuClock;
use sterna_benches::words::GuestWords;
use sterna_interop::{Builder, Guest, Qemu, Ram, Root};
use sterna_qmp::{Client, QmpEvent};
use tempfile::TempDir;

use crate::Failure;
use crate::guest::writer;
use crate::pauses::{Costs, Measured, Watched, follow};
use crate::plan::{Cell, Load, Pair};
use crate::process::{PATIENCE, Program, ask, monitor, number, seconds, wait};

/// Time until the firmware has found no disk.
const FIRMWARE: Duration = Duration::from_millis(1500);

/// A QEMU with a protected guest, and the processes that protect it.
pub(crate) struct Protected {
    pub(crate) primary: Qemu,
    clock: CpuClock,
    words: Option<GuestWords>,
    pub(crate) other: Other,
    /// Process and monitor of `sterna protect`.
    guard: Option<(Program, Client)>,
    pub(crate) place: TempDir,
}

/// The standby's side.
pub(crate) enum Other {
    Qemu { secondary: Box<Qemu>, clock: CpuClock },
    Standby { program: Program, monitor: Box<Client> },
}

/// Measures a primary for the cell's time.
pub(crate) fn measure(root: &Root, sterna: &Path, cell: &Cell) -> Result<Measured, Failure> {
    let mut protected = Protected::begin(root, sterna, cell, &[])?;
    let measured = follow(cell.time, &mut protected);
    measured.map_err(|why| format!("{why}; {} {}", protected.primary.log().trim(), protected.said()))
}

/// The machine of both sides.
pub(crate) fn builder(root: &Root, cell: &Cell) -> Builder {
    let guest = match cell.load {
        Load::Idle => Guest::None,
        Load::Talker => Guest::Talker,
        load => writer(load),
    };
    Qemu::builder(root).kvm_if_any().memory_mib(cell.ram_mib).ram(Ram::Memfd).guest(guest)
}

impl Protected {
    /// Starts a protection, which may still be seeding. `more`: additional arguments of `sterna standby`.
    pub(crate) fn begin(
        root: &Root,
        sterna: &Path,
        cell: &Cell,
        more: &[std::ffi::OsString],
    ) -> Result<Self, Failure> {
        let place = tempfile::tempdir().map_err(|error| format!("no temporary directory: {error}"))?;
        let builder = builder(root, cell);
        let (mut primary, words) = begun(&builder, place.path(), cell.load)?;
        let clock = CpuClock::of(primary.pid())?;
        let (other, guard) = match cell.pair {
            Pair::QemuQemu => (secondary(builder, &mut primary, place.path(), cell)?, None),
            _ => standby(sterna, &mut primary, place.path(), cell, more)?,
        };
        Ok(Self { primary, clock, words, other, guard, place })
    }

    /// Log output of Sterna's programs.
    fn said(&self) -> String {
        let read = |name: &str| std::fs::read_to_string(self.place.path().join(name)).unwrap_or_default();
        ["standby.log", "protect.log"].map(read).join(" ").trim().to_owned()
    }

    /// Simulates the loss of the primary's host: kills all processes of the primary.
    pub(crate) fn lose_primary(&mut self) {
        self.primary.kill();
        if let Some((program, _)) = &mut self.guard {
            program.kill();
        }
    }

    pub(crate) fn standby_monitor(&mut self) -> Option<&mut Client> {
        match &mut self.other {
            Other::Qemu { .. } => None,
            Other::Standby { monitor, .. } => Some(monitor),
        }
    }
}

impl Watched for Protected {
    fn next_event(&mut self) -> Result<Option<QmpEvent>, Failure> {
        self.primary.qmp().next_event(Duration::from_secs(1)).map_err(|error| error.to_string())
    }

    fn costs(&mut self) -> Result<Costs, Failure> {
        let gaps = self.words.as_ref().map(GuestWords::gaps).transpose()?;
        let guards = self.guard.as_ref().map(|(program, _)| program.clock.read()).unwrap_or_default();
        let primary_cpu = self.clock.read() + guards;
        let (sent, standby_cpu) = match &mut self.other {
            // QEMU counts neither pages nor bytes after the seeding.
            Other::Qemu { clock, .. } => (None, clock.read()),
            Other::Standby { program, monitor } => {
                let report = ask(monitor, "x-sterna-query-protection")?;
                let sent = (number(&report, "pages")?, number(&report, "received-bytes")?);
                (Some(sent), program.clock.read())
            }
        };
        Ok(Costs { sent, primary_cpu, standby_cpu, gaps })
    }

    fn transfer(&mut self) -> Result<Option<Duration>, Failure> {
        let Some(monitor) = self.standby_monitor() else { return Ok(None) };
        seconds(&ask(monitor, "x-sterna-query-protection")?, "last-time").map(Some)
    }

    fn output_delay(&mut self) -> Result<Option<[Duration; 2]>, Failure> {
        let Some((_, monitor)) = &mut self.guard else { return Ok(None) };
        let report = ask(monitor, "x-sterna-query-protection")?;
        if report["output_released_packets"].as_u64().unwrap_or_default() == 0 {
            return Ok(None);
        }
        Ok(Some([seconds(&report, "output_delay_p50")?, seconds(&report, "output_delay_p99")?]))
    }

    fn standby(&self) -> u32 {
        match &self.other {
            Other::Qemu { secondary, .. } => secondary.pid(),
            Other::Standby { program, .. } => program.id(),
        }
    }
}

/// Starts a primary and waits until its guest does the work of `load`.
fn begun(builder: &Builder, place: &Path, load: Load) -> Result<(Qemu, Option<GuestWords>), Failure> {
    if load == Load::Talker {
        let (netdev, talks) = network(place)?;
        let primary = builder.clone().args(&["-netdev", &netdev]).spawn()?;
        talks.recv_timeout(PATIENCE).map_err(|_| "the guest says nothing".to_owned())?;
        return Ok((primary, None));
    }
    let mut primary = builder.clone().spawn()?;
    if load == Load::Idle {
        std::thread::sleep(FIRMWARE);
        return Ok((primary, None));
    }
    primary.wait_for_ticks(1)?;
    let words = GuestWords::of_process(primary.pid())?;
    words.set_pace(load.pages_per_second())?;
    words.clear_gaps()?;
    Ok((primary, Some(words)))
}

/// A network that receives all packets of the card. Returns the netdev option, and a channel that reports
/// packets of the guest.
fn network(place: &Path) -> Result<(String, Receiver<()>), Failure> {
    let path = place.join("network");
    let listener = UnixListener::bind(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let (tells, told) = channel();
    std::thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let mut piece = [0; 1 << 16];
        while stream.read(&mut piece).is_ok_and(|length| length > 0) {
            // The receiver may have been dropped.
            let _ = tells.send(());
        }
    });
    Ok((format!("stream,id=n0,server=off,addr.type=unix,addr.path={}", path.display()), told))
}

fn settings(cell: &Cell) -> (Vec<&'static str>, serde_json::Value) {
    let mut capabilities = vec!["x-colo", "return-path"];
    capabilities.extend((cell.channels > 0).then_some("multifd"));
    let parameters = json!({
        "max-bandwidth": 0, "x-checkpoint-delay": cell.delay.as_millis() as u64, "multifd-channels": cell.channels.max(1),
    });
    (capabilities, parameters)
}

fn secondary(builder: Builder, primary: &mut Qemu, place: &Path, cell: &Cell) -> Result<Other, Failure> {
    let uri = format!("unix:{}", place.join("stream").display());
    let (capabilities, parameters) = settings(cell);
    let mut secondary = Box::new(builder.incoming_defer().spawn()?);
    secondary.capabilities(&capabilities)?;
    secondary.parameters(json!({ "multifd-channels": cell.channels.max(1) }))?;
    secondary.start_incoming(&uri)?;
    primary.capabilities(&capabilities)?;
    primary.parameters(parameters)?;
    primary.start_migration(&uri)?;
    let clock = CpuClock::of(secondary.pid())?;
    Ok(Other::Qemu { secondary, clock })
}

type StandbyAndGuard = (Other, Option<(Program, Client)>);

fn standby(
    sterna: &Path,
    primary: &mut Qemu,
    place: &Path,
    cell: &Cell,
    more: &[std::ffi::OsString],
) -> Result<StandbyAndGuard, Failure> {
    let at = |name: &str| format!("unix:{}", place.join(name).display());
    let is_guarded = cell.pair == Pair::QemuSterna;
    let arbiter = format!("--arbiter=file:{}", place.join("arbiter").display());
    std::fs::create_dir(place.join("arbiter")).map_err(|error| error.to_string())?;
    let channels = (cell.channels > 0).then(|| format!("--channels={}", cell.channels));
    let mut command = Command::new(sterna);
    command.args(["standby", &format!("listen:{}", at("stream")), "--qmp", &at("standby")]);
    command.arg("--image").arg(place.join("image"));
    if is_guarded {
        command.args([&arbiter, "--fence=true"]);
    }
    command.args(&channels).args(more);
    let program = Program::start(&mut command, &place.join("standby.log"))?;
    let standby = Other::Standby { program, monitor: Box::new(monitor(&place.join("standby"))?) };
    if !is_guarded {
        let (capabilities, parameters) = settings(cell);
        primary.capabilities(&capabilities)?;
        primary.parameters(parameters)?;
        primary.start_migration(&at("stream"))?;
        return Ok((standby, None));
    }
    let mut command = Command::new(sterna);
    command.args(["protect", &format!("unix:{}", primary.operator_socket().display()), &at("stream")]);
    command.args(["--qmp", &at("protect"), "--set", "max-bandwidth=0", &arbiter]).args(&channels);
    command.arg(format!("--checkpoint-delay={}", cell.delay.as_millis()));
    let program = Program::start(&mut command, &place.join("protect.log"))?;
    let socket = place.join("protect");
    let guard = wait("sterna protect", Duration::from_millis(5), || {
        Ok(if socket.exists() { Some(monitor(&socket)?) } else { None })
    });
    let why = |why: Failure| {
        let said = std::fs::read_to_string(place.join("protect.log")).unwrap_or_default();
        format!("{why}: {}", said.trim())
    };
    Ok((standby, Some((program, guard.map_err(why)?))))
}
