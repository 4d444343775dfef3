//! Events: what an observer of a migration learns, when it happens. Part of the API, not of the log.

use std::time::Duration;

/// The status of a migration (QEMU's `MigrationStatus`; specs/stream.md §5.1), and two that QEMU lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Status {
    /// Never started.
    #[default]
    None,
    /// Connecting, exchanging headers.
    Setup,
    /// Cancelled by the operator; cleaning up.
    Cancelling,
    /// Cancelled; the source has the guest in its old state.
    Cancelled,
    /// Rounds over RAM; the guest runs.
    Active,
    /// The guest is stopped; waits for the operator.
    PreSwitchover,
    /// The guest is stopped; last pages and devices move. From the commit on it cannot be cancelled.
    Device,
    /// The guest is stopped; its devices move, and its pages will follow it. From the commit on it cannot be cancelled.
    PostcopyDevice,
    /// The guest runs at the destination, and its pages follow it.
    PostcopyActive,
    /// The same, and the connection broke: the guest waits at the first page that it lacks, and the source keeps its pages.
    PostcopyPaused,
    /// The same, and the source has connected again: it learns which pages are missing, and goes on.
    PostcopyRecover,
    /// The guest is protected: it runs here, and a standby holds its checkpoints.
    Colo,
    /// The destination has the guest.
    Completed,
    /// Something failed; cleaning up.
    Failing,
    /// Failed; before the commit the source's guest runs on.
    Failed,
    /// Committed, but the acknowledgement was lost: the source stays stopped and asks the destination.
    Undecided,
    /// Destination of a QEMU source: all loaded, held until the managing program sends `cont`.
    Held,
}

impl Status {
    /// Whether nothing more will happen by itself.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::None | Self::Cancelled | Self::Completed | Self::Failed)
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Setup => "setup",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
            Self::Active => "active",
            Self::PreSwitchover => "pre-switchover",
            Self::Device => "device",
            Self::PostcopyDevice => "postcopy-device",
            Self::PostcopyActive => "postcopy-active",
            Self::PostcopyPaused => "postcopy-paused",
            Self::PostcopyRecover => "postcopy-recover",
            Self::Colo => "colo",
            Self::Completed => "completed",
            Self::Failing => "failing",
            Self::Failed => "failed",
            Self::Undecided => "undecided",
            Self::Held => "held",
        })
    }
}

/// Something that happened in a migration.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// The status changed (QMP's MIGRATION).
    Status(Status),
    /// A round began; counted from 1 (QMP's MIGRATION_PASS).
    Round(u64),
    /// The guest was stopped at the source for the switchover (QMP's STOP).
    Stopped,
    /// The guest runs: at the source again, or at the destination (QMP's RESUME).
    Resumed,
    /// What the peer turned out to be.
    Peer {
        /// Whether it is a Sterna.
        sterna: bool,
        /// Feature bits of a Sterna peer (specs/extension.md).
        features: u16,
    },
    /// *Prepare* was answered (source) or is about to be (destination).
    Prepared,
    /// The commit point: the next byte is EOF (source), or EOF was read (destination).
    Committed,
    /// A step of the switchover ended; for timelines.
    SwitchoverStep {
        /// Which.
        step: SwitchoverStep,
        /// How long it took.
        took: Duration,
    },
    /// The connection was lost, and is being made anew, or waited for. The guest runs at the source.
    ConnectionLost {
        /// How.
        why: String,
    },
    /// Another connection has taken its place, and the migration goes on.
    Reconnected {
        /// Since the loss.
        took: Duration,
        /// Bytes of pages that are sent again (source).
        resent_bytes: u64,
    },
    /// Something that the operator should know and that does not end the migration.
    Warning(String),
}

/// The parts of the downtime, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SwitchoverStep {
    /// vCPUs stop, pending I/O completes.
    Stop,
    /// Hooks released.
    ReleaseHooks,
    /// The last sync.
    LastSync,
    /// The last pages.
    LastPages,
    /// The remaining bytes of device streams, during and after the last pages.
    Streams,
    /// Devices saved and sent.
    Devices,
    /// From *prepare* until its answer: the destination loads and acquires.
    Prepare,
    /// From the commit until the acknowledgement: the destination starts the guest.
    Start,
}

/// Receives events, in order, from the migration's threads. Must return soon.
pub trait Observer: Send + Sync {
    /// `event` happened.
    fn event(&self, event: &Event);
}

/// Ignores all events.
impl Observer for () {
    fn event(&self, _: &Event) {}
}

impl<F: Fn(&Event) + Send + Sync> Observer for F {
    fn event(&self, event: &Event) {
        self(event);
    }
}
