//! Channels without TLS, because the feature `tls` is off: no settings, session or problem of TLS exists.

#[path = "credentials_error.rs"]
mod credentials_error;
#[path = "endpoint.rs"]
pub(crate) mod endpoint;
#[path = "fault.rs"]
mod fault;

use std::path::Path;
use std::time::Duration;

use crate::cancel::CancelFlag;
use crate::channel::Channel;
use crate::error::TransportError;

pub use credentials_error::CredentialsError;
pub use endpoint::TlsEndpoint;
pub use fault::TlsFault;
pub use problem::TlsProblem;

/// TLS settings for the channels of one migration: none can be made without the feature `tls`.
#[derive(Debug, Clone, PartialEq)]
pub enum Tls {}

impl Tls {
    /// Refuses, because the feature `tls` is off.
    ///
    /// # Errors
    /// Always: the error names the feature.
    pub fn from_directory(directory: &Path, _: TlsEndpoint) -> Result<Tls, CredentialsError> {
        let problem = "TLS needs the Cargo feature \"tls\" of the crate sterna, which this program was built without: build \
                       the program with that feature, or give no credentials";
        Err(CredentialsError { file: directory.display().to_string(), problem: problem.to_owned() })
    }

    /// The role that the credentials are for.
    pub fn endpoint(&self) -> TlsEndpoint {
        match *self {}
    }
}

impl Channel {
    /// Starts TLS, for which no settings exist.
    ///
    /// # Errors
    /// None, because it cannot be called.
    pub fn start_tls(
        &self,
        tls: &Tls,
        _: TlsEndpoint,
        _: Option<&str>,
        _: Duration,
        _: &CancelFlag,
    ) -> Result<(), TransportError> {
        match *tls {}
    }
}

pub(crate) mod problem {
    use std::error::Error;
    use std::fmt;

    use super::TlsFault;

    /// Reason why a channel has no TLS session: none exists without the feature `tls`.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum TlsProblem {}

    impl TlsProblem {
        /// The side that must change something to remove the problem.
        pub fn fault(&self) -> TlsFault {
            match *self {}
        }
    }

    impl fmt::Display for TlsProblem {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            match *self {}
        }
    }

    impl Error for TlsProblem {}
}

pub(crate) mod session {
    use crate::channel::Channel;
    use crate::error::TransportError;
    use crate::parts::{Part, Remaining};

    /// A TLS session: none exists.
    #[derive(Debug)]
    pub(crate) enum Session {}

    impl Session {
        pub(crate) fn binding(&self) -> Option<[u8; 32]> {
            match *self {}
        }

        pub(crate) fn peer_name(&self) -> Option<&str> {
            match *self {}
        }

        pub(crate) fn read<P: Part>(
            &self,
            _: &Channel,
            _: &Remaining<'_, P>,
        ) -> Result<usize, TransportError> {
            match *self {}
        }

        pub(crate) fn write<P: Part>(
            &self,
            _: &Channel,
            _: &Remaining<'_, P>,
        ) -> Result<usize, TransportError> {
            match *self {}
        }

        pub(crate) fn say_goodbye(&self, _: &Channel) -> Result<(), TransportError> {
            match *self {}
        }

        pub(crate) fn discard_unread(&self, _: &Channel) {
            match *self {}
        }
    }
}
