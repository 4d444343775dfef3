//! The TLS handshake, with a time limit, cancellation, and errors for an operator.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::Shutdown;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;

use super::Tls;
use super::credentials::Config;
use super::endpoint::TlsEndpoint;
use super::exporter::Exporter;
use super::name::subject;
use super::problem::TlsProblem;
use super::session::{Session, SessionState, Side, Step};
use super::underlying::Underlying;
use crate::cancel::CancelFlag;
use crate::cancel::{Waited, wait};
use crate::channel::Channel;
use crate::error::{Direction, TransportError};
use crate::group::Wait;

/// Time that a refused peer has to read the alert.
const FAREWELL: Duration = Duration::from_millis(500);
/// Valid first bytes of a TLS record.
const RECORD_TYPES: std::ops::RangeInclusive<u8> = 0x14..=0x17;

impl Channel {
    /// Does the TLS handshake within `limit`; all later bytes are encrypted.
    ///
    /// `endpoint` is the role of this side. `host` (clients only) is the name by which the peer was reached. The
    /// channel must not have read or written a byte before. Another thread can end the handshake by `cancel` or by
    /// [`Channel::shutdown`].
    ///
    /// # Errors
    /// [`TransportError::Tls`] with the problem, the responsible side and a remedy;
    /// [`TransportError::TimedOut`], [`TransportError::Cancelled`], [`TransportError::System`].
    pub fn start_tls(
        &self,
        tls: &Tls,
        endpoint: TlsEndpoint,
        host: Option<&str>,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<(), TransportError> {
        if self.socket().is_none() {
            let none = io::Error::new(
                io::ErrorKind::Unsupported,
                "this channel is not a socket and does not support TLS",
            );
            return Err(self.system("start_tls", none));
        }
        if !self.is_unused() {
            let late = io::Error::new(io::ErrorKind::InvalidInput, "the channel was used without TLS before");
            return Err(self.system("start_tls", late));
        }
        let before = self.stall_limit();
        self.set_stall_limit(Some(limit));
        let session = handshake(self, tls, endpoint, host, limit, cancel);
        self.set_stall_limit(before);
        self.encrypt(session?)
    }
}

/// Does the handshake on `channel`. `host` is the host name in the channel's address.
fn handshake(
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

/// Starts the TLS state machine. Each session has its own copy of the settings, because the exporter secret differs.
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
        // The name is not checked.
        None if !tls.credentials.verifies_peer() => "localhost",
        None => {
            return Err(TlsProblem::Name(
                "the address contains no host name to check the certificate against: set the expected host name to \
                 the name in the other side's certificate"
                    .to_owned(),
            ));
        }
    };
    ServerName::try_from(name.to_owned()).map_err(|_| {
        TlsProblem::Name(format!(
            "{name:?} is not a host name or IP address that a certificate can contain: set another expected host name"
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

    /// Waits until bytes arrive and receives them.
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

    /// The channel's socket. TLS can only start on a socket.
    fn socket(&self) -> io::Result<BorrowedFd<'_>> {
        self.channel.socket().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Replaces a reset: in the handshake it means that the peer refused the connection and closed.
    fn closed(&self, error: TransportError) -> TransportError {
        if matches!(error, TransportError::Reset { .. }) {
            return self.channel.tls_error(TlsProblem::Closed);
        }
        error
    }

    /// The peer's name, after the check that it is allowed. Only a server has an authorization.
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

    /// Gives the peer time to read the alert that refuses it.
    ///
    /// Bytes that the peer sends meanwhile are not read, so that closing resets the connection. A TLS 1.3 client
    /// already considers the handshake complete, and must not conclude that its stream was accepted. A QEMU
    /// without return path would then give its guest up.
    fn say_farewell(&self) {
        if self.channel.is_shut_down() || self.cancel.is_cancelled() {
            return;
        }
        let Ok(socket) = self.socket() else { return };
        let _ = rustix::net::shutdown(socket, Shutdown::Write);
        let _ = wait(socket, PollFlags::IN, &[self.cancel], Some(Instant::now() + FAREWELL));
    }
}
