//! How the command ends: one clear sentence on standard error and a documented exit status.

use std::process::ExitCode;

use sterna_qmp::drive::DriveError;

/// Exit statuses. They are part of the command's promise; scripts may rely on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// All went well.
    Done = 0,
    /// It failed. If it was a migration, the guest runs on at the source.
    Failed = 1,
    /// The command line, or a file named on it, cannot be understood.
    Usage = 2,
    /// Committed without an acknowledgement, or stopped on both sides: the source stays stopped until it has learnt
    /// the truth or an operator decides.
    Undecided = 3,
    /// The guest that arrived is not the guest that left: memory is damaged.
    Damaged = 4,
    /// A second Ctrl-C: the migration goes on, nobody watches it.
    Detached = 5,
    /// Cancelled by Ctrl-C; the guest runs on at the source.
    Cancelled = 130,
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        ExitCode::from(status as u8)
    }
}

/// The statuses as `--help` shows them.
pub const HELP: &str = "\
Exit status:
  0    done
  1    failed; if a migration was under way, the guest runs on at the source
  2    the command line, or a file named on it, cannot be understood
  3    undecided: committed but not acknowledged, the source stays stopped
  4    the guest that arrived is not the guest that left
  5    detached by a second Ctrl-C; the migration goes on
  130  cancelled by Ctrl-C; the guest runs on at the source";

/// Why a command ends early: what happened and what to do next, in one sentence or two.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Stop {
    /// What the process ends with.
    pub status: Status,
    /// What the user reads.
    pub message: String,
}

impl Stop {
    /// Ends with [`Status::Failed`].
    pub fn failed(message: impl Into<String>) -> Self {
        Self { status: Status::Failed, message: message.into() }
    }

    /// Ends with [`Status::Usage`].
    pub fn usage(message: impl Into<String>) -> Self {
        Self { status: Status::Usage, message: message.into() }
    }

    /// The same with more behind it.
    pub fn with_more(mut self, more: &str) -> Self {
        self.message += more;
        self
    }

    /// Ends with `status`.
    pub fn with(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl From<DriveError> for Stop {
    fn from(error: DriveError) -> Self {
        let status = match &error {
            DriveError::Cancelled(_) => Status::Cancelled,
            DriveError::Detached(_) => Status::Detached,
            DriveError::Undecided(_) => Status::Undecided,
            _ => Status::Failed,
        };
        Self { status, message: error.to_string() }
    }
}

/// What every command gives back.
pub type Done = Result<Status, Stop>;
