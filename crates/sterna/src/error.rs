//! How a migration can fail: what broke, whose fault it is, and where it leaves the guest.

use std::time::Duration;

use parking_lot::Mutex;
use sterna_ram::{DirtyError, GuestRam, PoisonedPage, RamError, RamFault};
use sterna_transport::rdma::RdmaError;
use sterna_transport::{StreamError, TlsFault, TransportError};
use sterna_wire::WireError;
use sterna_wire::extension;
use sterna_wire::replica::SummaryDifference;

use crate::order::RearmError;
use crate::rdma::StreamFailure;

/// Who has to change something so that it works.
pub use sterna_wire::Fault;

/// Why a migration failed. Cheap to clone, since several threads may learn it.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// Bytes of a channel broke a rule of the format, or do not fit what this side was told to expect.
    #[error("{channel}: {error}")]
    Wire {
        /// The channel that they came on.
        channel: String,
        /// Which byte of which message broke which rule.
        error: WireError,
    },
    /// A channel could not be opened, or ended, or stood still.
    #[error("{0}")]
    Transport(String, #[source] Option<std::sync::Arc<TransportError>>),
    /// The peer broke the protocol in a way that no single message shows.
    #[error("{what}; the peer broke the protocol")]
    PeerMisbehaved {
        /// What it did, and what the rule is.
        what: String,
    },
    /// The two sides are set up differently.
    #[error("{what}; the two sides are set up differently")]
    PeerIncompatible {
        /// What differs, and what to set.
        what: String,
    },
    /// The destination says that it failed.
    #[error("{}", destination_failed(*.0))]
    DestinationFailed(u32),
    /// The peer did not do in time what it had to.
    #[error("waited {after:?} for {what}; is the peer alive, and is the network between?")]
    Limit {
        /// What was waited for.
        what: String,
        /// How long.
        after: Duration,
    },
    /// The VMM could not do what the engine asked.
    #[error("{0}")]
    Vm(#[from] VmError),
    /// A callback of this side's VMM panicked instead of returning.
    #[error("{callback} panicked: {message}; see the log of this side's VMM")]
    Panicked {
        /// Which, with the device or hook that it concerns; or the engine's thread or action, where no callback is known.
        callback: String,
        /// What it said.
        message: String,
    },
    /// Guest RAM could not be reached.
    #[error("guest RAM: {0}")]
    Ram(String),
    /// Pages of guest RAM have failed (uncorrectable errors of this machine's memory): their content is lost.
    #[error(
        "memory of this host has failed under the guest (poisoned): {}. The content of these pages is lost and cannot \
         be migrated: restart the guest, which gives it other memory",
        name_pages(pages, *address)
    )]
    Poisoned {
        /// Where they are; empty as long as nobody has found out, and if nobody could.
        pages: Vec<PoisonedPage>,
        /// The address in this process where a copy or a scan met the failure, if it was one that did.
        address: Option<usize>,
    },
    /// Dirty tracking failed.
    #[error("dirty tracking: {0}")]
    Dirty(String),
    /// The operating system refused something.
    #[error("{0}")]
    System(String),
    /// All of the machine came, its source believes that it has completed, and the image could not be put in its place.
    #[error(
        "{why}; the source believes that it has completed, so this may be the only copy of the guest: it is kept in \
         {}, a complete mapped-ram image: move it to a safe place first", place.display()
    )]
    Kept {
        /// Where it lies.
        place: std::path::PathBuf,
        /// Why it is not in its place.
        #[source]
        why: std::sync::Arc<MigrationError>,
    },
    /// The engine broke a rule of its own: a bug of Sterna.
    #[error("internal error, please report it: {0}")]
    Internal(String),
    /// The VMM gave the guest other memory while a migration had it, and nothing of that was moved.
    #[error(
        "this side's VMM changed the guest's memory during the migration: plug or unplug memory before the migration or \
         after it (GuestRam::with_blocks says when it can be)"
    )]
    RamChanged,
    /// A checkpoint does not fit this standby's journal.
    #[error(
        "a checkpoint is larger than the journal's limit of {limit_bytes} bytes and was dropped; the one before it is held. \
         Raise the limit, or let the primary take checkpoints more often (x-checkpoint-delay)"
    )]
    JournalFull {
        /// The limit.
        limit_bytes: u64,
    },
    /// A checkpoint did not come as its primary has sent it.
    #[error(
        "checkpoint {number}: {difference} (specs/replica.md §7). It changed on the way or a side has a bug; it was dropped, and the \
         one before it is held. Look for errors of memory and network on both hosts, then protect the guest anew"
    )]
    CheckpointDiffers {
        /// The checkpoint.
        number: u64,
        /// In what.
        difference: SummaryDifference,
    },
    /// What a protected guest wrote to a disk in one epoch does not fit this standby's buffer.
    #[error(
        "the guest wrote more to its disk {disk} between two checkpoints than the buffer's limit of {limit_bytes} bytes; the \
         checkpoint before it is held. Raise the limit, or let the primary take checkpoints more often (x-checkpoint-delay)"
    )]
    DiskBufferFull {
        /// Its name.
        disk: String,
        /// The limit, over all disks.
        limit_bytes: u64,
    },
    /// What a protected guest writes to a disk does not come any more.
    #[error(
        "the primary's connection for disk {disk} has ended: {why}; what the guest wrote since the last checkpoint is dropped"
    )]
    DiskLost {
        /// Its name.
        disk: String,
        /// How it ended.
        why: String,
    },
    /// The guest writes faster than it can be sent, and the operator wanted it to fail then.
    #[error("the migration does not converge: {why}")]
    NotConverging {
        /// What was measured, and what to change.
        why: String,
    },
    /// The connection was lost, and no other one came in time.
    #[error(
        "the connection was lost ({why}), and none could be made again within {} s{}: see whether the other side still runs, \
         and migrate again",
        window.as_secs_f64(),
        last.as_ref().map_or_else(String::new, |last| format!(" (the last attempt: {last})"))
    )]
    NotReconnected {
        /// How it was lost.
        why: std::sync::Arc<MigrationError>,
        /// How long it was tried, or waited for.
        window: std::time::Duration,
        /// How the last attempt ended; none of a destination's.
        last: Option<String>,
    },
    /// An operator cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// Why the VMM could not do what the engine asked. Local by definition: the peer is never at fault.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}: {why}")]
#[non_exhaustive]
pub struct VmError {
    /// What was tried, with the device or vCPU it concerns.
    pub what: String,
    /// Why it failed, and what to do about it.
    pub why: String,
}

impl VmError {
    /// `what` failed because of `why`.
    pub fn new(what: impl Into<String>, why: impl ToString) -> Self {
        Self { what: what.into(), why: why.to_string() }
    }
}

impl MigrationError {
    /// Whose fault it is; `None` for what nobody did wrong (a cut network, a cancel).
    pub fn fault(&self) -> Option<Fault> {
        match self {
            Self::Wire { error, .. } => Some(error.fault),
            Self::Kept { why, .. } => why.fault(),
            Self::PeerMisbehaved { .. } | Self::Limit { .. } | Self::CheckpointDiffers { .. } => {
                Some(Fault::PeerMisbehaved)
            }
            Self::PeerIncompatible { .. } => Some(Fault::PeerIncompatible),
            Self::Vm(_)
            | Self::Panicked { .. }
            | Self::Ram(_)
            | Self::Poisoned { .. }
            | Self::Dirty(_)
            | Self::RamChanged
            | Self::System(_)
            | Self::Internal(_)
            | Self::JournalFull { .. }
            | Self::DiskBufferFull { .. }
            | Self::NotConverging { .. } => Some(Fault::Local),
            Self::Transport(_, Some(error)) => tls_fault(error).or_else(|| rdma_fault(error)),
            Self::Transport(_, None)
            | Self::NotReconnected { .. }
            | Self::DiskLost { .. }
            | Self::DestinationFailed(_)
            | Self::Cancelled => None,
        }
    }

    /// Whether the RAM that the VM has now is still that with which its migration began.
    pub(crate) fn check_same_ram(now: &GuestRam, ram: &GuestRam) -> Result<(), Self> {
        if now.same_as(ram) { Ok(()) } else { Err(Self::RamChanged) }
    }

    /// A file of this side's failed: nothing that the peer did.
    pub(crate) fn storage(error: TransportError) -> Self {
        if error.is_failed_memory() {
            return Self::failed_memory(error.failed_address());
        }
        Self::System(error.to_string())
    }

    /// Memory has failed; which page of the guest's it is, whoever has the guest's RAM finds out.
    fn failed_memory(address: Option<usize>) -> Self {
        Self::Poisoned { pages: Vec::new(), address }
    }

    /// Keeps the error in `place`, unless something is known already: the first reason wins. A page of `ram` that failed
    /// under a copy or a scan is marked and named. Takes no time: the guest may stand still until the failure is known.
    pub(crate) fn note(mut self, place: &Mutex<Option<Self>>, ram: Option<&GuestRam>) {
        if let (Self::Poisoned { pages, address: Some(address) }, Some(ram)) = (&mut self, ram)
            && pages.is_empty()
        {
            *pages = ram.mark_poisoned_at(*address).into_iter().collect();
        }
        place.lock().get_or_insert(self);
    }

    /// Where memory has failed and nobody knows which page it was (the kernel met it in a system call), asks the kernel
    /// about all of them: seconds for a large guest, so this is for when nobody waits any more.
    pub(crate) fn find_pages(place: &Mutex<Option<Self>>, ram: &GuestRam) {
        let lock = || place.lock();
        if !matches!(&*lock(), Some(Self::Poisoned { pages, .. }) if pages.is_empty()) {
            return;
        }
        let found = ram.find_poisoned();
        let found = found.inspect_err(|error| tracing::warn!("looking for memory that has failed: {error}"));
        if let Some(Self::Poisoned { pages, .. }) = lock().as_mut() {
            *pages = found.unwrap_or_default();
        }
    }

    /// Refuses to hand a guest over while a page of its RAM is known to have failed.
    pub(crate) fn check_memory(ram: &GuestRam) -> Result<(), Self> {
        let pages = ram.poisoned();
        if pages.is_empty() { Ok(()) } else { Err(Self::Poisoned { pages, address: None }) }
    }

    pub(crate) fn wire(channel: &str) -> impl Fn(WireError) -> Self + '_ {
        move |error| Self::Wire { channel: channel.to_owned(), error }
    }
}

/// A TLS handshake that fails says who has to change something; what breaks later is a broken connection.
fn tls_fault(error: &TransportError) -> Option<Fault> {
    let TransportError::Tls { problem, .. } = error else { return None };
    match problem.fault() {
        TlsFault::Ours => Some(Fault::Local),
        TlsFault::Setup => Some(Fault::PeerIncompatible),
        TlsFault::Peer | TlsFault::Nobody => None,
    }
}

/// Over RDMA, a message may have broken a rule, and an adapter or the kernel may have refused what this side wanted.
fn rdma_fault(error: &TransportError) -> Option<Fault> {
    let source: &(dyn std::error::Error + 'static) = match error {
        TransportError::Protocol { source, .. } => &**source,
        TransportError::Rdma { source, .. } => source,
        TransportError::Connect { source, .. } => match source.get_ref()?.downcast_ref()? {
            StreamError::Rdma(error) => error,
            StreamError::Protocol(error) => &**error,
            _ => return None,
        },
        _ => return None,
    };
    match (source.downcast_ref::<StreamFailure>(), source.downcast_ref::<RdmaError>()) {
        (Some(failure), _) => failure.fault(),
        (_, Some(error)) if error.is_local() => Some(Fault::Local),
        _ => None,
    }
}

impl From<TransportError> for MigrationError {
    fn from(error: TransportError) -> Self {
        if error.is_failed_memory() {
            return Self::failed_memory(error.failed_address());
        }
        Self::Transport(error.to_string(), Some(std::sync::Arc::new(error)))
    }
}

impl From<RamError> for MigrationError {
    fn from(error: RamError) -> Self {
        match error {
            RamError::Poisoned { page } => Self::Poisoned { pages: vec![page], address: None },
            error => Self::Ram(error.to_string()),
        }
    }
}

impl From<RamFault> for MigrationError {
    /// Which page it is, is found when the error is noted.
    fn from(fault: RamFault) -> Self {
        Self::failed_memory(Some(fault.address))
    }
}

/// What SHUT with this value says.
fn destination_failed(code: u32) -> String {
    match code {
        extension::SHUT_PAUSED => "an operator paused it at the destination (migrate-pause)".to_owned(),
        extension::SHUT_PAGE_FAILED => {
            "the destination could not place a page of the guest, for the second time (SHUT 3): its log names the page and the \
             reason; mend that first"
                .to_owned()
        }
        code => format!("the destination reported a failure (SHUT {code}); see its log"),
    }
}

/// Names failed pages, the first few of many; where none is known, the address that failed.
pub(crate) fn name_pages(pages: &[PoisonedPage], address: Option<usize>) -> String {
    const NAMED: usize = 16;
    match address {
        _ if !pages.is_empty() => {}
        Some(address) => return format!("the page at host address {address:#x}"),
        None => return "an unknown page".to_owned(),
    }
    let named: Vec<String> = pages.iter().take(NAMED).map(ToString::to_string).collect();
    let more = match pages.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more pages"),
    };
    named.join(", ") + &more
}

impl From<DirtyError> for MigrationError {
    fn from(error: DirtyError) -> Self {
        Self::Dirty(error.to_string())
    }
}

impl From<RearmError> for MigrationError {
    fn from(error: RearmError) -> Self {
        Self::Dirty(error.to_string())
    }
}

impl From<sterna_image::ImageError> for MigrationError {
    fn from(error: sterna_image::ImageError) -> Self {
        Self::System(error.to_string())
    }
}
