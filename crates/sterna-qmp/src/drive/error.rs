//! Why a driver could not do its job.

use std::io;
use std::path::PathBuf;

use sterna_image::ImageError;
use sterna_transport::TransportError;

use crate::client::ClientError;

/// What went wrong, in one sentence or two. Unless the variant says otherwise the guest is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriveError {
    /// A monitor refused, or its connection broke.
    #[error("{}", monitor(at, error))]
    Monitor {
        /// Whose monitor.
        at: String,
        /// What it said, or how it broke.
        #[source]
        error: ClientError,
    },
    /// What was asked for cannot work with these machines or this file. Nothing was changed.
    #[error("{0}")]
    Unfit(String),
    /// What was asked for contradicts itself or is not enough, whatever the machine. Nothing was changed.
    #[error("{0}")]
    Request(String),
    /// A file that was named for reading cannot be read, or is not what it should be. Nothing was changed.
    #[error("{0}")]
    Unreadable(String),
    /// The local system refused a file operation.
    #[error("cannot {doing} {}: {error}", path.display())]
    File {
        /// Such as `write`.
        doing: &'static str,
        /// Which file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        error: io::Error,
    },
    /// The migration was tried and failed.
    #[error("{0}")]
    Failed(String),
    /// The VM's process went away in the middle; its guest went with it.
    #[error("{0}")]
    Lost(String),
    /// Who has the guest is not known here, or it is stopped on both sides: an operator has the word.
    #[error("{0}")]
    Undecided(String),
    /// The operator cancelled.
    #[error("{0}")]
    Cancelled(String),
    /// The operator stopped watching; the migration goes on, or is being cancelled.
    #[error("{0}")]
    Detached(String),
}

impl DriveError {
    pub(super) fn file(doing: &'static str, path: impl Into<PathBuf>, error: impl Into<io::Error>) -> Self {
        Self::File { doing, path: path.into(), error: error.into() }
    }

    /// Whether the monitor's connection is gone, as when its process has died.
    pub fn is_disconnect(&self) -> bool {
        matches!(self, Self::Monitor { error: ClientError::Closed { .. } | ClientError::Io { .. }, .. })
    }
}

fn monitor(at: &str, error: &ClientError) -> String {
    match error {
        ClientError::Refused { command, desc, .. } => format!("{at} refused `{command}`: {desc}"),
        other => format!("{at}: {}", other.to_string().trim_end_matches('.')),
    }
}

impl From<ImageError> for DriveError {
    fn from(error: ImageError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<TransportError> for DriveError {
    fn from(error: TransportError) -> Self {
        match error {
            TransportError::FileExists { .. } | TransportError::NotAFile { .. } => {
                Self::Request(error.to_string())
            }
            error => Self::Failed(error.to_string()),
        }
    }
}
