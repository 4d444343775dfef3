//! `sterna relay`: carries the migrations of other VMMs over connections that may break.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sterna_relay::frame::{LANES, RouteName, SharedSecret};
use sterna_relay::pack::{Cache, Dictionary, Mode};
use sterna_relay::relay::{
    Acceptor, Compress, Dialer, ImageDictionary, Notice, Notices, Options, RelayError, Routes, Security,
};
use sterna_relay::session::Settings;
use sterna_transport::{Address, Authorization, TlsEndpoint};

use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::{terminal, units};

/// Interval between two looks at the sessions.
const LOOK: Duration = Duration::from_millis(100);

/// Where to listen, where to send, and how.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// Address to listen at: listen:unix:PATH or listen:tcp:HOST:PORT. At the source, the VMM migrates to it (give --to).
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

Ctrl-C or SIGTERM: the command takes no more migrations, and ends when none is open. A second one ends the open ones
where that cannot make two guests run: until the end of the stream was sent, the guest then runs at the source.";

fn mode(text: &str) -> Result<Mode, String> {
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

/// Relays until it is interrupted.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let relays = Relays::start(arguments)?;
    for address in relays.addresses() {
        terminal::note(&format!("sterna: listening at {address}"));
    }
    let mut seen = 0;
    loop {
        interrupts.sleep(LOOK, seen);
        let count = interrupts.count();
        if count > seen {
            seen = count;
            relays.interrupted(count);
        }
        if seen > 0 && relays.open() == 0 {
            return Ok(Status::Done);
        }
        if seen > 2 {
            return Err(Stop::with(
                Status::Undecided,
                "ended while a session was open. Its source may have been waiting: look at both VMMs before you resume a guest",
            ));
        }
    }
}

/// The relays of one command.
struct Relays {
    dialers: Vec<Dialer>,
    acceptor: Option<Acceptor>,
}

impl Relays {
    fn start(arguments: &Arguments) -> Result<Self, Stop> {
        let mut relays = Self { dialers: Vec::new(), acceptor: None };
        let listen = arguments.listen.as_deref().map(listened).transpose()?;
        match (&listen, &arguments.to) {
            (Some(listen), Some(to)) => relays.dial(arguments, listen, to)?,
            (Some(listen), None) => {
                let routes = routes(arguments)?;
                let options = options(arguments, TlsEndpoint::Server)?;
                relays.acceptor = Some(Acceptor::start(listen, routes, options).map_err(stop)?);
            }
            (None, _) => {}
        }
        for forward in &arguments.forward {
            let (listen, to) = split_forward(forward)?;
            relays.dial(arguments, &address(listen)?, to)?;
        }
        Ok(relays)
    }

    fn dial(&mut self, arguments: &Arguments, listen: &Address, to: &str) -> Result<(), Stop> {
        let Some((place, route)) = to.rsplit_once('/') else {
            return Err(Stop::usage(format!(
                "{to:?} names no route: write tcp:HOST:PORT/ROUTE or unix:PATH/ROUTE"
            )));
        };
        let options = options(arguments, TlsEndpoint::Client)?;
        self.dialers.push(Dialer::start(listen, address(place)?, name(route)?, options).map_err(stop)?);
        Ok(())
    }

    fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.dialers.iter().map(Dialer::address).chain(self.acceptor.iter().map(Acceptor::address))
    }

    fn open(&self) -> usize {
        let dialed = self.dialers.iter().filter(|dialer| dialer.is_busy()).count();
        dialed + self.acceptor.as_ref().map_or(0, Acceptor::open_sessions)
    }

    fn interrupted(&self, count: usize) {
        self.dialers.iter().for_each(Dialer::close);
        self.acceptor.iter().for_each(Acceptor::close);
        let open = self.open();
        if open == 0 {
            return;
        }
        if count == 1 {
            terminal::note(&format!(
                "sterna: {open} sessions are open; the relay ends when they have ended. Interrupt it again to end them"
            ));
            return;
        }
        let why = "the operator has ended the relay";
        self.dialers.iter().for_each(|dialer| dialer.stop(why));
        self.acceptor.iter().for_each(|acceptor| acceptor.stop(why));
        terminal::note(
            "sterna: open sessions are ended, except those whose destination may have the guest. A third interrupt ends the \
             relay at any price",
        );
    }
}

fn options(arguments: &Arguments, endpoint: TlsEndpoint) -> Result<Options, Stop> {
    let mut tls =
        arguments.tls_dir.as_deref().map(|path| crate::tls::of_directory(path, endpoint)).transpose()?;
    if let Some(tls) = &mut tls {
        tls.hostname.clone_from(&arguments.tls_hostname);
        tls.authorization = arguments.tls_authz.as_deref().map(Authorization::only);
    }
    let secret = arguments.secret.as_deref().map(secret).transpose()?;
    Ok(Options {
        security: Security { tls, secret, insecure: arguments.insecure },
        carriers: arguments.carriers,
        reconnect_window: Duration::from_secs(arguments.reconnect_window),
        buffer_bytes: arguments.buffer,
        unconfirmed: arguments.unconfirmed,
        is_raw: arguments.kind == Kind::Raw,
        compress: compress(arguments, endpoint)?,
        notices: Notices::new(|notice: Notice| terminal::note(&format!("sterna: {notice}"))),
    })
}

fn compress(arguments: &Arguments, endpoint: TlsEndpoint) -> Result<Compress, Stop> {
    let is_source = endpoint == TlsEndpoint::Client;
    let usual = if is_source { Mode::Off } else { Mode::Auto };
    let mut dictionaries: Vec<Arc<dyn Dictionary>> = Vec::new();
    for path in arguments.dictionary.iter().filter(|_| !is_source) {
        let dictionary =
            ImageDictionary::open(path).map_err(|error| Stop::cannot_read(path, &error.source))?;
        dictionaries.push(Arc::new(dictionary));
    }
    let cache = Arc::new(Cache::new(arguments.cache, dictionaries));
    Ok(Compress { mode: arguments.compress.unwrap_or(usual), cache })
}

fn secret(path: &Path) -> Result<SharedSecret, Stop> {
    // The reader of protections checks the file's mode and content, and keeps its bytes to itself.
    crate::secret::read(path)?;
    let content = std::fs::read(path).map_err(|error| Stop::cannot_read(path, &error))?;
    SharedSecret::from_file(&content).ok_or_else(|| {
        Stop::unreadable(format!("{}: a secret of zeros proves nothing: make another one", path.display()))
    })
}

fn routes(arguments: &Arguments) -> Result<Routes, Stop> {
    if arguments.route.is_empty() && arguments.route_dir.is_none() {
        return Err(Stop::usage(
            "the relay has no destination: give --to at the source, or --route NAME=ADDRESS or --route-dir DIR at the \
             destination",
        ));
    }
    let mut routes = Routes { directory: arguments.route_dir.clone(), ..Routes::default() };
    for route in &arguments.route {
        let Some((key, place)) = route.split_once('=') else {
            return Err(Stop::usage(format!("--route {route:?}: write NAME=ADDRESS")));
        };
        if routes.table.insert(name(key)?, address(place)?).is_some() {
            return Err(Stop::usage(format!("--route {key} occurs twice")));
        }
    }
    Ok(routes)
}

fn listened(text: &str) -> Result<Address, Stop> {
    match text.strip_prefix("listen:") {
        Some(place) => address(place),
        None => Err(Stop::usage(format!("{text:?}: write listen:unix:PATH or listen:tcp:HOST:PORT"))),
    }
}

/// Splits `LISTEN=TO`. A path may contain `=`, therefore the kind of the second address is searched.
fn split_forward(text: &str) -> Result<(&str, &str), Stop> {
    let at = ["=tcp:", "=unix:"].into_iter().filter_map(|mark| text.find(mark)).min();
    match at {
        Some(at) => Ok((&text[..at], &text[at + 1..])),
        None => Err(Stop::usage(format!("--forward {text:?}: write unix:PATH=tcp:HOST:PORT/ROUTE"))),
    }
}

fn address(text: &str) -> Result<Address, Stop> {
    let address: Address =
        text.parse().map_err(|error: sterna_transport::TransportError| Stop::usage(error.to_string()))?;
    match address {
        Address::Tcp { .. } | Address::Unix(_) => Ok(address),
        _ => Err(Stop::usage(format!("{text:?}: a relay uses tcp:HOST:PORT and unix:PATH"))),
    }
}

fn name(text: &str) -> Result<RouteName, Stop> {
    text.parse().map_err(|error: sterna_relay::frame::BadRouteName| Stop::usage(error.to_string()))
}

fn stop(error: RelayError) -> Stop {
    match error {
        RelayError::Open { .. } | RelayError::RouteDirectory { .. } => Stop::usage(error.to_string()),
        error => Stop::failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forward_is_split_where_the_second_address_begins() {
        assert_eq!(split_forward("unix:/a=b.sock=tcp:h:1/r").unwrap(), ("unix:/a=b.sock", "tcp:h:1/r"));
        assert_eq!(split_forward("tcp:h:1=unix:/s/r").unwrap(), ("tcp:h:1", "unix:/s/r"));
        assert!(split_forward("unix:/a").is_err());
    }

    #[test]
    fn addresses_that_a_relay_cannot_use_are_refused() {
        for bad in ["fd:3", "file:/a", "rdma:h:1", "h:1"] {
            assert!(address(bad).is_err(), "{bad}");
        }
        assert!(address("unix:/a").is_ok() && address("tcp:h:1").is_ok());
    }
}
