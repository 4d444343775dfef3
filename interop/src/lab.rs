//! The lab VM: QEMU's TCG boots Debian's stock kernel, whose only program is this one, as init. So things are had where the
//! host has none: with emulated SVM and nested paging real KVM ([`Kind::Kvm`]), with soft-RoCE RDMA ([`Kind::Rdma`]), also
//! between two VMs ([`Kind::RdmaPair`]).
//!
//! Needs `qemu-system-x86_64`, `apt-get`, `dpkg-deb`, `xz`, `ldd` and `strip`. The kernel's package is downloaded
//! once into `target/lab`. One vCPU: with two, nested guests under QEMU 7.2 sometimes bring the kernel down.
//!
//! For RDMA and Linux the host shares two directories over 9p, neither of which the VM can write: the root `qemu`, which has QEMU, the
//! RDMA libraries, iproute2 and the like, and the target directory with this program. For Linux there is also a disk with a root of
//! Debian packages, which the VM's guests boot.

mod inside;
mod modules;
mod rdma;
mod selection;
mod vm;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use crate::kernel::output;
use crate::scenarios::Failure;
use crate::{Root, kernel, linux};
pub(crate) use inside::mount;
pub use inside::{run_as_init, run_in_tree_as_asked};
pub use selection::Selection;
use sterna_cli::cpio;
use vm::Vm;

/// Before a line of JSON that holds the bench's results.
pub const RESULTS: &str = "LAB-JSON ";
/// The line that ends a run, before the number of failures.
const DONE: &str = "LAB-DONE";
/// The line that says that init runs, and how often it comes whatever the scenarios do.
const ALIVE: &str = "LAB-ALIVE";
const ALIVE_EVERY: Duration = Duration::from_secs(20);
/// After so long without any line the VM stands still. QEMU 7.2's TCG can go round for ever with a halted CPU that runs a nested guest
/// (seen once in forty runs): its own timers stand still, too.
const SILENCE: Duration = Duration::from_secs(150);
/// How often it is booted at most.
const BOOTS: u32 = 2;
/// How long the VM may take, boot and all; shorter than the suite's limits.
const LIMIT: Duration = Duration::from_secs(500);
/// On a busy host a guest's ten moves take longer than everything else.
const LINUX_LIMIT: Duration = Duration::from_secs(1000);
const CHOSEN_LIMIT: Duration = Duration::from_secs(1700);
const LONG_LIMIT: Duration = Duration::from_secs(5400);

/// How a run of the lab ended.
#[derive(Debug)]
pub enum Outcome {
    /// All scenarios passed.
    Passed,
    /// So many failed, or the VM did not get to the end (-1).
    Failed(i32),
    /// The lab cannot be built here.
    Skipped(String),
}

/// What a lab has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Real KVM.
    Kvm,
    /// Real KVM, and a kernel for its guests.
    Linux,
    /// An RDMA device.
    Rdma,
    /// Two VMs, each with an RDMA device, joined by a wire.
    RdmaPair,
}

impl Kind {
    /// The variable of init's environment that names it. The kernel takes it from its command line.
    const VARIABLE: &str = "LAB";
    const ALL: [Kind; 4] = [Kind::Kvm, Kind::Linux, Kind::Rdma, Kind::RdmaPair];

    /// The name of it in commands.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Kvm => "kvm",
            Kind::Linux => "linux",
            Kind::Rdma => "rdma",
            Kind::RdmaPair => "rdma-pair",
        }
    }

    /// What the kernel's command line says.
    fn of_environment() -> Self {
        std::env::var(Self::VARIABLE).ok().and_then(|name| Self::named(&name)).unwrap_or(Self::Kvm)
    }

    /// The kind of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    fn modules(self) -> &'static [&'static str] {
        match self {
            Kind::Kvm => &["kvm-amd"],
            Kind::Linux => &["kvm-amd", "tun", "bridge", "virtio_pci", "virtio_blk", "9pnet_virtio", "9p"],
            // rxe asks for the checksums by name, not as modules it depends on.
            Kind::Rdma | Kind::RdmaPair => &[
                "virtio_pci",
                "virtio_net",
                "9pnet_virtio",
                "9p",
                "crc32_generic",
                "crc32c_generic",
                "ib_uverbs",
                "rdma_ucm",
                "rdma_rxe",
                "dummy",
                "veth",
                "bridge",
                "sch_netem",
            ],
        }
    }

    fn memory_mib(self, is_bench: bool) -> u32 {
        match self {
            Kind::Kvm => 1024,
            // Two disks of 2 GiB are in it.
            Kind::Linux if is_bench => 8192,
            Kind::Linux => 3072,
            Kind::Rdma | Kind::RdmaPair => 3072,
        }
    }
}

/// The variable of init's environment that names this program in the target directory.
const PROGRAM_VARIABLE: &str = "LAB_PROGRAM";
const TREE_TAG: &str = "tree";
const TARGET_TAG: &str = "target";

/// What a VM is booted with.
struct Prepared {
    kind: Kind,
    kernel: PathBuf,
    initramfs: PathBuf,
    exe: PathBuf,
    /// Tags and directories that are shared.
    shares: Vec<(&'static str, PathBuf)>,
    /// A disk; what the VM writes to it is forgotten.
    disk: Option<PathBuf>,
}

/// Boots the lab and runs the scenarios of that kind that are chosen in it; `report` gets each line that it prints.
pub fn run(kind: Kind, selection: &Selection, report: impl FnMut(&str)) -> Outcome {
    match prepare(kind) {
        Ok(prepared) => boot(&prepared, selection, report).unwrap_or_else(Outcome::Skipped),
        Err(why) => Outcome::Skipped(why),
    }
}

fn prepare(kind: Kind) -> Result<Prepared, Failure> {
    for tool in ["qemu-system-x86_64", "apt-get", "dpkg-deb", "xz", "ldd", "strip"] {
        output(Command::new("sh").args(["-c", &format!("command -v {tool}")]))
            .map_err(|_| format!("{tool} is not installed"))?;
    }
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    let target = exe.ancestors().nth(2).ok_or("this program lies outside of a target directory")?;
    let shares = match kind {
        Kind::Kvm => Vec::new(),
        Kind::Linux | Kind::Rdma | Kind::RdmaPair => {
            vec![(TREE_TAG, tree()?), (TARGET_TAG, target.to_path_buf())]
        }
    };
    let lab = target.join("lab");
    let root = kernel::unpacked(&lab)?;
    let kernel = kernel::image(&lab)?;
    let mut disk = None;
    if kind == Kind::Linux {
        let files = linux::Files::new()?;
        files.make(&lab, program(&exe)?, &modules::with_dependencies(&root, &linux::MODULES)?)?;
        disk = files.root_disk();
    }
    let mut archive = program(&exe)?;
    for (index, module) in modules::with_dependencies(&root, kind.modules())?.iter().enumerate() {
        archive.file(&format!("m/{index:02}"), module);
    }
    let initramfs = lab.join(format!("initramfs-{}", kind.name()));
    std::fs::write(&initramfs, archive.finish())
        .map_err(|error| format!("{}: {error}", initramfs.display()))?;
    Ok(Prepared { kind, kernel, initramfs, shares, disk, exe: exe.clone() })
}

/// This program as an init, with its libraries. Without what debuggers read it is a fifth as long, and VMs boot sooner.
fn program(exe: &Path) -> Result<cpio::Archive, Failure> {
    let stripped = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    output(Command::new("strip").arg("-o").arg(stripped.path()).arg(exe))?;
    let mut archive = cpio::Archive::default();
    for directory in ["dev", "proc", "sys", "m", "root"] {
        archive.directory(directory);
    }
    archive.file("init", &read(stripped.path())?);
    for library in libraries(exe)? {
        archive.file(library.trim_start_matches('/'), &read(Path::new(&library))?);
    }
    Ok(archive)
}

/// The Debian root that the VM sees as its own.
fn tree() -> Result<PathBuf, Failure> {
    let rebuild = "`cargo xtask roots qemu` builds it, as root";
    let root = Root::qemu().ok_or_else(|| format!("there is no root `qemu`: {rebuild}"))?;
    for package in ["ibverbs-providers", "iproute2", "iputils-ping", "iperf3", "e2fsprogs"] {
        if root.version(package).is_none() {
            return Err(format!("the root {} has no {package}: {rebuild}", root.path().display()));
        }
    }
    root.path().canonicalize().map_err(|error| format!("{}: {error}", root.path().display()))
}

/// What the dynamic linker will ask for.
fn libraries(exe: &Path) -> Result<Vec<String>, Failure> {
    let listing = output(Command::new("ldd").arg(exe))?;
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
    Ok(listing.lines().filter_map(path).collect())
}

/// Boots the VM, or both, and reports until the first has run everything. A VM that stands still is ended and booted once more.
fn boot(
    prepared: &Prepared,
    selection: &Selection,
    mut report: impl FnMut(&str),
) -> Result<Outcome, Failure> {
    let until = Instant::now()
        + match selection {
            Selection { is_bench: true, .. } | Selection { reliability: Some(_), .. } => LONG_LIMIT,
            _ if selection.is_all_short() && prepared.kind == Kind::Linux => LINUX_LIMIT,
            _ if selection.is_all_short() => LIMIT,
            _ => CHOSEN_LIMIT,
        };
    for _ in 1..BOOTS {
        if let Some(outcome) = boot_once(prepared, selection, until, &mut report)? {
            return Ok(outcome);
        }
        report(&format!(
            "LAB the VM said nothing for {SILENCE:?}: its emulator stands still, and it is booted again"
        ));
    }
    Ok(boot_once(prepared, selection, until, &mut report)?.unwrap_or(Outcome::Failed(-1)))
}

/// Nothing if the VM stands still.
fn boot_once(
    prepared: &Prepared,
    selection: &Selection,
    until: Instant,
    report: &mut impl FnMut(&str),
) -> Result<Option<Outcome>, Failure> {
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let (socket, is_pair) = (directory.path().join("wire"), prepared.kind == Kind::RdmaPair);
    let start = |side| Vm::start(prepared, selection, is_pair.then_some((socket.as_path(), side)));
    let (vm, other) = (start(0)?, is_pair.then(|| start(1)).transpose()?);
    let outcome = loop {
        let left = until.saturating_duration_since(Instant::now());
        match vm.line(SILENCE.min(left)) {
            Ok(line) if line == ALIVE => {}
            Ok(line) => {
                report(&line);
                match line.strip_prefix(DONE).map(|failures| failures.trim().parse()) {
                    Some(Ok(0)) => break Outcome::Passed,
                    Some(Ok(count)) => break Outcome::Failed(count),
                    Some(Err(_)) => break Outcome::Failed(-1),
                    None => {}
                }
            }
            Err(RecvTimeoutError::Timeout) if left > SILENCE => return Ok(None),
            Err(_) => break Outcome::Failed(-1),
        }
    };
    if !matches!(outcome, Outcome::Passed) {
        while let Some(line) = other.as_ref().and_then(|other| other.line(Duration::ZERO).ok()) {
            report(&format!("the other VM: {line}"));
        }
    }
    Ok(Some(outcome))
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}
