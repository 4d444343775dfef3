//! How a command ends: a clear message on standard error and a documented exit status.
//!
//! Only this module converts errors to statuses, by one rule for all commands:
//!
//! * **2**: refused before anything was tried. [`Status::Usage`], with `usage:`: the command line is wrong or
//!   incomplete, has a name or value that the VM does not know, or names a target that exists without
//!   `--force`. [`Status::Unreadable`]: an input file cannot be read or has the wrong content.
//! * **1**: tried and failed, at a VM, a monitor, a peer, or while writing.
//!
//! Commands that judge images (`verify`, `diff`) return 0 or 1 as their result, and 2 if they cannot judge.

use std::path::Path;
use std::process::ExitCode;

use sterna_drive::DriveError;
use sterna_image::{ImageError, StoreError};
use sterna_qmp::ClientError;
use sterna_transport::TransportError;

/// Exit statuses. They are a stable interface for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The command has succeeded.
    Done,
    /// The command has failed. After a failed migration, the guest continues to run at the source.
    Failed,
    /// The command line cannot be parsed, or it requests something impossible.
    Usage,
    /// A file of the command line cannot be read, or has the wrong content.
    Unreadable,
    /// Committed without an acknowledgement, or stopped on both sides.
    /// The source stays stopped until it learns where the guest is, or an operator decides.
    Undecided,
    /// The guest that arrived differs from the guest that left: its memory is damaged.
    Damaged,
    /// A second Ctrl-C: the migration continues without this command.
    Detached,
    /// The standby has the protected guest, so the guest was ended here.
    Lost,
    /// A protection ended with the guest at the other side. The checkpoint that was held here is discarded.
    Discarded,
    /// The source has sent everything and stopped its guest, and nothing confirms that the guest has arrived.
    Unconfirmed,
    /// Cancelled by Ctrl-C; the guest continues to run at the source.
    Cancelled,
}

impl Status {
    /// The exit status of the process.
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage | Self::Unreadable => 2,
            Self::Undecided => 3,
            Self::Damaged => 4,
            Self::Detached => 5,
            Self::Lost => 6,
            Self::Discarded => 6,
            Self::Unconfirmed => 7,
            Self::Cancelled => 130,
        }
    }

    /// The prefix of the message.
    pub fn head(self) -> &'static str {
        match self {
            Self::Usage => "sterna: usage",
            Self::Done | Self::Cancelled | Self::Detached | Self::Discarded => "sterna",
            Self::Failed
            | Self::Unreadable
            | Self::Undecided
            | Self::Unconfirmed
            | Self::Damaged
            | Self::Lost => "sterna: error",
        }
    }
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        ExitCode::from(status.code())
    }
}

/// The statuses as `--help` shows them.
pub const HELP: &str = "\
Exit status:
  0    done
  1    failed; the guest of a failed migration runs at the source.
       verify: the image is damaged; diff: the images differ
  2    refused: the command line is wrong, a target exists and --force is not given,
       or an input file cannot be read or has the wrong content. verify, diff: no result
  3    undecided: the migration is committed but not acknowledged; the source stays stopped.
       protect: interrupted; the protection continues
  4    the guest's memory at the destination differs from its memory at the source
  5    detached by a second Ctrl-C; the migration continues
  6    the other side of a protection has the guest.
       protect, unprotect, run: the guest was ended here; standby: the checkpoint is discarded
  7    unconfirmed: the source has sent everything and stopped its guest,
       but no answer confirms that the guest arrived
  130  cancelled by Ctrl-C; the guest runs at the source

Environment:
  STERNA_LOG  level from which the engine logs to standard error, such as warn or debug;
              errors then also contain the byte position at which a connection ended";

/// The hint when a damaged image is refused.
pub const FORCE_DAMAGED: &str = "; use `--force-damaged` to accept it as it is";

/// Why a command ends early: the cause and the next step, in one or two sentences.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Stop {
    /// The exit status of the process.
    pub status: Status,
    /// The message for the user.
    pub message: String,
}

impl Stop {
    /// A stop with [`Status::Failed`].
    pub fn failed(message: impl Into<String>) -> Self {
        Self { status: Status::Failed, message: message.into() }
    }

    /// A stop with [`Status::Usage`].
    pub fn usage(message: impl Into<String>) -> Self {
        Self { status: Status::Usage, message: message.into() }
    }

    /// A stop with [`Status::Unreadable`].
    pub fn unreadable(message: impl Into<String>) -> Self {
        Self { status: Status::Unreadable, message: message.into() }
    }

    /// The error for an input file at `path` that cannot be read.
    pub fn cannot_read(path: &Path, error: &std::io::Error) -> Self {
        Self::unreadable(format!("cannot read {}: {error}", path.display()))
    }

    /// The stop for an error of a command that reads the images `from` and may write another file.
    pub fn of_image(error: &ImageError, from: &[&Path]) -> Self {
        let is_source = |file: &str| from.iter().any(|path| path.display().to_string() == file);
        let status = match error {
            ImageError::Request(_) | ImageError::Exists { .. } | ImageError::SameFile { .. } => Status::Usage,
            ImageError::File(error) => of_file(error),
            // A repair in place writes to an image of `from`. An error of that write is no unreadable input.
            ImageError::Io { file, call, .. } if is_source(file) && !matches!(*call, "write" | "fsync") => {
                Status::Unreadable
            }
            ImageError::Changed { file } if is_source(file) => Status::Unreadable,
            error if error.is_image_at_fault() => Status::Unreadable,
            ImageError::Store(error) => of_store(error),
            _ => Status::Failed,
        };
        let stop = Self { status, message: error.to_string() };
        match error {
            ImageError::Damaged { .. } => stop.with_more(FORCE_DAMAGED),
            _ => stop,
        }
    }

    /// The stop for an error of a monitor when settings of the command line were applied. A refusal is a
    /// usage error.
    pub fn of_settings(at: &str, error: ClientError) -> Self {
        let status = match &error {
            ClientError::Refused { .. } => Status::Usage,
            _ => Status::Failed,
        };
        Self { status, message: DriveError::Monitor { at: at.to_owned(), error }.to_string() }
    }

    /// Appends `more` to the message.
    pub fn with_more(mut self, more: &str) -> Self {
        self.message += more;
        self
    }

    /// A stop with `status`.
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
            DriveError::Request(_) => Status::Usage,
            DriveError::Unreadable(_) => Status::Unreadable,
            _ => Status::Failed,
        };
        Self { status, message: error.to_string() }
    }
}

/// The status for an output file that was refused before any write.
fn of_store(error: &StoreError) -> Status {
    match error {
        StoreError::Request(_) | StoreError::Conflict { .. } | StoreError::NotEncrypted { .. } => {
            Status::Usage
        }
        StoreError::Missing { .. }
        | StoreError::KeyNeeded { .. }
        | StoreError::WrongKey { .. }
        | StoreError::BadKey { .. }
        | StoreError::Hidden { .. }
        | StoreError::BaseMissing { .. } => Status::Unreadable,
        StoreError::FrameRead { source, .. } => of_store(source),
        error if error.is_image_at_fault() => Status::Unreadable,
        _ => Status::Failed,
    }
}

fn of_file(error: &TransportError) -> Status {
    match error {
        TransportError::FileExists { .. } | TransportError::NotAFile { .. } => Status::Usage,
        _ => Status::Failed,
    }
}

/// The result of a command.
pub type Done = Result<Status, Stop>;
