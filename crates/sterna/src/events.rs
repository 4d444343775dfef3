//! Events of a migration, which the engine reports to an [`Observer`] as they happen. They are part of the API, not
//! of the log.

use std::time::Duration;

/// The status of a migration: QEMU's `MigrationStatus` (specs/stream.md §5.1), and two states that QEMU lacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Status {
    /// No migration was started.
    #[default]
    None,
    /// The sides connect and exchange headers.
    Setup,
    /// The operator cancelled; threads end and resources are released.
    Cancelling,
    /// Cancelled; the guest is at the source, in the run state that it had before.
    Cancelled,
    /// The source sends RAM in rounds while the guest runs.
    Active,
    /// The guest is stopped; the source waits for the operator (`pause-before-switchover`).
    PreSwitchover,
    /// The guest is stopped; the source sends the last pages and the devices. From the commit on, a cancel is
    /// refused.
    Device,
    /// The guest is stopped; the source sends its devices, and the pages follow later. From the commit on, a cancel
    /// is refused.
    PostcopyDevice,
    /// The guest runs at the destination, and its pages follow.
    PostcopyActive,
    /// Postcopy lost its connection: vCPUs block at missing pages, and the source keeps its pages.
    PostcopyPaused,
    /// Postcopy has a new connection: the source learns which pages are missing, then sends again.
    PostcopyRecover,
    /// The guest is protected: it runs here, and a standby holds its checkpoints.
    Colo,
    /// The destination has the guest.
    Completed,
    /// The migration failed; threads end and resources are released.
    Failing,
    /// The migration failed. If it failed before the commit, the source's guest continues to run.
    Failed,
    /// Committed, but the acknowledgement was lost: the source's guest stays stopped, and the source asks the
    /// destination.
    Undecided,
    /// Destination: everything is loaded, and the guest is stopped until [`Incoming::release`] or [`Incoming::discard`].
    ///
    /// Either a hook or the start has failed and no source can resume the guest: after a restore from a file, for a source
    /// without return path, or after a move on one host. Or the source is a QEMU, and [`Capabilities::unmanaged`] is off.
    ///
    /// [`Incoming::release`]: crate::Incoming::release
    /// [`Incoming::discard`]: crate::Incoming::discard
    /// [`Capabilities::unmanaged`]: crate::Capabilities::unmanaged
    Held,
}

impl Status {
    /// Whether the migration has ended. False for [`Status::None`], because no migration has begun, and for
    /// [`Status::Undecided`] and [`Status::Held`], which still end.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Cancelled | Self::Completed | Self::Failed)
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

/// One occurrence during a migration, reported in order.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// The status changed (QMP's MIGRATION).
    Status(Status),
    /// A round began; rounds count from 1 (QMP's MIGRATION_PASS).
    Round(u64),
    /// The guest was stopped at the source for the switchover (QMP's STOP).
    Stopped,
    /// The guest runs: at the source again, or at the destination (QMP's RESUME).
    Resumed,
    /// The handshake has shown which software the peer runs.
    Peer {
        /// Whether the peer is a Sterna.
        sterna: bool,
        /// Feature bits of a Sterna peer (specs/extension.md).
        features: u16,
    },
    /// The answer to *prepare* has arrived (source), or is about to be sent (destination).
    Prepared,
    /// The commit point: the next byte is EOF (source), or EOF was read (destination).
    Committed,
    /// A step of the switchover ended. Timelines are made from these events.
    SwitchoverStep {
        /// The step that ended.
        step: SwitchoverStep,
        /// Duration of the step.
        took: Duration,
    },
    /// The connection was lost. The source dials again, and the destination waits. The guest runs at the source.
    ConnectionLost {
        /// The cause of the loss.
        why: String,
    },
    /// A new connection replaces the lost one, and the migration continues.
    Reconnected {
        /// Time since the loss.
        took: Duration,
        /// Bytes of pages that are sent again (source).
        resent_bytes: u64,
    },
    /// A condition that the operator should know and that does not end the migration.
    Warning(String),
}

/// The parts of the downtime, in chronological order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SwitchoverStep {
    /// vCPUs stop, pending I/O completes.
    Stop,
    /// The source releases its hooks.
    ReleaseHooks,
    /// The last sync of dirty pages.
    LastSync,
    /// The last pages are sent.
    LastPages,
    /// The remaining bytes of device streams are sent, during and after the last pages.
    Streams,
    /// Devices are saved and sent.
    Devices,
    /// *Prepare* and its answer: the destination loads devices and acquires hooks.
    Prepare,
    /// Commit and acknowledgement: the destination starts the guest.
    Start,
}

/// Receives events, in order, from the migration's threads. Must return quickly.
pub trait Observer: Send + Sync {
    /// Called once per event.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migration_that_has_not_begun_or_is_undecided_has_not_ended() {
        for status in [Status::None, Status::Undecided, Status::Held, Status::Failing] {
            assert!(!status.is_terminal(), "{status}");
        }
        for status in [Status::Completed, Status::Cancelled, Status::Failed] {
            assert!(status.is_terminal(), "{status}");
        }
    }
}
