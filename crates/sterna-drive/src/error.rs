//! The errors of all jobs in this crate.

use std::io;
use std::path::PathBuf;

use sterna_image::ImageError;
use sterna_libvirt::LibvirtError;
use sterna_qmp::ClientError;
use sterna_transport::TransportError;

/// A failed job, described in one or two sentences. Unless the variant says otherwise, the guest is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriveError {
    /// A monitor refused a command, or its connection broke.
    #[error("{}", monitor(at, error))]
    Monitor {
        /// The name or address of the monitor.
        at: String,
        /// The refusal, or the reason why the connection broke.
        #[source]
        error: ClientError,
    },
    /// libvirt refused a call, or cannot be reached.
    #[error("{at}: {error}")]
    Libvirt {
        /// The address of the domain.
        at: String,
        /// The refusal, or the reason why libvirt cannot be reached.
        #[source]
        error: LibvirtError,
    },
    /// The request cannot work with these machines or this file. Nothing was changed.
    #[error("{0}")]
    Unfit(String),
    /// The request contradicts itself or is incomplete, independent of the machine. Nothing was changed.
    #[error("{0}")]
    Request(String),
    /// An input file cannot be read, or has the wrong content. Nothing was changed.
    #[error("{0}")]
    Unreadable(String),
    /// The operating system refused a file operation.
    #[error("cannot {doing} {}: {error}", path.display())]
    File {
        /// The operation as a verb, such as `write`.
        doing: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The reason from the operating system.
        #[source]
        error: io::Error,
    },
    /// The migration was started and failed.
    #[error("{0}")]
    Failed(String),
    /// The VM's process ended during the migration, and its guest is lost.
    #[error("{0}")]
    Lost(String),
    /// It is unknown which side has the guest, or the guest is stopped on both sides. An operator must decide.
    #[error("{0}")]
    Undecided(String),
    /// The operator cancelled the job.
    #[error("{0}")]
    Cancelled(String),
    /// The operator stopped watching. The migration continues, or is being cancelled.
    #[error("{0}")]
    Detached(String),
}

impl DriveError {
    pub(super) fn file(doing: &'static str, path: impl Into<PathBuf>, error: impl Into<io::Error>) -> Self {
        Self::File { doing, path: path.into(), error: error.into() }
    }

    /// Whether the connection to the monitor is closed, for example because its process has ended.
    pub fn is_disconnect(&self) -> bool {
        matches!(self, Self::Monitor { error: ClientError::Closed { .. } | ClientError::Io { .. }, .. })
    }

    /// Whether a monitor refused a command with an error text that contains `words`.
    pub fn is_refusal_with(&self, words: &str) -> bool {
        matches!(self, Self::Monitor { error: ClientError::Refused { desc, .. }, .. } if desc.contains(words))
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
