//! The relays of one command: what it listens at, and its open sessions.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sterna_relay::frame::{RouteName, SharedSecret};
use sterna_relay::pack::{Cache, Dictionary, Mode};
use sterna_relay::relay::{
    Acceptor, Compress, Dialer, Figures, ImageDictionary, Limit, Notices, Options, RelayError, Routes,
    Security,
};
use sterna_transport::{Address, Authorization, TlsEndpoint};

use super::arguments::{Arguments, Kind};
use crate::exit::Stop;
use crate::service::Listeners;

/// The relays of one command.
pub(super) struct Relays {
    dialers: Vec<Dialer>,
    acceptor: Option<Acceptor>,
    /// The limit of all sessions.
    pub(super) limit: Limit,
    is_closing: Mutex<bool>,
}

impl Relays {
    pub(super) fn start(
        arguments: &Arguments,
        listeners: &mut Listeners,
        notices: &Notices,
    ) -> Result<Self, Stop> {
        let limit = Limit::new(arguments.limit.unwrap_or(0));
        let mut relays = Self { dialers: Vec::new(), acceptor: None, limit, is_closing: Mutex::new(false) };
        let listen = arguments.listen.as_deref().map(|text| listened(text, listeners)).transpose()?;
        match (&listen, &arguments.to) {
            (Some(listen), Some(to)) => relays.dial(arguments, listen, to, notices)?,
            (Some(listen), None) => {
                let routes = routes(arguments)?;
                let options = relays.options(arguments, TlsEndpoint::Server, notices)?;
                relays.acceptor = Some(Acceptor::start(listen, routes, options).map_err(stop)?);
            }
            (None, _) => {}
        }
        for forward in &arguments.forward {
            let (listen, to) = split_forward(forward)?;
            relays.dial(arguments, &place(listen, listeners)?, to, notices)?;
        }
        Ok(relays)
    }

    fn dial(
        &mut self,
        arguments: &Arguments,
        listen: &Address,
        to: &str,
        notices: &Notices,
    ) -> Result<(), Stop> {
        let (to, route) = split_route(to)?;
        let options = self.options(arguments, TlsEndpoint::Client, notices)?;
        self.dialers.push(Dialer::start(listen, to, route, options).map_err(stop)?);
        Ok(())
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.dialers.iter().map(Dialer::address).chain(self.acceptor.iter().map(Acceptor::address))
    }

    /// The figures of each open session, of all dialers and of the acceptor.
    pub(super) fn figures(&self) -> Vec<Figures> {
        let ours = self.dialers.iter().filter_map(Dialer::figures);
        ours.chain(self.acceptor.iter().flat_map(Acceptor::figures)).collect()
    }

    pub(super) fn open(&self) -> usize {
        let dialed = self.dialers.iter().filter(|dialer| dialer.is_busy()).count();
        dialed + self.acceptor.as_ref().map_or(0, Acceptor::open_sessions)
    }

    /// Begins no more sessions.
    pub(super) fn close(&self) {
        *self.is_closing.lock() = true;
        self.dialers.iter().for_each(Dialer::close);
        self.acceptor.iter().for_each(Acceptor::close);
    }

    pub(super) fn is_closing(&self) -> bool {
        *self.is_closing.lock()
    }

    /// Ends the open sessions, except those whose destination may have the guest.
    pub(super) fn end_all(&self, why: &str) {
        self.dialers.iter().for_each(|dialer| dialer.stop(why));
        self.acceptor.iter().for_each(|acceptor| acceptor.stop(why));
    }

    /// Ends the session with this name as at the end of its window. False: no such session is open.
    pub(super) fn end(&self, session: &str, why: &str) -> bool {
        let found = self.figures().into_iter().find(|figures| figures.session.to_string() == session);
        found.is_some_and(|figures| {
            self.dialers.iter().any(|dialer| dialer.end_session(figures.session, why))
                || self.acceptor.as_ref().is_some_and(|acceptor| acceptor.end_session(figures.session, why))
        })
    }

    fn options(
        &self,
        arguments: &Arguments,
        endpoint: TlsEndpoint,
        notices: &Notices,
    ) -> Result<Options, Stop> {
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
            limit: self.limit.clone(),
            compress: compress(arguments, endpoint)?,
            notices: notices.clone(),
        })
    }
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

/// Splits `ADDRESS/ROUTE`, which names another relay and one of its destinations.
pub(in crate::commands) fn split_route(to: &str) -> Result<(Address, RouteName), Stop> {
    let Some((place, route)) = to.rsplit_once('/') else {
        return Err(Stop::usage(format!(
            "{to:?} names no route: write tcp:HOST:PORT/ROUTE or unix:PATH/ROUTE"
        )));
    };
    Ok((address(place)?, name(route)?))
}

pub(in crate::commands) fn secret(path: &Path) -> Result<SharedSecret, Stop> {
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

fn listened(text: &str, listeners: &mut Listeners) -> Result<Address, Stop> {
    match text.strip_prefix("listen:") {
        Some(text) => place(text, listeners),
        None => Err(Stop::usage(format!(
            "{text:?}: write listen:unix:PATH, listen:tcp:HOST:PORT or listen:systemd[:NAME]"
        ))),
    }
}

/// Where a relay listens: an address, or a socket of systemd.
fn place(text: &str, listeners: &mut Listeners) -> Result<Address, Stop> {
    listeners.take(text).unwrap_or_else(|| address(text))
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

pub(in crate::commands) fn stop(error: RelayError) -> Stop {
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
        assert_eq!(split_forward("systemd:a=unix:/s/r").unwrap(), ("systemd:a", "unix:/s/r"));
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
