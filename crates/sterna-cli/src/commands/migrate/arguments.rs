//! Arguments of `sterna migrate`.

use std::path::PathBuf;
use std::time::Duration;

use sterna::Address;
use sterna_drive::MonitorAddress;
use sterna_transport::TransportError;

use super::via::Via;
use crate::commands::{CapabilityState, capability, pair};
use crate::monitor::SECOND_MONITOR;
use crate::terminal::Shown;
use crate::units::parse_bandwidth;

pub(super) const RECONNECT_WINDOW: &str = "x-sterna-reconnect-window";

/// From where, to where, how.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = SECOND_MONITOR)]
pub struct Arguments {
    /// QMP socket of the source: unix:PATH, a path, or tcp:HOST:PORT
    pub socket: MonitorAddress,
    /// Address at which the destination listens: tcp:HOST:PORT, rdma:HOST:PORT, unix:PATH or fd:NAME
    #[arg(value_parser = address)]
    pub destination: String,
    /// QMP socket of the destination. This command applies the migration's settings there, too, and makes the
    /// destination listen unless it listens already
    #[arg(long, value_name = "SOCKET")]
    pub dest_qmp: Option<MonitorAddress>,
    /// Leave the guest paused at the destination until `cont` there. Without this option the destination resumes a
    /// guest that was running, unless the destination was started with -S. (Sterna can detect -S only if this command
    /// runs on the destination's host)
    #[arg(long, requires = "dest_qmp")]
    pub paused: bool,
    /// Move the guest to another Sterna process of the same user on this host without copying memory: the destination,
    /// at unix:PATH, maps the source's memory. The guest's RAM must be a memfd, huge pages or a shared file on both
    /// sides. Same as `--set mode=cpr-transfer`
    #[arg(long)]
    pub same_host: bool,
    /// Migration parameter under QEMU's name, such as max-bandwidth=1G or multifd-channels=4. With `--dest-qmp`,
    /// parameters that both sides must share are also set at the destination: multifd-*, and for rdma: only
    /// x-rdma-chunk-size and x-sterna-rdma-pinned-limit
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
    /// Migration capability under QEMU's name, such as multifd
    #[arg(long, value_name = "NAME[=on|off]", value_parser = capability)]
    pub cap: Vec<CapabilityState>,
    /// Switch to postcopy: start the guest at the destination before all of its memory has arrived. Pages that the
    /// guest needs are sent first. Until all pages have arrived, the guest depends on both sides and on the link. WHEN
    /// is `auto` (if precopy does not converge), a number of precopy rounds such as `2rounds` (both need Sterna as the
    /// source), or a number of seconds after the start (0: as soon as possible). Switches on the capabilities
    /// postcopy-ram and postcopy-preempt, with `--dest-qmp` on both sides
    #[arg(long, value_name = "WHEN", value_parser = postcopy_when, num_args = 0..=1, default_missing_value = "auto")]
    pub postcopy: Option<PostcopyWhen>,
    /// If a connection breaks before the handover, try to connect again for this many seconds and continue with the
    /// data that had arrived. Meanwhile the guest runs at the source. Sets x-sterna-reconnect-window, with `--dest-qmp`
    /// on both sides. Needs Sterna on both sides, and tcp: or unix: as the destination
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub reconnect_window: Option<u32>,
    /// Keep the settings that this command makes (--set, --cap, --tls-dir, and the settings of other options) on both
    /// sides. Without this option, both sides get their earlier settings back after the migration, even if it fails
    #[arg(long)]
    pub keep_settings: bool,
    /// Before the migration, measure the guest's writes and print a forecast. The record contains the forecast, too
    #[arg(long)]
    pub forecast: bool,
    /// Bandwidth of the link for the forecast, such as 10Gbit/s [default: max-bandwidth]
    #[arg(long, value_name = "RATE", value_parser = parse_bandwidth, requires = "forecast")]
    pub bandwidth: Option<u64>,
    /// Use TLS with the certificates in this directory (QEMU's file names) on the source's host; with `--dest-qmp` on
    /// both hosts
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Relays between source and destination.
    #[command(flatten)]
    pub via: Option<Via>,
    /// Print the record as JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// How progress is shown.
    #[command(flatten)]
    pub shown: Shown,
    /// Write the record to a file, for `sterna report`
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,
    /// Time in seconds to wait for the destination's answer if its acknowledgement is lost or late
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub undecided_wait: u64,
}

/// When the migration switches to postcopy.
/// The guest then runs at the destination before all of its pages have arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostcopyWhen {
    /// When precopy does not converge.
    Auto,
    /// At this time after the start.
    After(Duration),
    /// After this number of precopy rounds.
    AfterRounds(u32),
}

impl PostcopyWhen {
    /// The time after the start, for `After`.
    pub(super) fn after(self) -> Option<Duration> {
        match self {
            Self::After(time) => Some(time),
            Self::Auto | Self::AfterRounds(_) => None,
        }
    }

    /// The number of rounds, for `AfterRounds`.
    pub(super) fn after_rounds(self) -> Option<u32> {
        match self {
            Self::AfterRounds(rounds) => Some(rounds),
            Self::Auto | Self::After(_) => None,
        }
    }
}

pub(in crate::commands) fn postcopy_when(text: &str) -> Result<PostcopyWhen, String> {
    let number = |digits: &str| digits.parse::<u32>().ok();
    let rounds = text.strip_suffix("rounds").or_else(|| text.strip_suffix("round"));
    let when = match (text, rounds) {
        ("auto", _) => Some(PostcopyWhen::Auto),
        (_, Some(digits)) => number(digits).filter(|rounds| *rounds > 0).map(PostcopyWhen::AfterRounds),
        (digits, None) => {
            number(digits).map(|seconds| PostcopyWhen::After(Duration::from_secs(seconds.into())))
        }
    };
    when.ok_or_else(|| {
        format!(
            "`{text}` is neither `auto`, nor a number of seconds, nor a number of rounds such as `2rounds`"
        )
    })
}

/// Parses an address of a kind that some version of QEMU knows.
/// The VM refuses kinds that it does not know. Hosts, ports and paths are checked here. A QEMU accepts only
/// one address to listen at, so a typing error would make the waiting VM useless.
pub(in crate::commands) fn address(text: &str) -> Result<String, String> {
    const KINDS: [&str; 7] = ["tcp", "rdma", "unix", "fd", "vsock", "exec", "file"];
    match text.split_once(':') {
        Some(("rdma", _)) => rdma_address(text).map(|_| text.to_owned()),
        // A QEMU takes options after a comma (`,ipv4=on`).
        Some(("tcp", _)) => {
            let place = text.split(',').next().unwrap_or_default();
            place.parse::<Address>().map(|_| text.to_owned()).map_err(|error| error.to_string())
        }
        Some(("unix", _)) => {
            text.parse::<Address>().map(|_| text.to_owned()).map_err(|error| error.to_string())
        }
        Some((kind, rest)) if KINDS.contains(&kind) && !rest.is_empty() => Ok(text.to_owned()),
        _ => Err(format!("`{text}` is not an address such as tcp:HOST:PORT, rdma:HOST:PORT or unix:PATH")),
    }
}

/// Checks an `rdma:` address, because a QEMU aborts if it listens at an address without a port. It ignores
/// options after a comma.
pub(super) fn rdma_address(text: &str) -> Result<Address, String> {
    let place = text.split(',').next().unwrap_or_default();
    match place.parse().map_err(|error: TransportError| error.to_string())? {
        Address::Rdma { host, .. } if host.is_empty() => {
            Err(format!("{text:?} is not an address: the host of the destination must follow rdma:"))
        }
        address => Ok(address),
    }
}
