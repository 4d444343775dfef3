//! The errors of Sterna's images and stores. They name the image, the frame or page, and the next step.

use std::io;

/// The reason why an image or a store could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No file or object has this name.
    #[error("{name}: no such file or object")]
    Missing {
        /// Path or address.
        name: String,
    },
    /// The blob ends too early: it is truncated, or still being written.
    #[error("{name} ends at byte {length_bytes}, inside a part that is needed: it is truncated; take another copy")]
    Torn {
        /// Path or address.
        name: String,
        /// Length of the blob in bytes.
        length_bytes: u64,
    },
    /// The blob changed after it was opened.
    #[error("{name} changed while it was read; wait for its writer to finish and open it again")]
    Changed {
        /// Path or address.
        name: String,
    },
    /// A conditional write found another object under the key.
    #[error("{name} was written by another process at the same time, so that this write was refused; try again")]
    Conflict {
        /// Path or address.
        name: String,
    },
    /// An object is longer than what its reader accepts.
    #[error("{name} has more than {limit_bytes} bytes, the limit for it; it is not what Sterna writes there")]
    TooLarge {
        /// Path or address.
        name: String,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// The system refused a call on a file.
    #[error("{name}: {call} failed: {source}")]
    Io {
        /// Path of the file.
        name: String,
        /// The system call or operation that failed.
        call: &'static str,
        /// The system's error for that call.
        source: io::Error,
    },
    /// The server of an object storage failed or refused the request, after all retries.
    #[error("{name}: {reason}")]
    Remote {
        /// Address of the object.
        name: String,
        /// The server's answer, and the next step.
        reason: String,
        /// The HTTP status; none without an answer.
        status: Option<u16>,
    },
}

impl StoreError {
    /// Makes [`StoreError::Io`], or [`StoreError::Missing`] for a file that is not there.
    pub fn io(name: &str, call: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { name: name.to_owned() },
            _ => Self::Io { name: name.to_owned(), call, source },
        }
    }
}
