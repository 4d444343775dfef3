//! `sterna run`: runs one VM in this process until it is quit.

mod restore;

use std::process;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use serde_json::json;
use sterna::ram::{Backing, GuestRam};
use sterna::{RunState, SourceVm, TlsEndpoint};
use sterna_arbiter::Spec;
use sterna_guests::{Fill, Pattern};
use sterna_qmp::migration::events::SHUTDOWN;
use sterna_qmp::{Endpoint, EventBus, MigrationControl, MonitoredVm, Server};
use sterna_vmm::{DiskOptions, LinuxImage, MachineConfig, NetOptions};
use uuid::Uuid;

use crate::exit::{Done, Status, Stop};
use crate::host::{self, Console, GuestChoice, GuestEnd, GuestMonitor, Hosted, Load, Protection, Restored};
use crate::interrupts::Interrupts;
use crate::serial::Serial;
use crate::vhost_user::{self, VhostUser};
use crate::{disk, net, secret, terminal, tls, units};

/// Interval between two measurements of the guest's progress.
const METERING: Duration = Duration::from_millis(200);

/// The VM and its guest.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    /// Machine that runs the guest
    #[arg(long, value_enum, default_value_t = MachineKind::Auto)]
    pub machine: MachineKind,
    /// Size of the guest's RAM, such as 512M or 4G
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = units::parse_ram)]
    pub ram: u64,
    /// Number of vCPUs, 1 to 8 (of threads with `--machine process`)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub vcpus: u8,
    /// Guest of the KVM machine. tide: a built-in test guest that writes its memory by --pattern and --rate. boot-tide:
    /// a built-in test guest in a boot sector, with a fixed speed. boot-sector:FILE: a boot sector (at most 512 bytes
    /// of code). flat:FILE: 64-bit code, which is loaded at 1 MiB and started at its first byte
    #[arg(long, value_name = "GUEST", default_value = "tide")]
    pub guest: GuestChoice,
    /// Linux kernel that the KVM machine boots: a bzImage or a vmlinux for x86-64
    #[arg(long, value_name = "FILE", conflicts_with = "guest")]
    pub kernel: Option<std::path::PathBuf>,
    /// initrd for the Linux kernel
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<std::path::PathBuf>,
    /// Command line for the Linux kernel, such as `console=ttyS0`
    #[arg(long, value_name = "TEXT", requires = "kernel", default_value = "", allow_hyphen_values = true)]
    pub append: String,
    /// Virtio disk: a file or a block device (repeat for more disks). The format is raw unless `format=qcow2` is given.
    /// A backing file or data file of a qcow2 file is used only if it is named here. `migrate=shared` (default): source
    /// and destination use the same file, and the destination takes over the lock on it with the guest. `migrate=copy`:
    /// the content is copied to a disk of the same length at the destination, while the guest runs if the capability
    /// multifd is on, else while the guest is paused. `migrate=none`: nothing is copied, because the destination has a
    /// file with the same content. Only for the KVM machine
    #[arg(
        long,
        value_name = "FILE[,format=raw|qcow2][,backing=FILE,backing-format=raw|qcow2][,data-file=FILE][,read-only=on]\
                      [,direct=on][,queues=N][,migrate=shared|copy|none]",
        value_parser = disk::parse
    )]
    pub disk: Vec<DiskOptions>,
    /// Virtio network card that is connected to a tap interface of the host (repeat for more cards). The MAC address
    /// must be the same on both sides of a migration; the default is derived from the VM's name. `queues=N`: number of
    /// queue pairs, 1 (default) to 4; for more than 1 the tap must have `multi_queue`. Only for the KVM machine
    #[arg(long, value_name = "tap:NAME[,mac=ADDRESS][,queues=N]", value_parser = net::parse)]
    pub net: Vec<NetOptions>,
    /// Offer virtio free page reporting: the guest reports unused memory at any time. The host gets that memory back,
    /// and a migration does not send it. Only for the KVM machine
    #[arg(long)]
    pub free_page_reporting: bool,
    /// Offer virtio free page hinting: the guest reports unused memory when a migration asks for it, and the migration
    /// does not send that memory. Only for the KVM machine
    #[arg(long)]
    pub free_page_hinting: bool,
    /// Add a virtio random number generator, which reads random bytes from the host. Only for the KVM machine
    #[arg(long)]
    pub rng: bool,
    /// Add a virtio console (hvc0) in addition to the serial port. The output of both goes to `--serial`. Keyboard
    /// input goes to the serial port until the guest has loaded the console's driver, then to the console. Only for the
    /// KVM machine
    #[arg(long)]
    pub virtio_console: bool,
    /// Arbiter of a protection (capability x-colo): it decides which side runs the guest when primary and standby
    /// cannot reach each other. etcd:URL[,URL...][,OPTION=VALUE...], file:DIR, exec:COMMAND, or ask (an operator
    /// decides). Must be the same on both sides
    #[arg(long, value_name = "SPEC", default_value = "ask")]
    pub arbiter: Spec,
    /// File with the secret that primary and standby of a protection share: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    pub secret: Option<std::path::PathBuf>,
    /// Lease of a protection: how long the guest may run after the last heartbeat that the standby answered was sent
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = units::parse_time)]
    pub lease: Duration,
    /// Watchdog of this host, such as /dev/watchdog, for a protected guest. It resets the host if the guest still runs
    /// after its lease has ended. The lease must be at least 1s. The watchdog stays active if this process is killed
    #[arg(long, value_name = "DEVICE")]
    pub watchdog: Option<std::path::PathBuf>,
    /// As a standby on loopback: accept a primary without a TLS certificate
    #[arg(long)]
    pub insecure: bool,
    /// Memory writes of the guest.
    #[command(flatten)]
    pub load: LoadArguments,
    /// Address at which the QMP monitor listens: unix:PATH, or tcp:127.0.0.1:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub qmp: Option<Endpoint>,
    /// Wait for a migration at this address, such as tcp:HOST:PORT or unix:PATH; `defer`: wait until `migrate-incoming`
    /// over QMP gives the address
    #[arg(long, value_name = "defer|URI")]
    pub incoming: Option<String>,
    /// The image from which the guest starts.
    #[command(flatten)]
    pub restore: restore::RestoreArguments,
    /// Accept only a guest that another process on this host moves with `sterna migrate --same-host`. This process
    /// allocates no guest RAM: it maps the source's, so huge pages are needed only once. It takes over the source's
    /// taps and vhost-user devices together with the guest
    #[arg(long, requires = "incoming", conflicts_with = "prealloc")]
    pub same_host: bool,
    /// Use TLS for migrations, with the certificates in this directory (QEMU's file names: ca-cert.pem,
    /// server-cert.pem, client-cert.pem and their keys)
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<std::path::PathBuf>,
    /// Do not start the guest until the QMP command `cont`
    #[arg(short = 'S', long)]
    pub stopped: bool,
    /// Output of the guest's serial port: to a file, to standard output (stdio; standard input is then the guest's
    /// keyboard), or none
    #[arg(long, value_name = "FILE|stdio|none", default_value = "none")]
    pub serial: Serial,
    /// Kind of memory for the guest's RAM
    #[arg(long, value_enum, default_value_t = BackingKind::Memfd)]
    pub backing: BackingKind,
    /// Track the guest's writes with KVM's dirty rings instead of its dirty log. N: entries per vCPU, a power of two,
    /// at least 1024. Only for the KVM machine
    #[arg(long, value_name = "N")]
    pub dirty_ring_size: Option<u32>,
    /// Device in another process that listens at this vfio-user socket (repeat for more devices). Its state migrates
    /// with the guest. Both sides of a migration need the same devices in the same order. Only for the KVM machine
    #[arg(long, value_name = "SOCKET")]
    pub vfio_user: Vec<std::path::PathBuf>,
    /// Virtio device in another process that listens at this vhost-user socket (repeat for more devices). Its state
    /// migrates with the guest. `kind`: `fs`, a file system such as virtiofsd, which the guest mounts by its tag;
    /// `blk`, a disk; `net`, a network card. Without a kind the guest does not see the device. Give tag and address
    /// only if the process does not report them. Both sides of a migration need the same devices in the same order.
    /// Only for the KVM machine
    #[arg(
        long,
        value_name = "SOCKET[,kind=fs|blk|net][,tag=NAME][,queues=N][,mac=ADDRESS]",
        value_parser = vhost_user::parse
    )]
    pub vhost_user: Vec<VhostUser>,
    /// Allocate all of the guest's RAM at the start
    #[arg(long)]
    pub prealloc: bool,
    /// Name of the VM
    #[arg(long, default_value = "sterna")]
    pub name: String,
    /// UUID of the VM; it must be the same on both sides of a migration
    #[arg(long)]
    pub uuid: Option<Uuid>,
    /// Pages per second that each vCPU of a migrated test guest (tide, or `--machine process`) writes after its arrival
    /// [default: the rate at the source]
    #[arg(long, value_name = "PAGES")]
    pub arrival_rate: Option<u64>,
    /// Exit when the parent process, which has this process id, exits
    #[arg(long, value_name = "PID", hide = true)]
    pub exit_with_parent: Option<i32>,
}

/// Memory writes of the guest.
#[derive(Debug, Clone, clap::Args)]
pub struct LoadArguments {
    /// Order in which the test guest (tide, or `--machine process`) writes pages: idle, sequential, random, hot-set or
    /// mixed
    #[arg(long, default_value = "sequential")]
    pub pattern: Pattern,
    /// Pages that each vCPU of the test guest writes per second; 0: no limit
    #[arg(long, value_name = "PAGES", default_value_t = 0)]
    pub rate: u64,
    /// Size of the memory that the test guest writes repeatedly [default: all RAM]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_ram)]
    pub working_set: Option<u64>,
    /// Content of the test guest's RAM at the start
    #[arg(long, value_enum, default_value_t = FillKind::Random)]
    pub fill: FillKind,
}

/// A machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MachineKind {
    /// `kvm` if /dev/kvm can be used, else `process`
    Auto,
    /// The reference KVM machine
    Kvm,
    /// No VM: threads of this process write the RAM. Needs no KVM
    Process,
}

/// [`Backing`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackingKind {
    /// Shared memory (memfd)
    Memfd,
    /// Private anonymous memory
    Anonymous,
    /// Huge pages of 2 MiB, which the host must have reserved
    Huge2m,
    /// Huge pages of 1 GiB, which the host must have reserved
    Huge1g,
}

/// [`Fill`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FillKind {
    /// Zero pages that were never written
    Zero,
    /// Random data, which cannot be compressed
    Random,
    /// Random data in every second 256 KiB, zeros elsewhere
    Half,
}

impl Arguments {
    fn guest(&self) -> GuestChoice {
        match &self.kernel {
            Some(kernel) => GuestChoice::Linux(LinuxImage {
                kernel: kernel.clone(),
                initrd: self.initrd.clone(),
                command_line: self.append.clone(),
            }),
            None => self.guest.clone(),
        }
    }
}

impl MachineKind {
    /// Resolves `auto`. Returns a note if that gives the process machine because KVM cannot be used.
    pub fn settle(self) -> Result<(Self, Option<String>), Stop> {
        match (self, host::kvm_usable()) {
            (Self::Process, _) => Ok((Self::Process, None)),
            (Self::Auto | Self::Kvm, Ok(())) => Ok((Self::Kvm, None)),
            (Self::Auto, Err(why)) => Ok((
                Self::Process,
                Some(format!("KVM cannot be used here ({why}): the guest consists of threads instead")),
            )),
            (Self::Kvm, Err(why)) => {
                Err(Stop::failed(format!("KVM cannot be used here ({why}). Use `--machine process`.")))
            }
        }
    }

    /// The value's name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Kvm => "kvm",
            Self::Process => "process",
        }
    }
}

impl LoadArguments {
    fn to_load(&self) -> Load {
        Load {
            pattern: self.pattern,
            fill: match self.fill {
                FillKind::Zero => Fill::Zero,
                FillKind::Random => Fill::Random(1),
                FillKind::Half => Fill::Half(1),
            },
            rate: self.rate,
            working_set_bytes: self.working_set,
        }
    }

    /// The same load as arguments of another `sterna run`.
    pub fn to_arguments(&self) -> Vec<String> {
        let fill = self.fill.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let mut arguments = vec![
            format!("--pattern={}", self.pattern),
            format!("--rate={}", self.rate),
            format!("--fill={fill}"),
        ];
        arguments.extend(self.working_set.map(|bytes| format!("--working-set={bytes}b")));
        arguments
    }
}

/// Runs the VM until it ends.
pub fn execute(arguments: &Arguments) -> Done {
    let began = Instant::now();
    if let Some(parent) = arguments.exit_with_parent {
        follow(parent)?;
    }
    let restoring = arguments.restore.open()?;
    let interrupts = Interrupts::catch()?;
    sterna_vmm::forward_sigbus().map_err(|error| {
        Stop::failed(format!("cannot install the handler for memory failures (SIGBUS): {error}"))
    })?;
    let (kind, remark) = arguments.machine.settle()?;
    if let Some(remark) = remark {
        terminal::note(&remark);
    }
    let config = config(arguments);
    arguments.restore.check_backing(config.machine.backing)?;
    let console = Console::new(arguments.serial.open()?)?;
    let secret = arguments.secret.as_deref().map(secret::read).transpose()?;
    let protection = Protection::new(
        &arguments.arbiter,
        secret,
        arguments.lease,
        arguments.insecure,
        &config.machine,
        console.clone(),
    )?
    .with_watchdog(arguments.watchdog.as_deref().map(crate::watchdog::named).transpose()?);
    let parts = build(arguments, kind, config, console.clone())?;
    if arguments.prealloc {
        allocate(&parts.machine.ram())?;
    }
    let vm = Hosted::new(parts, arguments.arrival_rate, interrupts.clone(), protection);
    let bus = EventBus::new();
    let control = MigrationControl::new(vm.clone(), bus.clone(), !arguments.stopped);
    let restored = Restored::new(began, bus.clone());
    let server = match &arguments.qmp {
        Some(endpoint) => {
            let monitor = GuestMonitor::new(control.clone(), vm.clone(), restored.clone());
            Some(
                Server::bind(endpoint, monitor, bus.clone())
                    .map_err(|error| Stop::failed(format!("the monitor cannot listen: {error}")))?,
            )
        }
        None => None,
    };
    if let Some(directory) = &arguments.tls_dir {
        let endpoint = if arguments.incoming.is_some() { TlsEndpoint::Server } else { TlsEndpoint::Client };
        tls::host(&control, directory, endpoint)?;
    }
    match restoring {
        Some(restoring) => restoring.run((&control, &vm, &restored), arguments.stopped)?,
        None => begin(arguments, &control, &vm)?,
    }
    let keyboard = arguments.serial.keyboard(Arc::clone(&vm))?;
    meter(&vm)?;
    let ended = host_until_end(&vm, &interrupts);
    drop(keyboard);
    if let Some(end) = &ended {
        bus.emit(&SHUTDOWN, Some(json!({"guest": true, "reason": end.cause})));
    }
    if let Some(server) = server {
        server.close();
    }
    if restored.failure().is_some() {
        // Its threads may wait for a page that cannot be loaded. They end only with the process.
        process::exit(Status::Failed.code().into());
    }
    if lacks_pages(&control) {
        terminal::note(
            "sterna: error: the guest was ended and is lost, because only its source had some pages of its memory",
        );
        // Its threads are blocked in the kernel on pages that will not arrive. They end only with the
        // process.
        process::exit(Status::Failed.code().into());
    }
    vm.machine().end();
    restore::record(&arguments.restore, &restored)?;
    console.finish();
    if vm.is_lost() {
        return Err(Stop::with(
            Status::Lost,
            "the standby has the guest; the guest was ended here, and its waiting output is discarded",
        ));
    }
    match ended {
        Some(GuestEnd { why, cause }) if cause != GuestEnd::POWERED_OFF => {
            Err(Stop::failed(format!("the guest ended: {why}")))
        }
        _ => Ok(Status::Done),
    }
}

/// Whether the guest runs here in postcopy and lacks pages.
fn lacks_pages(control: &MigrationControl) -> bool {
    let status = control.incoming().map(|incoming| incoming.status());
    use sterna::Status::{PostcopyActive, PostcopyPaused, PostcopyRecover};
    matches!(status, Some(PostcopyActive | PostcopyPaused | PostcopyRecover))
}

fn config(arguments: &Arguments) -> host::Config {
    let devices = arguments.vhost_user.iter().enumerate();
    let machine = MachineConfig {
        uuid: arguments.uuid.map(Uuid::into_bytes),
        ram_bytes: arguments.ram,
        vcpus: arguments.vcpus,
        backing: match arguments.backing {
            BackingKind::Memfd => Backing::Memfd,
            BackingKind::Anonymous => Backing::Anonymous,
            BackingKind::Huge2m => Backing::Huge2M,
            BackingKind::Huge1g => Backing::Huge1G,
        },
        dirty_ring_size: arguments.dirty_ring_size,
        vfio_user: arguments.vfio_user.clone(),
        vhost_user: devices.map(|(index, device)| device.options(index)).collect(),
        disks: arguments.disk.clone(),
        nets: arguments.net.clone(),
        free_page_reporting: arguments.free_page_reporting,
        free_page_hinting: arguments.free_page_hinting,
        entropy: arguments.rng,
        virtio_console: arguments.virtio_console,
        takes_over: arguments.same_host,
        incoming: arguments.incoming.is_some() || arguments.restore.restore.is_some(),
        ..MachineConfig::new(&arguments.name)
    };
    host::Config { machine, load: arguments.load.to_load() }
}

fn build(
    arguments: &Arguments,
    kind: MachineKind,
    config: host::Config,
    console: Console,
) -> Result<host::Parts, Stop> {
    match kind {
        MachineKind::Process if arguments.kernel.is_some() => Err(Stop::usage(
            "`--kernel` needs the KVM machine; `--machine process` cannot run a kernel.".to_owned(),
        )),
        MachineKind::Process => host::process_machine(config),
        _ => host::kvm_machine(config, &arguments.guest(), console),
    }
}

fn allocate(ram: &GuestRam) -> Result<(), Stop> {
    ram.blocks()
        .iter()
        .try_for_each(|block| block.populate(0, block.pages()))
        .map_err(|error| Stop::failed(format!("cannot allocate guest RAM: {error}")))
}

fn begin(arguments: &Arguments, control: &Arc<MigrationControl>, vm: &Hosted) -> Result<(), Stop> {
    match arguments.incoming.as_deref() {
        Some("defer") if arguments.qmp.is_none() => Err(Stop::usage(
            "`--incoming defer` waits for a command over QMP: add a socket with `--qmp unix:PATH`.",
        )),
        Some("defer") => Ok(()),
        Some(uri) => {
            let address = sterna_qmp::migration::from_uri(uri)
                .map_err(|error| Stop::usage(format!("--incoming {uri}: {error}")))?;
            let address =
                sterna_vmm::claim_inherited(address).map_err(|error| Stop::usage(error.to_string()))?;
            control.listen(&address).map_err(|error| Stop::failed(format!("cannot wait at {uri}: {error}")))
        }
        None if arguments.stopped => Ok(()),
        None => vm.cont().map_err(|error| Stop::failed(format!("cannot start the guest: {error}"))),
    }
}

/// Waits until the VM should end. Returns the cause if the guest ended by itself.
fn host_until_end(vm: &Hosted, interrupts: &Interrupts) -> Option<GuestEnd> {
    while interrupts.count() == 0 {
        if vm.run_state() == RunState::Paused
            && let Some(end) = vm.machine().ended()
        {
            return Some(end);
        }
        interrupts.sleep(Duration::from_millis(200), 0);
    }
    None
}

/// Measures the guest's progress on its own thread, until the VM is dropped.
/// In postcopy, the pages with the progress counters may be missing, and they never arrive if the source is
/// lost. A thread that reads them blocks in the kernel and ends only with the process.
fn meter(vm: &Arc<Hosted>) -> Result<(), Stop> {
    let vm = Arc::downgrade(vm);
    let metered = move || {
        while let Some(vm) = vm.upgrade() {
            vm.note_progress();
            drop(vm);
            std::thread::sleep(METERING);
        }
    };
    let started = std::thread::Builder::new().name("meter".to_owned()).spawn(metered);
    started.map(drop).map_err(|error| {
        Stop::failed(format!(
            "cannot start the thread that measures the guest's \
                                                            progress: {error}"
        ))
    })
}

/// Makes the kernel kill this process when its parent exits.
fn follow(parent: i32) -> Result<(), Stop> {
    let failed = |why: String| Stop::failed(format!("cannot exit together with process {parent}: {why}"));
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| failed(error.to_string()))?;
    // The parent may have exited before the previous call.
    if getppid() != Pid::from_raw(parent) {
        process::exit(Status::Failed.code().into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_arguments_say_the_same_again() {
        use clap::Parser;
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            load: LoadArguments,
        }
        let line = ["x", "--pattern=hot-set", "--rate=77", "--working-set=64M", "--fill=half"];
        let load = Line::parse_from(line).load;

        let again = Line::parse_from(std::iter::once("x".into()).chain(load.to_arguments())).load;

        assert_eq!(again.to_load(), load.to_load());
    }
}
