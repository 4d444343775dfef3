//! TLS over channels: x509 both ways, by rustls.
//!
//! # The model
//! [`TlsCredentials`] are one side's files, read and checked once: the authorities that it trusts, and its
//! own certificate with its key. [`Tls`] adds what belongs to one migration: the name that the server's
//! certificate must bear, and who may come as a client. [`crate::Channel::start_tls`] does the handshake
//! on a connected channel; from then on every call of the channel carries TLS, and cancels, stalls and
//! counts as before. Counts and offsets are those of the bytes inside.
//!
//! # Threads
//! One thread may read while another writes, although TLS has one state for both: the state is locked only
//! while records are sealed or opened, never while a thread waits for the socket (see `session`).
//!
//! # The end
//! A peer that closes without saying so in TLS (QEMU does on its main channel) has closed: whether that
//! cuts something off is for the protocol inside to judge, whose streams say themselves where they end.
//! [`crate::Channel::finish_writing`] says it in TLS first; [`crate::Channel::say_goodbye`] does only that.
//!
//! # Against QEMU
//! GnuTLS looks at certificates behind the handshake, and a TLS 1.3 client believes the handshake done
//! before its certificate was looked at: a peer that closes before its first byte may mean that.

#[cfg(test)]
mod broken;
#[cfg(test)]
#[path = "../tests/support/certificates.rs"]
#[allow(dead_code, reason = "made for several tests")]
mod certificates;
mod credentials;
#[cfg(test)]
mod exhausted;
#[cfg(test)]
mod exported;
mod exporter;
mod handshake;
mod name;
mod problem;
mod provider;
mod session;
mod verify;

use std::fmt;
use std::sync::Arc;

use crate::Address;

pub use credentials::{CredentialsError, TlsCredentials, TlsEndpoint, TlsFiles};
pub(crate) use handshake::handshake;
pub use name::{Authorization, AuthorizationRule};
pub use problem::{TlsFault, TlsProblem};
pub(crate) use session::Session;

/// TLS for the channels of one migration.
#[derive(Clone)]
pub struct Tls {
    /// This side's files, and whether it connects or listens.
    pub credentials: Arc<TlsCredentials>,
    /// The name that the server's certificate must bear, where the address does not say it
    /// (`tls-hostname`). Connecting side only.
    pub hostname: Option<String>,
    /// Which clients may come, of those whose certificates hold (`tls-authz`). Listening side only.
    pub authorization: Option<Authorization>,
}

impl Tls {
    /// With these credentials, the address's own name, and every client that has a certificate.
    pub fn new(credentials: Arc<TlsCredentials>) -> Tls {
        Tls { credentials, hostname: None, authorization: None }
    }
}

impl Address {
    /// The host that it names, if it does: what a server's certificate must bear.
    pub fn host(&self) -> Option<&str> {
        match self {
            Address::Tcp { host, .. } if host.is_empty() => Some("localhost"),
            Address::Tcp { host, .. } => Some(host),
            _ => None,
        }
    }
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.credentials, &other.credentials)
            && self.hostname == other.hostname
            && self.authorization == other.authorization
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("credentials", &self.credentials)
            .field("hostname", &self.hostname)
            .field("authorization", &self.authorization)
            .finish()
    }
}
