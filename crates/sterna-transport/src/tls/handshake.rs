//! The handshake: bounded, cancellable, and its failures in words.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::Shutdown;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;

use super::credentials::Config;
use super::exporter::Exporter;
use super::name::subject;
use super::session::{Session, SessionState, Side, Step};
use super::{Tls, TlsEndpoint, TlsProblem};
use crate::cancel::{Waited, wait};
use crate::group::Wait;
use crate::{CancelFlag, Channel, Direction, TransportError};

/// How long a peer that was refused may take to hear why.
const FAREWELL: Duration = Duration::from_millis(500);
/// The first bytes of TLS records.
const RECORD_TYPES: std::ops::RangeInclusive<u8> = 0x14..=0x17;

/// Does the handshake on `channel`, whose address names `host`.
pub(crate) fn handshake(
    channel: &Channel,
    tls: &Tls,
    endpoint: TlsEndpoint,
    host: Option<&str>,
    limit: Duration,
    cancel: &CancelFlag,
) -> Result<Session, TransportError> {
    let exporter = Arc::new(Exporter::default());
    let side = begin(tls, endpoint, host, &exporter).map_err(|problem| channel.tls_error(problem))?;
    let mut hands = Hands {
        channel,
        cancel,
        limit,
        deadline: Instant::now().checked_add(limit),
        state: SessionState::new(side),
    };
    let met = hands.shake().and_then(|()| hands.meet(tls));
    match met {
        Ok(name) => {
            let binding = exporter.channel_binding(hands.state.common());
            Ok(Session::new(hands.state, name, binding))
        }
        Err(error) => {
            hands.say_farewell();
            Err(error)
        }
    }
}

/// Each session has settings of its own, which share all but where the exporter secret goes.
fn begin(
    tls: &Tls,
    endpoint: TlsEndpoint,
    host: Option<&str>,
    exporter: &Arc<Exporter>,
) -> Result<Side, TlsProblem> {
    match (&tls.credentials.config, endpoint) {
        (Config::Client(config), TlsEndpoint::Client) => {
            let name = server_name(tls, host)?;
            let mut config = config.as_ref().clone();
            config.key_log = Arc::clone(exporter) as _;
            let client =
                UnbufferedClientConnection::new(Arc::new(config), name).map_err(TlsProblem::from_rustls)?;
            Ok(Side::Client(Box::new(client)))
        }
        (Config::Server(config), TlsEndpoint::Server) => {
            let mut config = config.as_ref().clone();
            config.key_log = Arc::clone(exporter) as _;
            let server =
                UnbufferedServerConnection::new(Arc::new(config)).map_err(TlsProblem::from_rustls)?;
            Ok(Side::Server(Box::new(server)))
        }
        (_, wanted) => {
            Err(TlsProblem::Endpoint { theirs: tls.credentials.endpoint().word(), wanted: wanted.word() })
        }
    }
}

/// The name that the server's certificate must bear.
fn server_name(tls: &Tls, host: Option<&str>) -> Result<ServerName<'static>, TlsProblem> {
    let named = tls.hostname.as_deref().or(host).filter(|name| !name.is_empty());
    let name = match named {
        Some(name) => name,
        // Nobody will look at it.
        None if !tls.credentials.verifies_peer() => "localhost",
        None => {
            return Err(TlsProblem::Name(
                "the address contains no host name to check the certificate against: set the expected host name to that in \
                 the other side's certificate"
                    .to_owned(),
            ));
        }
    };
    ServerName::try_from(name.to_owned()).map_err(|_| {
        TlsProblem::Name(format!(
            "{name:?} is not a host name or number that a certificate can contain: set the expected host name to one"
        ))
    })
}

struct Hands<'a> {
    channel: &'a Channel,
    cancel: &'a CancelFlag,
    limit: Duration,
    deadline: Option<Instant>,
    state: SessionState,
}

impl Hands<'_> {
    fn shake(&mut self) -> Result<(), TransportError> {
        let mut is_first = true;
        loop {
            let step = self.state.step();
            if step.is_err() {
                self.state.prepare_alert();
            }
            let out = self.state.take_out();
            let sent = if out.is_empty() { Ok(()) } else { self.channel.send_raw(&out) };
            let step = step.map_err(|error| self.channel.tls_error(TlsProblem::from_rustls(error)))?;
            if let Err(error) = sent {
                return Err(self.closed(error));
            }
            if !self.state.common().is_handshaking() {
                return Ok(());
            }
            if self.state.is_closed() {
                return Err(self.channel.tls_error(TlsProblem::Closed));
            }
            if step == Step::Idle {
                self.receive()?;
                if is_first && self.state.received().first().is_some_and(|byte| !RECORD_TYPES.contains(byte))
                {
                    return Err(self.channel.tls_error(TlsProblem::PlainPeer));
                }
                is_first = false;
            }
        }
    }

    /// Waits for bytes and takes them.
    fn receive(&mut self) -> Result<(), TransportError> {
        loop {
            if self.channel.is_shut_down() || self.cancel.is_cancelled() {
                return Err(self.channel.cancelled());
            }
            let received = self.state.receive(self.channel);
            if self.channel.is_shut_down() {
                return Err(self.channel.cancelled());
            }
            match received {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait()?,
                Err(error) => {
                    if let Err(error) = self.channel.judge(Direction::Read, error, &mut Wait::default()) {
                        return Err(self.closed(error));
                    }
                }
            }
        }
    }

    fn wait(&self) -> Result<(), TransportError> {
        let waited = self
            .socket()
            .and_then(|socket| wait(socket, PollFlags::IN, &[self.cancel], self.deadline))
            .map_err(|error| self.channel.system("poll", error))?;
        match waited {
            Waited::Ready => Ok(()),
            Waited::Cancelled => Err(self.channel.cancelled()),
            Waited::TimedOut => Err(TransportError::TimedOut {
                what: "TLS handshake with",
                address: self.channel.peer().to_owned(),
                after: self.limit,
            }),
        }
    }

    /// TLS begins on sockets only.
    fn socket(&self) -> io::Result<BorrowedFd<'_>> {
        self.channel.socket().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// A connection that breaks in the handshake was closed by a peer that did not want it.
    fn closed(&self, error: TransportError) -> TransportError {
        if matches!(error, TransportError::Reset { .. }) {
            return self.channel.tls_error(TlsProblem::Closed);
        }
        error
    }

    /// Who came, and whether that one may. Only a server asks.
    fn meet(&self, tls: &Tls) -> Result<Option<String>, TransportError> {
        let certificates = self.state.common().peer_certificates();
        let name = certificates.and_then(<[_]>::first).and_then(subject);
        let Some(authorization) = &tls.authorization else { return Ok(name) };
        match &name {
            Some(name) if authorization.allows(name) => {}
            Some(name) => {
                let problem = TlsProblem::NotAuthorised { name: name.clone() };
                return Err(self.channel.tls_error(problem));
            }
            None => return Err(self.channel.tls_error(TlsProblem::NoCertificate)),
        }
        Ok(name)
    }

    /// Lets the peer read why it was refused. What it sends meanwhile stays unread, so that closing breaks the
    /// connection: a client that believes the handshake done must not believe that its stream was taken (a QEMU
    /// without return path would give its guest up for it).
    fn say_farewell(&self) {
        if self.channel.is_shut_down() || self.cancel.is_cancelled() {
            return;
        }
        let Ok(socket) = self.socket() else { return };
        let _ = rustix::net::shutdown(socket, Shutdown::Write);
        let _ = wait(socket, PollFlags::IN, &[self.cancel], Some(Instant::now() + FAREWELL));
    }
}
