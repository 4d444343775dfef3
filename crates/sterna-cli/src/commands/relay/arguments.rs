//! Arguments of `sterna relay`.

use std::path::PathBuf;

use sterna_qmp::Endpoint;
use sterna_relay::frame::LANES;
use sterna_relay::pack::Mode;
use sterna_relay::session::Settings;

use crate::terminal::Shown;
use crate::units;

/// Where to listen, where to send, and how.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// Address to listen at: listen:unix:PATH, listen:tcp:HOST:PORT, or listen:systemd[:NAME] for a socket that systemd
    /// opened. At the source, the VMM migrates to it (give --to).
    /// At the destination, the other relay connects to it (give --route or --route-dir)
    #[arg(value_name = "listen:ADDRESS", required_unless_present = "forward")]
    pub listen: Option<String>,
    /// The other relay and one of its routes: tcp:HOST:PORT/ROUTE or unix:PATH/ROUTE
    #[arg(long, value_name = "ADDRESS/ROUTE", requires = "listen", conflicts_with_all = ["route", "route_dir"])]
    pub to: Option<String>,
    /// Another address to listen at, and where to send what arrives there: LISTEN=ADDRESS/ROUTE; repeatable. Each carries
    /// one migration at a time
    #[arg(long, value_name = "LISTEN=TO")]
    pub forward: Vec<String>,
    /// A destination at this relay: the address where the destination's VMM listens; repeatable
    #[arg(long, value_name = "NAME=ADDRESS", requires = "listen")]
    pub route: Vec<String>,
    /// Directory whose Unix sockets are destinations: route NAME is the socket NAME or NAME.sock
    #[arg(long, value_name = "DIR", requires = "listen")]
    pub route_dir: Option<PathBuf>,
    /// Use TLS with the certificates of this directory, under QEMU's names; both relays need certificates
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// The name in the other relay's certificate, if it is not the host in --to
    #[arg(long, value_name = "NAME", requires = "tls_dir")]
    pub tls_hostname: Option<String>,
    /// The distinguished name that the other relay's certificate must have, at the destination
    #[arg(long, value_name = "DN", requires = "tls_dir")]
    pub tls_authz: Option<String>,
    /// File with a secret that both relays have: 32 bytes, or 64 hexadecimal digits. It proves who connects, and does not
    /// encrypt
    #[arg(long, value_name = "FILE")]
    pub secret: Option<PathBuf>,
    /// Accept addresses that other hosts can reach without certificates and without a secret
    #[arg(long)]
    pub insecure: bool,
    /// Connections between the relays for each migration. The first is for page requests and answers, if there are several
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=i64::from(LANES)))]
    pub carriers: u8,
    /// Time in seconds for which the relays may be without a connection before the migration ends
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub reconnect_window: u64,
    /// Limit of the memory of each session, in each direction: bytes that the other relay has not acknowledged. At least 32M
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = buffer)]
    pub buffer: u64,
    /// Compress what the source sends: off, zstd, zstd:LEVEL (1 to 19), or auto, which compresses only while this helps.
    /// Default: off at the source. The destination accepts compression unless it has `off`
    #[arg(long, value_name = "MODE", value_parser = mode)]
    pub compress: Option<Mode>,
    /// Memory for pages that came before, at the destination, for all migrations together: the source sends references to
    /// them. 0: none. At the source, the limit of the pages to which it refers
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = units::parse_size)]
    pub cache: u64,
    /// File whose 4 KiB pages the destination has: a raw image of disk or memory; repeatable. The source sends references to
    /// them
    #[arg(long, value_name = "FILE", requires = "listen", conflicts_with = "to")]
    pub dictionary: Vec<PathBuf>,
    /// Relay a QEMU migration without the capability return-path. If the relays lose each other at its end, the guest can be
    /// lost
    #[arg(long)]
    pub unconfirmed: bool,
    /// What the connections carry
    #[arg(long, value_enum, default_value_t = Kind::Qemu)]
    pub kind: Kind,
    /// Limit of what this relay sends to other relays, for all migrations together, such as 100MB/s. They get equal shares,
    /// and one whose guest is stopped goes first. `set-relay-limit` over --qmp changes it [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = units::parse_bandwidth)]
    pub limit: Option<u64>,
    /// Listen here for `sterna info` and for QMP clients (docs/qmp.md): unix:PATH or tcp:HOST:PORT on loopback
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<Endpoint>,
    /// Serve the figures for Prometheus at http://ADDRESS/metrics: HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<String>,
    /// Directory in which each session leaves its record, for `sterna report`: ROUTE-SESSION-ROLE.json
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// After the first Ctrl-C or SIGTERM, end the open migrations after this time in seconds, as a second one does
    /// [default: wait without limit]
    #[arg(long, value_name = "SECONDS")]
    pub drain: Option<u64>,
    /// How progress is shown.
    #[command(flatten)]
    pub shown: Shown,
}

/// What a VMM's connections carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Migrations of QEMU; other streams are relayed with the caution of a stream that cannot be read
    Qemu,
    /// Any streams; they are not read, and are closed when the window ends
    Raw,
}

const HELP: &str = "\
Examples:
  dst$ sterna relay listen:tcp:0.0.0.0:4450 --route web1=unix:/run/mig/web1.sock --tls-dir /etc/pki/qemu
  src$ sterna relay listen:unix:/run/mig/web1.sock --to tcp:dst:4450/web1 --tls-dir /etc/pki/qemu --compress auto

Ctrl-C or SIGTERM: the command takes no more migrations, and ends when none is open. A second one, or the end of --drain,
ends the open ones where that cannot make two guests run: until the end of the stream was sent, the guest then runs at the source.";

/// Parses a mode of compression.
pub(in crate::commands) fn mode(text: &str) -> Result<Mode, String> {
    text.parse().map_err(|error: sterna_relay::pack::BadMode| error.to_string())
}

/// Parses `--buffer` and checks its minimum.
fn buffer(text: &str) -> Result<u64, String> {
    let bytes = units::parse_size(text)?;
    if bytes < Settings::LEAST_BUFFER {
        return Err(format!("`{text}` is too little: at least {}", units::bytes(Settings::LEAST_BUFFER)));
    }
    Ok(bytes)
}
