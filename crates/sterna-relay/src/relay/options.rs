//! Settings of a relay, and what it reports.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna_transport::{Address, Tls};

use super::error::RelayError;
use super::figures::Figures;
use super::limit::Limit;
use crate::frame::{Offer, RouteName, SessionId, SharedSecret};
use crate::pack::{Cache, Figures as Packed, Mode};
use crate::phase::Phase;

/// Settings of a relay.
#[derive(Debug, Clone)]
pub struct Options {
    /// Certificates and secret.
    pub security: Security,
    /// Number of carriers of a session, 1 to 16. Used by the relay that connects.
    pub carriers: u8,
    /// How long a session may have no carrier.
    pub reconnect_window: Duration,
    /// Most bytes of a session that wait to be acknowledged, and most that wait to be delivered.
    pub buffer_bytes: u64,
    /// Whether a QEMU migration without return path is relayed.
    pub unconfirmed: bool,
    /// Whether streams are relayed without reading them.
    pub is_raw: bool,
    /// Compression.
    pub compress: Compress,
    /// Limit for the bytes that all sessions with a clone of it send.
    pub limit: Limit,
    /// Receives what an operator should know.
    pub notices: Notices,
}

/// How a relay compresses.
#[derive(Debug, Clone)]
pub struct Compress {
    /// Of the relay that connects: how it sends. Of the relay that accepts: anything but `Off` accepts compression.
    pub mode: Mode,
    /// The pages that the relay at the destination keeps, for all its sessions. The one at the source only uses the limit.
    pub cache: Arc<Cache>,
}

impl Compress {
    /// No compression.
    pub fn off() -> Self {
        Self { mode: Mode::Off, cache: Arc::new(Cache::new(0, Vec::new())) }
    }

    /// Whether bytes may be compressed.
    pub fn is_on(&self) -> bool {
        self.mode != Mode::Off
    }

    /// What the relay accepts of an offer.
    pub(super) fn accepts(&self) -> Offer {
        match self.mode {
            Mode::Off => Offer::default(),
            _ => Offer { packs: true, cache_pages: self.cache.most_pages() },
        }
    }
}

/// How the relays prove who they are.
#[derive(Debug, Clone, Default)]
pub struct Security {
    /// Certificates. The relay that connects is the client.
    pub tls: Option<Tls>,
    /// A secret that both relays have.
    pub secret: Option<SharedSecret>,
    /// Whether addresses that other hosts can reach are used without either.
    pub insecure: bool,
}

impl Security {
    /// Checks that an address may be used.
    ///
    /// # Errors
    /// [`RelayError::Open`].
    pub fn check(&self, address: &Address) -> Result<(), RelayError> {
        let is_here = match address {
            Address::Tcp { host, .. } => {
                host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
            }
            _ => true,
        };
        if is_here || self.insecure || self.tls.is_some() || self.secret.is_some() {
            return Ok(());
        }
        Err(RelayError::Open { address: address.to_string() })
    }
}

/// The destinations that a relay connects to.
#[derive(Debug, Clone, Default)]
pub struct Routes {
    /// Names and addresses.
    pub table: BTreeMap<RouteName, Address>,
    /// A directory whose sockets are destinations, by the names of their files. `NAME` finds `NAME` and `NAME.sock`.
    pub directory: Option<PathBuf>,
}

impl Routes {
    /// The address of a route. A file in the directory need not exist yet; one that exists is no symbolic link.
    pub fn find(&self, name: &RouteName) -> Option<Address> {
        if let Some(address) = self.table.get(name) {
            return Some(address.clone());
        }
        let directory = self.directory.as_ref()?;
        let is_socket = |path: &PathBuf| {
            use std::os::unix::fs::FileTypeExt;
            std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
        };
        let names = [name.as_str().to_owned(), format!("{name}.sock")];
        names.into_iter().map(|name| directory.join(name)).find(is_socket).map(Address::Unix)
    }
}

/// Something that an operator should know.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// A session began.
    Began {
        /// The session.
        session: SessionId,
        /// Its route.
        route: RouteName,
    },
    /// The phase of a migration changed.
    Phase {
        /// The session.
        session: SessionId,
        /// The phase.
        phase: Phase,
    },
    /// One of several carriers is lost; others remain.
    CarrierLost {
        /// The session.
        session: SessionId,
        /// Number of the carrier.
        carrier: u8,
        /// The reason.
        why: String,
    },
    /// A carrier that was lost is back, while others remained.
    CarrierBack {
        /// The session.
        session: SessionId,
        /// Number of the carrier.
        carrier: u8,
    },
    /// All carriers are lost.
    Lost {
        /// The session.
        session: SessionId,
        /// The reason.
        why: String,
    },
    /// A carrier is back.
    Back {
        /// The session.
        session: SessionId,
        /// How long there was none.
        after: Duration,
    },
    /// A connection or a stream was refused.
    Refused {
        /// The session, if there is one.
        session: Option<SessionId>,
        /// The reason.
        why: String,
    },
    /// The other relay does not take compressed bytes.
    NotCompressed {
        /// The session.
        session: SessionId,
        /// The reason.
        why: &'static str,
    },
    /// What compression has saved, at the end of a session at the source.
    Compressed {
        /// The session.
        session: SessionId,
        /// Sums over the bulk data.
        figures: Packed,
    },
    /// The source is kept waiting: an operator has to look at the destination.
    Waiting {
        /// The session.
        session: SessionId,
        /// Which side runs the guest, and what to do.
        advice: String,
    },
    /// A session ended.
    Ended {
        /// The session.
        session: SessionId,
        /// How.
        how: String,
        /// Whether it ended in order.
        in_order: bool,
        /// The figures at the end.
        figures: Box<Figures>,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Began { session, route } => write!(f, "session {session}: began, route {route}"),
            Notice::Phase { session, phase } => write!(f, "session {session}: {phase}"),
            Notice::CarrierLost { session, carrier, why } => {
                write!(f, "session {session}: connection {carrier} to the other relay is lost: {why}")
            }
            Notice::CarrierBack { session, carrier } => {
                write!(f, "session {session}: connection {carrier} to the other relay is back")
            }
            Notice::Lost { session, why } => {
                write!(f, "session {session}: no connection to the other relay: {why}")
            }
            Notice::Back { session, after } => {
                write!(f, "session {session}: connected again after {:.1} s", after.as_secs_f64())
            }
            Notice::Refused { session: Some(session), why } => write!(f, "session {session}: refused: {why}"),
            Notice::Refused { session: None, why } => write!(f, "refused: {why}"),
            Notice::NotCompressed { session, why } => {
                write!(f, "session {session}: relayed without compression: {why}")
            }
            Notice::Compressed { session, figures } => write!(
                f,
                "session {session}: {} bytes went as {}, {} pages of them as references; compressing took {:.2} s, and {} \
                 frames went twice because a page was missing",
                figures.plain,
                figures.sent,
                figures.references,
                figures.spent.as_secs_f64(),
                figures.misses
            ),
            Notice::Waiting { session, advice } => write!(f, "session {session}: {advice}"),
            Notice::Ended { session, how, .. } => write!(f, "session {session}: ended: {how}"),
        }
    }
}

/// Receives notices, from any thread.
#[derive(Clone)]
pub struct Notices(Arc<dyn Fn(Notice) + Send + Sync>);

impl Notices {
    /// Calls `receive` for every notice. It must not wait.
    pub fn new(receive: impl Fn(Notice) + Send + Sync + 'static) -> Self {
        Self(Arc::new(receive))
    }

    pub(super) fn send(&self, notice: Notice) {
        tracing::info!("{notice}");
        (self.0)(notice);
    }
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notices(..)")
    }
}
