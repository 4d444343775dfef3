//! The lab VM provides devices that the host may lack. QEMU's TCG boots Debian's stock kernel with this
//! program as init. [`Kind::Kvm`] has real KVM on emulated SVM with nested paging. [`Kind::Rdma`] has RDMA
//! with soft-RoCE, [`Kind::RdmaPair`] also between two VMs.
//!
//! It needs `qemu-system-x86_64`, `apt-get`, `dpkg-deb`, `xz`, `ldd` and `strip`. The kernel's package is
//! downloaded once into `target/lab`. The VM has one vCPU: with two, nested guests under QEMU 7.2 sometimes
//! crash the kernel.
//!
//! For RDMA and Linux, the host shares two directories over 9p, and the VM can write neither. The root `qemu`
//! contains QEMU, the RDMA libraries, iproute2 and other tools. The target directory contains this program.
//! For Linux there is also a disk with a root of Debian packages, which the VM's guests boot.

mod inside;
mod modules;
mod rdma;
mod selection;
mod vm;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use crate::kernel::output;
use crate::scenarios::Failure;
use crate::{Root, kernel, linux};
pub(crate) use inside::mount;
pub use inside::{run_as_init, run_in_tree_as_asked};
pub use selection::Selection;
use sterna_cli::cpio;
use sterna_testing::CoreTime;
use vm::Vm;

/// Prefix of a line of JSON with the bench's results.
pub const RESULTS: &str = "LAB-JSON ";
/// Prefix of the line that ends a run; the number of failures follows.
const DONE: &str = "LAB-DONE";
/// The line that shows that init is alive, and the interval between these lines.
const ALIVE: &str = "LAB-ALIVE";
const ALIVE_EVERY: Duration = Duration::from_secs(20);
/// Without any line for this time, the VM counts as hung. All limits are in time of a quiet machine. QEMU
/// 7.2's TCG can spin with a halted CPU that runs a nested guest (seen once in forty runs). Its own timers
/// then stop, too.
const SILENCE: Duration = Duration::from_secs(150);
/// Interval at which the VM's time is compared with the limits.
const STEP: Duration = Duration::from_secs(1);
/// Limit of the number of boots.
const BOOTS: u32 = 2;
/// Time limit of a run, including the boot. It is shorter than the suite's limits.
const LIMIT: Duration = Duration::from_secs(500);
/// Time limit of a run with Linux guests. On a busy host, a guest's ten moves take longer than everything
/// else.
const LINUX_LIMIT: Duration = Duration::from_secs(1000);
const CHOSEN_LIMIT: Duration = Duration::from_secs(1700);
const LONG_LIMIT: Duration = Duration::from_secs(5400);

/// Result of a run of the lab.
#[derive(Debug)]
pub enum Outcome {
    /// All scenarios passed.
    Passed,
    /// Number of failed scenarios, or -1 if the VM did not finish.
    Failed(i32),
    /// The lab cannot be built here, for this reason.
    Skipped(String),
}

/// The devices and programs of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Real KVM with emulated SVM.
    Kvm,
    /// Real KVM, and a kernel for its guests.
    Linux,
    /// An RDMA device in one VM.
    Rdma,
    /// Two VMs, each with an RDMA device, joined by a wire.
    RdmaPair,
}

impl Kind {
    /// Variable of init's environment that names the kind. The kernel takes it from its command line.
    const VARIABLE: &str = "LAB";
    const ALL: [Kind; 4] = [Kind::Kvm, Kind::Linux, Kind::Rdma, Kind::RdmaPair];

    /// Name of the kind in commands.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Kvm => "kvm",
            Kind::Linux => "linux",
            Kind::Rdma => "rdma",
            Kind::RdmaPair => "rdma-pair",
        }
    }

    /// The kind on the kernel's command line.
    fn of_environment() -> Self {
        std::env::var(Self::VARIABLE).ok().and_then(|name| Self::named(&name)).unwrap_or(Self::Kvm)
    }

    /// Finds the kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    fn modules(self) -> &'static [&'static str] {
        match self {
            Kind::Kvm => &["kvm-amd"],
            Kind::Linux => {
                &["kvm-amd", "tun", "bridge", "virtio_pci", "virtio_blk", "9pnet_virtio", "9p", "softdog"]
            }
            // rxe requests the checksums by name; they are not in its list of dependencies.
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
            // The VM's memory contains two disks of 2 GiB.
            Kind::Linux if is_bench => 8192,
            Kind::Linux => 3072,
            Kind::Rdma | Kind::RdmaPair => 3072,
        }
    }
}

/// Variable of init's environment that names this program in the target directory.
const PROGRAM_VARIABLE: &str = "LAB_PROGRAM";
const TREE_TAG: &str = "tree";
const TARGET_TAG: &str = "target";

/// Files and settings with which a VM is booted.
struct Prepared {
    kind: Kind,
    kernel: PathBuf,
    initramfs: PathBuf,
    exe: PathBuf,
    /// Tags and directories that are shared with the VM.
    shares: Vec<(&'static str, PathBuf)>,
    /// A disk. The VM's writes to it are discarded.
    disk: Option<PathBuf>,
}

/// Boots the lab and runs the selected scenarios of this kind. `report` is called with each line of output.
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

/// Packs this program as an init, with its libraries. Without debug information it is a fifth as long, so VMs
/// boot sooner.
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

/// Path of the Debian root that the VM mounts as its own.
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

/// Libraries that the dynamic linker will load.
fn libraries(exe: &Path) -> Result<Vec<String>, Failure> {
    let listing = output(Command::new("ldd").arg(exe))?;
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
    Ok(listing.lines().filter_map(path).collect())
}

/// Boots the VM, or both, and reports until the first one has run everything. A hung VM is killed and booted
/// once more.
fn boot(
    prepared: &Prepared,
    selection: &Selection,
    mut report: impl FnMut(&str),
) -> Result<Outcome, Failure> {
    let limit = match selection {
        Selection { is_bench: true, .. } | Selection { reliability: Some(_), .. } => LONG_LIMIT,
        _ if selection.is_all_short() && prepared.kind == Kind::Linux => LINUX_LIMIT,
        _ if selection.is_all_short() => LIMIT,
        _ => CHOSEN_LIMIT,
    };
    let mut time = CoreTime::default();
    for _ in 1..BOOTS {
        if let Some(outcome) = boot_once(prepared, selection, (&mut time, limit), &mut report)? {
            return Ok(outcome);
        }
        report(&format!(
            "LAB the VM said nothing for {SILENCE:?}: its emulator stands still, and it is booted again"
        ));
    }
    Ok(boot_once(prepared, selection, (&mut time, limit), &mut report)?.unwrap_or(Outcome::Failed(-1)))
}

/// Boots once. `None` if the VM hangs.
fn boot_once(
    prepared: &Prepared,
    selection: &Selection,
    (time, limit): (&mut CoreTime, Duration),
    report: &mut impl FnMut(&str),
) -> Result<Option<Outcome>, Failure> {
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let (socket, is_pair) = (directory.path().join("wire"), prepared.kind == Kind::RdmaPair);
    let start = |side| Vm::start(prepared, selection, is_pair.then_some((socket.as_path(), side)));
    let (vm, other) = (start(0)?, is_pair.then(|| start(1)).transpose()?);
    let mut silent = CoreTime::default();
    let outcome = loop {
        let line = vm.line(STEP);
        if time.look() >= limit {
            break Outcome::Failed(-1);
        }
        if line.is_ok() {
            silent = CoreTime::default();
        }
        match line {
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
            Err(RecvTimeoutError::Timeout) if silent.look() >= SILENCE => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break Outcome::Failed(-1),
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
