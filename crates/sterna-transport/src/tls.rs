//! TLS over channels, with x509 certificates on both sides, by rustls.
//!
//! # The model
//! [`TlsCredentials`] are one side's files, read and checked once: the authorities that it trusts, its certificate
//! and its key. [`Tls`] adds the settings of one migration: the name that the server's certificate must bear, and
//! the clients that are allowed. [`crate::Channel::start_tls`] does the handshake on a connected channel.
//! Afterwards every call of the channel uses TLS; cancelling, stall limits and counters work as before. Counters
//! and offsets count plain bytes, not records.
//!
//! # Threads
//! One thread may read while another writes, although TLS has one state for both directions. A thread locks the
//! state only while it seals or opens records, never while it waits for the socket (see `session`).
//!
//! # The end
//! A peer that closes the connection without a TLS closing alert (QEMU does on its main channel) counts as closed.
//! The protocol inside decides whether data was cut off, because its streams mark their own end.
//! [`crate::Channel::finish_writing`] sends the alert and closes the direction; [`crate::Channel::say_goodbye`]
//! only sends the alert.
//!
//! # QEMU as the peer
//! GnuTLS checks certificates after the handshake. A TLS 1.3 client completes its handshake before the server
//! checks the client's certificate. A peer that closes before its first byte may therefore have refused the
//! certificate.

#[cfg(test)]
mod broken;
#[cfg(test)]
#[path = "../tests/support/certificates.rs"]
#[allow(dead_code, reason = "made for several tests")]
mod certificates;
mod credentials;
mod credentials_error;
pub(crate) mod endpoint;
#[cfg(test)]
mod exported;
mod exporter;
mod fault;
mod handshake;
mod name;
pub(crate) mod problem;
mod provider;
pub(crate) mod session;
#[cfg(test)]
mod tests;
pub(crate) mod underlying;
mod verify;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

pub use credentials::{TlsCredentials, TlsFiles};
pub use credentials_error::CredentialsError;
pub use endpoint::TlsEndpoint;
pub use fault::TlsFault;
pub use name::{Authorization, AuthorizationRule};
pub use problem::TlsProblem;
pub use rustls::crypto::CryptoProvider;

/// TLS settings for the channels of one migration.
#[derive(Clone)]
pub struct Tls {
    /// This side's files, and the role (client or server) that they are for.
    pub credentials: Arc<TlsCredentials>,
    /// The name that the server's certificate must bear (`tls-hostname`). `None` means the host in the address.
    ///
    /// Connecting side only.
    pub hostname: Option<String>,
    /// The clients that are allowed among those with valid certificates (`tls-authz`). Listening side only.
    pub authorization: Option<Authorization>,
}

impl Tls {
    /// Settings with the host name of the address, which allow every client with a valid certificate.
    pub fn new(credentials: Arc<TlsCredentials>) -> Tls {
        Tls { credentials, hostname: None, authorization: None }
    }

    /// The role that the credentials are for.
    pub fn endpoint(&self) -> TlsEndpoint {
        self.credentials.endpoint()
    }

    /// As [`Tls::new`], with the files of `directory`; peers must present valid certificates.
    ///
    /// # Errors
    /// As [`TlsCredentials::from_directory`].
    pub fn from_directory(directory: &Path, endpoint: TlsEndpoint) -> Result<Tls, CredentialsError> {
        let credentials = TlsCredentials::from_directory(directory, endpoint, true)?;
        Ok(Tls::new(Arc::new(credentials)))
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
