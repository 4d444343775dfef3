//! Arguments of `sterna standby`.

use super::disks;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use sterna_qmp::Endpoint;

use crate::commands::peer::Wire;
use crate::units;

/// Interval between two lines of output.
pub(super) const LINE: Duration = Duration::from_secs(1);

/// Interval between two queries of the state.
pub(super) const LOOK: Duration = Duration::from_millis(20);

/// Address of the standby, and use of the last checkpoint.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The primary is a QEMU 11 that sends a checkpoint of its guest at each interval. This command stores the last checkpoint and runs \
no guest.

With `sterna protect` at the primary, the two commands exchange heartbeats. When the primary has sent none for longer than its lease, \
the standby takes over:
  1. It prepares the last checkpoint.
  2. It asks the arbiter for the claim of this generation. If the primary has the claim, the
     standby discards the checkpoint and exits with status 6. If the arbiter does not answer,
     it is asked again, and the guest does not start meanwhile.
  3. It runs the fence, which makes sure that the primary's guest does not run.
  4. It starts the guest.
Without --arbiter an operator decides with `sterna takeover`, or without --qmp by Ctrl-C. Without --qmp, Ctrl-C also \
retries a failed step, such as the fence. Without --qmp and --fence, a second Ctrl-C declares that the primary's guest does not run.

Without `sterna protect`, the primary needs the capabilities x-colo and return-path and the parameter x-checkpoint-delay. Use \
--on-loss image only if the primary's guest cannot run any more when its connection breaks (its host is fenced, or the guest has no \
network of its own). --arbiter, --fence and --secret need `sterna protect`.

With --ram-dir, the QEMU whose command line follows `--` starts when the first checkpoint is stored, and runs the guest after a takeover. Its \
command line must be the primary's with the same id of the memory backend, but with `-object \
memory-backend-file,id=ID,size=SIZE,mem-path=DIR/FILE,share=on`. After a takeover that QEMU uses the file: remove it when the QEMU has \
ended. If the guest cannot start there, the standby keeps the checkpoint, and `sterna takeover --image` writes an image.

With --disk, the primary replicates its guest's disk to FILE. A write of the guest reaches FILE when the standby has stored the \
checkpoint after it. After a takeover, FILE is the disk of the guest here. Do not use FILE while the guest is protected.")]
pub struct Arguments {
    /// Address at which this standby listens for its primary: listen:tcp:HOST:PORT or listen:unix:PATH
    pub at: String,
    /// Image that is made of the last checkpoint at a takeover
    #[arg(long, value_name = "FILE")]
    pub image: PathBuf,
    /// Arbiter, which decides whether the guest may run here; the same as at the primary: etcd:URL[,...], file:DIR,
    /// exec:COMMAND, or ask (an operator decides) [default: ask]
    #[arg(long, value_name = "SPEC")]
    pub arbiter: Option<String>,
    /// Command that makes sure that the primary's guest does not run, for example by powering its host off. Exit status
    /// 0: the guest does not run
    #[arg(long, value_name = "COMMAND")]
    pub fence: Option<String>,
    /// Time limit for the fence command
    #[arg(long, default_value = "60s", value_name = "TIME", value_parser = units::parse_time)]
    pub fence_limit: Duration,
    /// File with the secret that primary and standby share: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    pub secret: Option<PathBuf>,
    /// Listen here for `sterna takeover` and `sterna info`: unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub qmp: Option<Endpoint>,
    /// Serve the figures for Prometheus at http://ADDRESS/metrics: HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<String>,
    /// Reaction when the connection to a primary without `sterna protect` breaks
    #[arg(long, value_enum, default_value = "hold")]
    pub on_loss: OnLoss,
    /// Take over even though the primary answers, if its guest or its QEMU hangs: if the last checkpoint is this old
    /// and no checkpoint has arrived for four intervals [default: never]
    #[arg(long, value_name = "TIME", value_parser = units::parse_time)]
    pub takeover_on_hang: Option<Duration>,
    /// Number of the primary's multifd channels. Same as --cap multifd --set multifd-channels=N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: Option<u8>,
    /// Limit of one checkpoint's size. Memory is allocated only as data arrives
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = units::parse_size)]
    pub journal_limit: u64,
    /// Local copy of a guest's disk (repeat for more disks). NAME: the name in `sterna protect --disk`. FILE: a raw
    /// file or block device with the disk's length. Its content is overwritten. With `size=` a missing file is created
    #[arg(long, value_name = "NAME=FILE[,format=raw][,size=SIZE]", value_parser = disks::parse)]
    pub disk: Vec<disks::DiskArgument>,
    /// Limit of the data that the guest writes to its disks between two checkpoints
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = units::parse_size)]
    pub disk_limit: u64,
    /// On loopback: accept a primary without a TLS certificate
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
    /// Print JSON, one line per second
    #[arg(long)]
    pub json: bool,
    /// When the command ends, write the record of the protection to a file, for `sterna report`
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,
    /// Directory of the RAM file of the QEMU whose command line follows `--`, in a tmpfs or on a disk. The QEMU's
    /// memory-backend-file must name the same file
    #[arg(long, value_name = "DIR", requires = "command")]
    pub ram_dir: Option<PathBuf>,
    /// What the primary was told.
    #[command(flatten)]
    pub wire: Wire,
    /// Command that starts the QEMU which waits for the guest. This command adds `-incoming defer` and a monitor. The
    /// QEMU continues to run after this command has ended
    #[arg(last = true, value_name = "COMMAND", requires = "ram_dir")]
    pub command: Vec<OsString>,
}

impl Arguments {
    /// Whether the options require a primary that is in contact. Another primary is then refused.
    pub(super) fn is_protected(&self) -> bool {
        self.arbiter.is_some() || self.fence.is_some() || self.secret.is_some()
    }
}

/// What to do when the primary is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum OnLoss {
    /// Keep the last checkpoint until `sterna takeover` or until the command is stopped.
    Hold,
    /// Take over: start the guest in the waiting QEMU, or write the image; then end.
    Image,
}
