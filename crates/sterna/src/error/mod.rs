//! Errors of a migration: the cause, the side at fault, and the consequence for the guest.

mod awaited;
mod convergence;
mod difference;
mod ending;
mod from;
mod lower;
mod misbehaviour;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sterna_ram::{DirtyError, GuestRam, PoisonedPage, RamError, RamFault};
use sterna_transport::{TlsFault, TransportError};
use sterna_wire::WireError;
use sterna_wire::extension;

use crate::order::RearmError;
use crate::rdma;

/// Which side has to change something before the migration can succeed.
pub use sterna_wire::Fault;

pub use awaited::Awaited;
pub use convergence::{NoConvergence, Remedy};
pub use difference::{
    ConfigurationDifference, Difference, MachineDifference, MemoryDifference, ProtectionDifference,
    RefusedLane, SettingDifference, Tls12Use, UnknownDisk,
};
#[cfg(feature = "rdma")]
pub use difference::{RdmaDifference, RemotePlace};
pub use ending::Ending;
pub use lower::{Cause, VmError};
#[cfg(feature = "standby")]
pub use misbehaviour::BadProtection;
pub use misbehaviour::{
    BadAnswer, BadChunk, BadComeback, BadConnection, BadGrant, BadLane, BadMemory, BadPackage, BadPage,
    BadPayload, BadQuestion, BadRequest, BadRound, ChannelRole, Misbehaviour, Unproven, Untimely,
    UntimelyCommand,
};

/// Why a migration failed. Cheap to clone, because several threads may report the same error.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// Bytes of a channel broke a rule of the format, or do not match this side's settings.
    #[error("{channel}: {error}")]
    Wire {
        /// The channel that they came on.
        channel: String,
        /// The byte, the message, and the broken rule.
        error: WireError,
    },
    /// A channel could not be opened, was closed, or made no progress.
    #[error("{0}")]
    Transport(#[source] Arc<TransportError>),
    /// A connection or the migration ended, and no side is known to be at fault.
    #[error("{0}")]
    Ended(#[from] Ending),
    /// The peer broke the protocol in a way that no single message shows.
    #[error("{0}; the peer broke the protocol")]
    PeerMisbehaved(#[from] Misbehaviour),
    /// The two sides are set up differently.
    #[error("{0}; the two sides are set up differently")]
    PeerIncompatible(#[from] Difference),
    /// The destination reported a failure, with this code of SHUT.
    #[error("{}", destination_failed(*.0))]
    DestinationFailed(u32),
    /// The peer did not answer or act within the time limit.
    #[error("waited {after:?} for {what}; check that the peer runs, and the network between")]
    Limit {
        /// What the peer did not do.
        what: Awaited,
        /// The time limit that has passed.
        after: Duration,
    },
    /// The destination made no VM from this VM's configuration.
    #[error("the destination could not make its VM from this VM's configuration: {why}")]
    NotConfigured {
        /// The destination's reason, usually the error of its VMM.
        why: String,
    },
    /// The VMM could not perform the engine's request.
    #[error("{0}")]
    Vm(#[from] VmError),
    /// A callback of this side's VMM panicked instead of returning.
    #[error("{callback} panicked: {message}; see the log of this side's VMM")]
    Panicked {
        /// The callback, with its device or hook; or the engine's thread or action, if no callback is known.
        callback: String,
        /// The panic's message.
        message: String,
    },
    /// Guest RAM could not be accessed.
    #[error("guest RAM: {0}")]
    Ram(#[source] Cause),
    /// Pages of guest RAM have failed (uncorrectable memory errors of this host): their content is lost.
    #[error(
        "memory of this host has failed under the guest (poisoned): {}. The content of these pages is lost and cannot \
         be migrated: restart the guest, which gives it other memory",
        name_pages(pages, *address)
    )]
    Poisoned {
        /// The failed pages. Empty until the search has found them, or if it cannot find them.
        pages: Vec<PoisonedPage>,
        /// The address in this process at which a copy or a scan met the failure, if known.
        address: Option<usize>,
    },
    /// Dirty tracking failed.
    #[error("dirty tracking: {0}")]
    Dirty(#[source] Cause),
    /// The operating system refused a request.
    #[error("{0}")]
    System(String, #[source] Option<Cause>),
    /// The machine arrived completely, but its image could not be renamed to its place. The source has completed.
    #[error(
        "{why}; the source believes that it has completed, so this may be the only copy of the guest: it is kept in \
         {}, a complete mapped-ram image: move it to a safe place first", place.display()
    )]
    Kept {
        /// Path of the complete image.
        place: std::path::PathBuf,
        /// Why the image could not be renamed to its place.
        #[source]
        why: Arc<MigrationError>,
    },
    /// The engine broke one of its own rules: a bug of Sterna.
    #[error("internal error, please report it: {0}")]
    Internal(String),
    /// The VMM changed the guest's memory during a migration. The new memory was not moved.
    #[error(
        "this side's VMM changed the guest's memory during the migration: plug or unplug memory before the migration or \
         after it (GuestRam::with_blocks says when it can be)"
    )]
    RamChanged,
    /// Guest memory changed after the last sync ([`crate::Parameters::check_last_sync`]).
    #[error(
        "guest memory changed after the last sync: {pages} pages of block {block:?}, the first is page {first_page}. The \
         destination would lack the change. A device of this side's VMM still writes: complete its requests in \
         SourceVm::stop or SourceVm::quiesce, not in Device::save"
    )]
    ChangedAfterLastSync {
        /// The first block with a change.
        block: String,
        /// Index of its first changed page.
        first_page: u64,
        /// Number of its changed pages.
        pages: u64,
    },
    /// A checkpoint is larger than this standby's journal allows.
    #[error(
        "a checkpoint is larger than the journal's limit of {limit_bytes} bytes and was dropped; the one before it is held. \
         Raise the limit, or let the primary take checkpoints more often (x-checkpoint-delay)"
    )]
    JournalFull {
        /// The limit, in bytes.
        limit_bytes: u64,
    },
    /// A checkpoint arrived different from the one that its primary sent.
    #[cfg(feature = "standby")]
    #[error(
        "checkpoint {number}: {difference} (specs/replica.md §7). It changed on the way or a side has a bug; it was \
         dropped, and the one before it is held. Look for errors of memory and network on both hosts, then protect \
         the guest again"
    )]
    CheckpointDiffers {
        /// Number of the checkpoint.
        number: u64,
        /// The first difference between the summary and the received checkpoint.
        difference: sterna_wire::replica::SummaryDifference,
    },
    /// A protected guest's disk writes of one epoch exceed this standby's buffer.
    #[error(
        "the guest wrote more to its disk {disk} between two checkpoints than the buffer's limit of {limit_bytes} bytes; the \
         checkpoint before it is held. Raise the limit, or let the primary take checkpoints more often (x-checkpoint-delay)"
    )]
    DiskBufferFull {
        /// Name of the disk.
        disk: String,
        /// The limit over all disks, in bytes.
        limit_bytes: u64,
    },
    /// The connection that carries a protected guest's disk writes has ended.
    #[error(
        "the primary's connection for disk {disk} has ended: {why}; what the guest wrote since the last checkpoint is dropped"
    )]
    DiskLost {
        /// Name of the disk.
        disk: String,
        /// How the connection ended.
        why: String,
    },
    /// The guest writes faster than the source can send, and the operator's setting makes that a failure.
    #[error("the migration does not converge: {why}")]
    NotConverging {
        /// The measured rates, and the settings to change.
        #[source]
        why: Arc<NoConvergence>,
    },
    /// The connection was lost, and no new one was established in time.
    #[error(
        "the connection was lost ({why}), and none could be made again within {} s{}: see whether the other side still runs, \
         and migrate again",
        window.as_secs_f64(),
        last.as_ref().map_or_else(String::new, |last| format!(" (the last attempt: {last})"))
    )]
    NotReconnected {
        /// The cause of the loss.
        why: Arc<MigrationError>,
        /// Time during which the source dialled, or the destination waited.
        window: std::time::Duration,
        /// How the last attempt failed; `None` at a destination.
        last: Option<String>,
    },
    /// The target of a live save took no bytes while a write of the guest waited.
    #[error(
        "a write of the guest was held for {after:?}, because {buffer_bytes} bytes of copied pages wait and the target of the \
         live save takes no more: the save was given up, and the guest runs. Save to a faster target, or allow more memory for \
         copies"
    )]
    HeldTooLong {
        /// Time for which the write was held.
        after: Duration,
        /// Limit of the copied pages, in bytes.
        buffer_bytes: u64,
    },
    /// The guest was restored before its memory was loaded, and a page cannot be loaded. Nothing was sent.
    #[error(
        "the rest of the guest's memory must be loaded first, and {0}. A guest that needs this page is stopped. Try again when \
         the image can be read"
    )]
    NotLoaded(#[source] Cause),
    /// An operator cancelled the migration.
    #[error("cancelled")]
    Cancelled,
}

impl MigrationError {
    /// The side at fault; `None` if no side is (a cut network, a cancel).
    pub fn fault(&self) -> Option<Fault> {
        match self {
            Self::Wire { error, .. } => Some(error.fault),
            Self::Kept { why, .. } => why.fault(),
            Self::PeerMisbehaved(_) | Self::Limit { .. } => Some(Fault::PeerMisbehaved),
            Self::PeerIncompatible(_) => Some(Fault::PeerIncompatible),
            Self::Vm(_)
            | Self::Panicked { .. }
            | Self::Ram(_)
            | Self::Poisoned { .. }
            | Self::Dirty(_)
            | Self::RamChanged
            | Self::ChangedAfterLastSync { .. }
            | Self::System(..)
            | Self::Internal(_)
            | Self::JournalFull { .. }
            | Self::DiskBufferFull { .. }
            | Self::NotLoaded(_)
            | Self::NotConverging { .. } => Some(Fault::Local),
            Self::Transport(error) => tls_fault(error).or_else(|| rdma::fault(error)),
            Self::Ended(_)
            | Self::NotReconnected { .. }
            | Self::DiskLost { .. }
            | Self::DestinationFailed(_)
            | Self::NotConfigured { .. }
            | Self::HeldTooLong { .. }
            | Self::Cancelled => None,
            // Unknown: the memory of either side, or the network between them, may have changed it.
            #[cfg(feature = "standby")]
            Self::CheckpointDiffers { .. } => None,
        }
    }

    /// Checks that the VM's RAM is the same as when its migration began.
    #[doc(hidden)]
    pub fn check_same_ram(now: &GuestRam, ram: &GuestRam) -> Result<(), Self> {
        if now.same_as(ram) { Ok(()) } else { Err(Self::RamChanged) }
    }

    /// Whether the network or the peer was silent for too long.
    #[doc(hidden)]
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::Transport(error) => match &**error {
                TransportError::Reset { source, .. } => source.kind() == std::io::ErrorKind::TimedOut,
                error => matches!(error, TransportError::Stalled { .. }),
            },
            _ => false,
        }
    }

    /// A file of this side failed: the peer is not at fault.
    #[doc(hidden)]
    pub fn storage(error: TransportError) -> Self {
        if error.is_failed_memory() {
            return Self::failed_memory(error.failed_address());
        }
        Self::system(error.to_string(), error)
    }

    /// The operating system refused a request because of `cause`, which `what` names.
    #[doc(hidden)]
    pub fn system(what: String, cause: impl Error + Send + Sync + 'static) -> Self {
        Self::System(what, Some(Arc::new(cause)))
    }

    /// Memory has failed. The page is found later, by a caller that has the guest's RAM.
    fn failed_memory(address: Option<usize>) -> Self {
        Self::Poisoned { pages: Vec::new(), address }
    }

    /// Stores the error in `place`, unless an earlier error is there: the first reason wins.
    ///
    /// A page of `ram` that failed under a copy or a scan is marked and named. Fast, because the guest may be paused
    /// until the failure is known.
    #[doc(hidden)]
    pub fn note(mut self, place: &Mutex<Option<Self>>, ram: Option<&GuestRam>) {
        if let (Self::Poisoned { pages, address }, Some(ram)) = (&mut self, ram)
            && pages.is_empty()
            && let Some(why) = address.and_then(|address| ram.why_failed_at(address))
        {
            let address = *address;
            self = match why.into() {
                Self::Poisoned { pages, .. } => Self::Poisoned { pages, address },
                error => error,
            };
        }
        place.lock().get_or_insert(self);
    }

    /// Searches all of `ram` for failed pages, if memory has failed and the page is unknown. This happens if the
    /// kernel met the failure in a system call.
    ///
    /// This takes seconds for a large guest. Call it only when no thread waits for the result.
    #[doc(hidden)]
    pub fn find_pages(place: &Mutex<Option<Self>>, ram: &GuestRam) {
        let lock = || place.lock();
        if !matches!(&*lock(), Some(Self::Poisoned { pages, .. }) if pages.is_empty()) {
            return;
        }
        match (ram.find_poisoned(), lock().as_mut()) {
            (Ok(found), Some(Self::Poisoned { pages, .. })) => *pages = found,
            (Err(error @ RamError::NoSpace { .. }), Some(noted)) => *noted = error.into(),
            (Err(error), _) => tracing::warn!("looking for memory that has failed: {error}"),
            _ => {}
        }
    }

    /// Refuses to hand a guest over while a page of its RAM is known to have failed.
    #[doc(hidden)]
    pub fn check_memory(ram: &GuestRam) -> Result<(), Self> {
        let pages = ram.poisoned();
        if pages.is_empty() { Ok(()) } else { Err(Self::Poisoned { pages, address: None }) }
    }

    #[doc(hidden)]
    pub fn wire(channel: &str) -> impl Fn(WireError) -> Self + '_ {
        move |error| Self::Wire { channel: channel.to_owned(), error }
    }
}

/// The side at fault for a failed TLS handshake. A later failure counts as a broken connection.
fn tls_fault(error: &TransportError) -> Option<Fault> {
    let TransportError::Tls { problem, .. } = error else { return None };
    match problem.fault() {
        TlsFault::Ours => Some(Fault::Local),
        TlsFault::Setup => Some(Fault::PeerIncompatible),
        TlsFault::Peer | TlsFault::Nobody => None,
    }
}

impl From<TransportError> for MigrationError {
    fn from(error: TransportError) -> Self {
        if error.is_failed_memory() {
            return Self::failed_memory(error.failed_address());
        }
        Self::Transport(Arc::new(error))
    }
}

impl From<RamError> for MigrationError {
    fn from(error: RamError) -> Self {
        match error {
            RamError::Poisoned { page } => Self::Poisoned { pages: vec![page], address: None },
            error => Self::Ram(Arc::new(error)),
        }
    }
}

impl From<RamFault> for MigrationError {
    /// The page is found when the error is noted (`MigrationError::note`).
    fn from(fault: RamFault) -> Self {
        Self::failed_memory(Some(fault.address))
    }
}

/// Text for the code in the destination's SHUT message.
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

/// Names the first 16 failed pages; if none is known, the address that failed.
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
        Self::Dirty(Arc::new(error))
    }
}

impl From<RearmError> for MigrationError {
    fn from(error: RearmError) -> Self {
        Self::Dirty(Arc::new(error))
    }
}

#[cfg(test)]
pub(crate) mod tests;
