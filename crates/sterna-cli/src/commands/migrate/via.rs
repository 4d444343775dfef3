//! `--via`: a migration through relays whose source's relay runs inside this command (docs/relay.md).

use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;
use sterna_relay::pack::{Cache, Mode};
use sterna_relay::relay::{Compress, Dialer, Limit, Notice, Notices, Options, Security};
use sterna_relay::session::Settings;
use sterna_transport::{Address, TlsEndpoint};
use tempfile::TempDir;

use crate::commands::relay::{mode, secret, split_route, stop};
use crate::exit::Stop;
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::terminal::Live;
use crate::units;

/// How long the relays may take to part after the end of the migration.
const PARTING: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(10);

/// The relay at the destination, and how to reach it.
#[derive(Debug, Clone, clap::Args)]
pub struct Via {
    /// Migrate through relays: the `sterna relay` at the destination's host, and its route to the destination. The source's
    /// relay runs inside this command. The destination's address is then the one at which the VMM listens on its own host
    #[arg(long, value_name = "ADDRESS/ROUTE", conflicts_with_all = ["same_host", "tls_dir"])]
    pub via: Option<String>,
    /// Certificates between the relays, under QEMU's names
    #[arg(long, value_name = "DIR", requires = "via")]
    pub via_tls_dir: Option<PathBuf>,
    /// The name in the certificate of the destination's relay, if it is not the host in --via
    #[arg(long, value_name = "NAME", requires = "via_tls_dir")]
    pub via_tls_hostname: Option<String>,
    /// File with the secret of both relays
    #[arg(long, value_name = "FILE", requires = "via")]
    pub via_secret: Option<PathBuf>,
    /// Use a relay on another host without certificates and without a secret
    #[arg(long, requires = "via")]
    pub via_insecure: bool,
    /// Compression between the relays: off, zstd, zstd:LEVEL (1 to 19) or auto
    #[arg(long, value_name = "MODE", requires = "via", default_value = "off", value_parser = mode)]
    pub via_compress: Mode,
    /// Time in seconds for which the relays may be without a connection before the migration ends
    #[arg(long, value_name = "SECONDS", requires = "via", default_value_t = 300)]
    pub via_reconnect_window: u64,
    /// Limit of the pages to which the source's relay refers instead of sending them again
    #[arg(long, value_name = "SIZE", requires = "via", default_value = "256M", value_parser = units::parse_size)]
    pub via_cache: u64,
}

/// The source's relay of one migration.
pub(super) struct OwnRelay {
    dialer: Dialer,
    /// The directory of its socket.
    _directory: TempDir,
}

impl OwnRelay {
    /// Starts the relay, if `--via` asks for one. Only the user of the source's process can connect to its socket.
    pub(super) fn start(via: Option<&Via>, source: &mut Monitor, live: &Live) -> Result<Option<Self>, Stop> {
        let Some((via, to)) = via.and_then(|via| Some((via, via.via.as_ref()?))) else { return Ok(None) };
        let (to, route) = split_route(to)?;
        let options = options(via, live)?;
        let failed = |error: std::io::Error| {
            Stop::failed(format!("the socket of the source's relay cannot be made: {error}"))
        };
        let directory = tempfile::Builder::new().prefix("sterna-via-").tempdir().map_err(failed)?;
        let path = directory.path().join("relay");
        let dialer = Dialer::start(&Address::Unix(path.clone()), to, route, options).map_err(stop)?;
        if let Some((user, group)) = owner(source) {
            for place in [directory.path(), &path] {
                give(place, user, group).map_err(failed)?;
            }
        }
        Ok(Some(Self { dialer, _directory: directory }))
    }

    /// The address to which the source migrates.
    pub(super) fn address(&self) -> String {
        self.dialer.address().to_string()
    }

    /// Lets the relays part.
    ///
    /// A source that is undecided waits for the destination's answer, and would resume its guest if its connection closed. The
    /// relay keeps that connection until the answer comes or the operator interrupts the command.
    pub(super) fn end(self, is_undecided: bool, live: &Live, interrupts: &Interrupts) {
        self.dialer.close();
        if is_undecided && self.dialer.is_busy() {
            live.note(
                "sterna: the source waits for the destination's answer, and this command keeps its connection. Look at the \
                 destination. If the guest runs there, end the source's VMM; if it does not, interrupt this command: the \
                 source then resumes its guest",
            );
        }
        let (began, interrupted) = (Instant::now(), interrupts.count());
        while self.dialer.is_busy()
            && (is_undecided || began.elapsed() < PARTING)
            && interrupts.count() == interrupted
        {
            std::thread::sleep(STEP);
        }
    }

    /// What the end of this command means for a migration that still runs.
    pub(super) const GOES_WITH_IT: &str =
        " The relay in this command ends, too, so the migration fails if it has not ended.";
}

fn options(via: &Via, live: &Live) -> Result<Options, Stop> {
    let mut tls = via
        .via_tls_dir
        .as_deref()
        .map(|path| crate::tls::of_directory(path, TlsEndpoint::Client))
        .transpose()?;
    if let Some(tls) = &mut tls {
        tls.hostname.clone_from(&via.via_tls_hostname);
    }
    let secret = via.via_secret.as_deref().map(secret).transpose()?;
    let note = live.notes();
    Ok(Options {
        security: Security { tls, secret, insecure: via.via_insecure },
        carriers: 2,
        reconnect_window: Duration::from_secs(via.via_reconnect_window),
        buffer_bytes: Settings::USUAL_BUFFER,
        unconfirmed: false,
        is_raw: false,
        compress: Compress { mode: via.via_compress, cache: Arc::new(Cache::new(via.via_cache, Vec::new())) },
        limit: Limit::default(),
        notices: Notices::new(move |notice: Notice| {
            if tells(&notice) {
                note(&format!("sterna: {notice}"));
            }
        }),
    })
}

/// The command shows phases and rounds itself.
fn tells(notice: &Notice) -> bool {
    !matches!(notice, Notice::Phase { .. } | Notice::Began { .. })
}

/// The user and the group of the process at the other end of a Unix monitor.
///
/// The kernel notes who began to listen. A QEMU that has changed its user since (`-run-with user=`) is found by its number.
fn owner(source: &mut Monitor) -> Option<(u32, u32)> {
    let peer = socket_peercred(source.vm().client().socket().as_fd()).ok()?;
    let of_process = std::fs::metadata(format!("/proc/{}", peer.pid.as_raw_nonzero())).ok();
    Some(of_process.map_or((peer.uid.as_raw(), peer.gid.as_raw()), |found| (found.uid(), found.gid())))
}

fn give(place: &Path, user: u32, group: u32) -> std::io::Result<()> {
    let present = std::fs::metadata(place)?;
    if (present.uid(), present.gid()) == (user, group) {
        return Ok(());
    }
    chown(place, Some(user), Some(group))
}
