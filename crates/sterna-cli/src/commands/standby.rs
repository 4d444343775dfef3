//! `sterna standby`: stores the checkpoints of a QEMU on another host, and takes over if that host fails.

mod desk;
mod disks;
mod follow;
mod judge;
mod place;
mod say;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna::StartError;
use sterna::opaque::ImagePlan;
use sterna::replica::{ImageSurvivor, Standby, StandbyOptions, Survivor as _};
use sterna_drive::waiting::WaitingVm;
use sterna_image::MappedOptions;
use sterna_qmp::standby::StandbyMonitor;
use sterna_qmp::{Endpoint, EventBus, Server};
use sterna_transport::{CreateOptions, TlsEndpoint};
use tempfile::TempDir;

use crate::commands::peer::{self, Wire};
use crate::commands::save::direct;
use crate::exit::{Done, Stop};
use crate::interrupts::Interrupts;
use crate::{terminal, units};
use desk::Desk;
use follow::Following;
use judge::Judge;
use place::Place;

/// Interval between two lines of output.
const LINE: Duration = Duration::from_secs(1);
/// Interval between two queries of the state.
const LOOK: Duration = Duration::from_millis(20);

/// Where the primary comes, and what becomes of its last checkpoint.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The primary is a QEMU 11 that sends a checkpoint of its guest at each interval; this command holds the last one and runs \
nothing.

With `sterna protect` at the primary the two are in contact: each sends a sign of life. When the primary is silent for longer than \
its lease, the last checkpoint is made ready, the arbiter is asked for the claim of this generation, the fence makes sure that \
the primary's guest does not run, and the guest goes on here. If the arbiter has given the claim to the primary, everything that \
was held is discarded, and the exit status is 6. An arbiter that is out of reach is asked again; nobody starts meanwhile. \
Without --arbiter an operator decides, by `sterna takeover` (or by Ctrl-C, where there is no --qmp). Where there is no --qmp, Ctrl-C \
also tries a step of the takeover again that has failed, such as the fence; without --fence a second Ctrl-C vouches for the primary's guest.

Without `sterna protect` the primary needs the capabilities x-colo and return-path and the parameter x-checkpoint-delay. Give \
--on-loss image only if its guest does not run any more when its connection is gone (its host is fenced, or it has no network of \
its own). With --arbiter, --fence or --secret such a primary is refused.

With --ram-dir the guest goes on in the QEMU whose command line follows `--`. It is the primary's, with the same id of the memory \
backend, but for `-object memory-backend-file,id=ID,size=SIZE,mem-path=DIR/FILE,share=on`. It starts and waits when the guest has come. \
The file belongs to it from the takeover on: remove it when that QEMU has ended. If the guest cannot be started there, the checkpoint stays \
held, and `sterna takeover --image` makes an image.

With --disk the primary writes its guest's disk here, too. What the guest wrote is in FILE when the checkpoint after it is held, and not \
before. FILE is the disk of the guest that goes on here, with the image or in the QEMU that waits; it means nothing while the guest is \
protected.")]
pub struct Arguments {
    /// Where the primary migrates to: listen:tcp:HOST:PORT or listen:unix:PATH
    pub at: String,
    /// The image that the last checkpoint becomes
    #[arg(long, value_name = "FILE")]
    pub image: PathBuf,
    /// Who decides whether the guest may run here: etcd:URL[,...], file:DIR, exec:COMMAND or ask [default: ask]
    #[arg(long, value_name = "SPEC")]
    pub arbiter: Option<String>,
    /// Command that makes sure that the primary's guest does not run; 0 means that it does not
    #[arg(long, value_name = "COMMAND")]
    pub fence: Option<String>,
    /// How long the fence may take
    #[arg(long, default_value = "60s", value_name = "TIME", value_parser = units::parse_time)]
    pub fence_limit: Duration,
    /// File with the secret that primary and standby share: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    pub secret: Option<PathBuf>,
    /// Serve a monitor there: unix:PATH, for `sterna takeover` and `sterna info`
    #[arg(long, value_name = "ADDRESS")]
    pub qmp: Option<Endpoint>,
    /// What to do when a primary without `sterna protect` is gone: hold the checkpoint, or take over
    #[arg(long, value_enum, default_value = "hold")]
    pub on_loss: OnLoss,
    /// Take over from a primary that is in contact when its last checkpoint is this old and none has come for four of their intervals: its
    /// guest, or the QEMU that runs it, hangs [default: never]
    #[arg(long, value_name = "TIME", value_parser = units::parse_time)]
    pub takeover_on_hang: Option<Duration>,
    /// The primary's multifd channels: as --cap multifd --set multifd-channels=N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Option<u8>,
    /// Most bytes that one checkpoint may bring; memory is taken only as they come
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = units::parse_size)]
    pub journal_limit: u64,
    /// A disk of the guest's, whose content comes here (repeat for more): the name by which `sterna protect --disk` asks for it, and
    /// a raw file or block device of the disk's length. With `size=` the file is made if there is none. What it had is replaced
    #[arg(long, value_name = "NAME=FILE[,format=raw][,size=SIZE]", value_parser = disks::parse)]
    pub disk: Vec<disks::DiskArgument>,
    /// Most bytes that the guest may write to its disks between two checkpoints
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = units::parse_size)]
    pub disk_limit: u64,
    /// On loopback: take a primary that shows no certificate
    #[arg(long)]
    pub insecure: bool,
    /// Require direct I/O for the image's pages
    #[arg(long)]
    pub direct_io: bool,
    /// Write the image's pages through the page cache
    #[arg(long, conflicts_with = "direct_io")]
    pub no_direct_io: bool,
    /// Replace the image if it exists
    #[arg(long)]
    pub force: bool,
    /// Print JSON, a line a second
    #[arg(long)]
    pub json: bool,
    /// Where the RAM of the VM behind `--` lies, as a file in a tmpfs or on a disk: its memory-backend-file names it
    #[arg(long, value_name = "DIR", requires = "command")]
    pub ram_dir: Option<PathBuf>,
    /// What the primary was told.
    #[command(flatten)]
    pub wire: Wire,
    /// Start this QEMU with `-incoming defer` and a monitor; it waits for the guest, and runs on after this command ends
    #[arg(last = true, value_name = "COMMAND", requires = "ram_dir")]
    pub command: Vec<OsString>,
}

impl Arguments {
    /// Whether the options require a primary that is in contact. Another primary is then refused.
    fn is_protected(&self) -> bool {
        self.arbiter.is_some() || self.fence.is_some() || self.secret.is_some()
    }
}

/// How long the monitor still answers after the end.
const LAST_ANSWERS: Duration = Duration::from_millis(300);

/// What to do when the primary is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum OnLoss {
    /// Go on holding the last checkpoint.
    Hold,
    /// Make an image of it, or start it in the VM that waits, and end.
    Image,
}

/// Receives the checkpoints of a primary until the guest is at its final place.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    // Arguments are checked before a VM is started or a file is created.
    let address = peer::address(arguments.at.strip_prefix("listen:").unwrap_or(&arguments.at))?;
    if arguments.image.exists() && !arguments.force {
        // Refuse now, not when the primary is lost.
        return Err(Stop::usage(format!(
            "{} exists: choose another name, or use --force",
            arguments.image.display()
        )));
    }
    let directory = arguments.image.parent().filter(|directory| !directory.as_os_str().is_empty());
    if let Some(directory) = directory.filter(|directory| !directory.is_dir()) {
        return Err(Stop::usage(format!(
            "{}: there is no directory {}: make it, or choose another name",
            arguments.image.display(),
            directory.display()
        )));
    }
    terminal::note_stale(&arguments.image);
    let (mut parameters, mut capabilities) = arguments.wire.engine(TlsEndpoint::Server)?;
    if let Some(channels) = arguments.channels {
        capabilities.multifd = true;
        parameters.multifd_channels = channels;
    }
    let options = StandbyOptions {
        journal_limit_bytes: arguments.journal_limit,
        insecure: arguments.insecure,
        disk_limit_bytes: arguments.disk_limit,
    };
    let file = CreateOptions {
        direct: direct(arguments.direct_io, arguments.no_direct_io),
        replace: arguments.force,
        ..CreateOptions::default()
    };
    let image = MappedOptions { file, ..MappedOptions::default() };
    let plan = ImagePlan { path: arguments.image.clone(), options: image, convert: None };
    let judge = Judge::open(arguments)?;
    let monitors = monitors(arguments)?;
    let vm = match (&arguments.ram_dir, &monitors) {
        (Some(ram), Some(directory)) => {
            let ram = ram.canonicalize().map_err(|error| Stop::cannot_read(ram, &error))?;
            Some(WaitingVm::new(&arguments.command, &ram, directory.path(), arguments.force)?)
        }
        _ => None,
    };
    let disks = disks::open(&arguments.disk)?;
    let place = Arc::new(Place::new(ImageSurvivor::new(plan), vm, disks));
    let rules = Some(judge.rules(arguments)?);
    let survivor = Arc::clone(&place);
    let standby =
        Standby::protect(&address, &options, parameters, capabilities, Arc::new(()), survivor, rules)
            .map_err(|error| refused(&error))?;
    let (bus, desk) = (EventBus::new(), Desk::new(standby, judge, place, interrupts));
    let _server = match &arguments.qmp {
        Some(endpoint) => {
            let bound = Server::bind(endpoint, StandbyMonitor::new(desk.clone()), bus.clone());
            Some(bound.map_err(|error| Stop::failed(format!("the monitor cannot listen: {error}")))?)
        }
        None => None,
    };
    terminal::note(&format!("listening at {}", desk.standby.address()));
    let done = Following::new(&desk, arguments, &bus).run();
    if arguments.qmp.is_some() {
        // `sterna takeover` reads the outcome at the monitor.
        std::thread::sleep(LAST_ANSWERS);
    }
    if done.is_err() {
        // Other threads also hold a reference to `place` and end only with the process, so the guest is
        // discarded explicitly.
        desk.place.discard();
    }
    let has_vm = done.is_ok() && desk.place.vm().is_some();
    if let Some(directory) = monitors.filter(|_| has_vm) {
        // The directory contains the VM's monitor.
        let _ = directory.keep();
    }
    done
}

/// The error for a standby that could not start: contradicting options, or a failed attempt.
fn refused(error: &StartError) -> Stop {
    let sentence = sterna_qmp::migration::refusal_sentence(error);
    match error {
        StartError::Settings(_) => Stop::usage(sentence),
        _ => Stop::failed(sentence),
    }
}

/// A directory for the monitors and the log of the waiting VM.
fn monitors(arguments: &Arguments) -> Result<Option<TempDir>, Stop> {
    if arguments.ram_dir.is_none() {
        return Ok(None);
    }
    let made = tempfile::Builder::new().prefix("sterna-standby-").tempdir();
    made.map(Some)
        .map_err(|error| Stop::failed(format!("cannot make a directory for the VM's monitor: {error}")))
}
