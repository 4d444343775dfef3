//! How the command ends: one clear sentence on standard error and a documented exit status.
//!
//! Only this module turns errors into statuses, by one rule for all commands:
//!
//! * **2**: refused before anything was tried. The command line is wrong or incomplete ([`Status::Usage`], with
//!   `usage:`), which includes names and values that the VM does not know, and a target that exists without
//!   `--force`; or an input file cannot be read or has the wrong content ([`Status::Unreadable`]).
//! * **1**: tried and failed, at a VM, a monitor, a peer, or writing.
//!
//! Commands that judge (`verify`, `diff`) return their verdict as 0 or 1, and 2 if they cannot judge.

use std::path::Path;
use std::process::ExitCode;

use sterna_image::ImageError;
use sterna_qmp::ClientError;
use sterna_qmp::drive::DriveError;
use sterna_transport::TransportError;

/// Exit statuses. They are part of the command's promise; scripts may rely on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// All went well.
    Done,
    /// It failed. If it was a migration, the guest runs on at the source.
    Failed,
    /// The command line cannot be understood, or asks for something impossible.
    Usage,
    /// A file that the command line names cannot be read, or has the wrong content.
    Unreadable,
    /// Committed without an acknowledgement, or stopped on both sides: the source stays stopped until it learns
    /// where the guest is, or an operator decides.
    Undecided,
    /// The guest that arrived differs from the guest that left: memory is damaged.
    Damaged,
    /// A second Ctrl-C: the migration goes on without this command.
    Detached,
    /// A protected guest's standby has it: it was ended here.
    Lost,
    /// A protection ended with the guest at the other side; what was held here is discarded.
    Discarded,
    /// Cancelled by Ctrl-C; the guest runs on at the source.
    Cancelled,
}

impl Status {
    /// The number that the process ends with.
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
            Self::Cancelled => 130,
        }
    }

    /// The prefix of the sentence.
    pub fn head(self) -> &'static str {
        match self {
            Self::Usage => "sterna: usage",
            Self::Done | Self::Cancelled | Self::Detached | Self::Discarded => "sterna",
            Self::Failed | Self::Unreadable | Self::Undecided | Self::Damaged | Self::Lost => "sterna: error",
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
  1    failed; if a migration was running, the guest runs on at the source. verify: damaged; diff: different
  2    the command line cannot be understood, a target exists and --force is not given, or a file that the command
       line names cannot be read or has the wrong content. verify, diff: cannot tell
  3    undecided: committed but not acknowledged; the source stays stopped. protect: left without its end
  4    the guest that arrived differs from the guest that left
  5    detached by a second Ctrl-C; the migration goes on
  6    the other side of a protection has the guest. protect, unprotect, run: it was ended here; standby: what was held is
       discarded
  130  cancelled by Ctrl-C; the guest runs on at the source";

/// The hint where damage is refused.
pub const FORCE_DAMAGED: &str = "; use `--force-damaged` to accept it as it is";

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

    /// Ends with [`Status::Unreadable`].
    pub fn unreadable(message: impl Into<String>) -> Self {
        Self { status: Status::Unreadable, message: message.into() }
    }

    /// Why the file at `path`, which is to be read, could not be.
    pub fn cannot_read(path: &Path, error: &std::io::Error) -> Self {
        Self::unreadable(format!("cannot read {}: {error}", path.display()))
    }

    /// What became of a command that reads the images `from` and may write something else.
    pub fn of_image(error: &ImageError, from: &[&Path]) -> Self {
        let is_source = |file: &str| from.iter().any(|path| path.display().to_string() == file);
        let status = match error {
            ImageError::Request(_) | ImageError::Exists { .. } | ImageError::SameFile { .. } => Status::Usage,
            ImageError::File(error) => of_file(error),
            // An image may be repaired in its place.
            ImageError::Io { file, call, .. } if is_source(file) && !matches!(*call, "write" | "fsync") => {
                Status::Unreadable
            }
            ImageError::Changed { file } if is_source(file) => Status::Unreadable,
            error if error.is_image_at_fault() => Status::Unreadable,
            _ => Status::Failed,
        };
        let stop = Self { status, message: error.to_string() };
        match error {
            ImageError::Damaged { .. } => stop.with_more(FORCE_DAMAGED),
            _ => stop,
        }
    }

    /// What a monitor's answer to settings from the command line means: a refusal is of the line.
    pub fn of_settings(at: &str, error: ClientError) -> Self {
        let status = match &error {
            ClientError::Refused { .. } => Status::Usage,
            _ => Status::Failed,
        };
        Self { status, message: DriveError::Monitor { at: at.to_owned(), error }.to_string() }
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
            DriveError::Request(_) => Status::Usage,
            DriveError::Unreadable(_) => Status::Unreadable,
            _ => Status::Failed,
        };
        Self { status, message: error.to_string() }
    }
}

/// What a file that is to be written says before anything is written into it.
fn of_file(error: &TransportError) -> Status {
    match error {
        TransportError::FileExists { .. } | TransportError::NotAFile { .. } => Status::Usage,
        _ => Status::Failed,
    }
}

/// What every command gives back.
pub type Done = Result<Status, Stop>;
