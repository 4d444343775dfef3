//! The errors of Sterna's images and stores. They name the image, the frame or page, and the next step.

use std::io;

use crate::digest::Digest;

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
    #[error(
        "{name} ends at byte {length_bytes}, inside a part that is needed: it is truncated; take another copy"
    )]
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
    #[error(
        "{name} exists, or was written by another process at the same time: it is unchanged; choose another name, or try again"
    )]
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
    /// The file does not begin like an image of Sterna's own format.
    #[error("{name} is not an image in Sterna's format: it does not begin with STERNAIM; check the path")]
    NotAnImage {
        /// Path or address.
        name: String,
    },
    /// The image breaks a rule of the format.
    #[error("{name}, {part}: {rule} (specs/image.md {paragraph}); the image is damaged: take another copy")]
    Broken {
        /// Path or address of the image.
        name: String,
        /// The part of the image: header, index, footer.
        part: &'static str,
        /// The broken rule, as a clause.
        rule: String,
        /// The rule's paragraph in `specs/image.md`.
        paragraph: &'static str,
    },
    /// The image uses a property that a later version of the format has.
    #[error("{name} needs a later Sterna: {what} (specs/image.md §2)")]
    Unsupported {
        /// Path or address of the image.
        name: String,
        /// The version, feature or section that is not known.
        what: String,
    },
    /// A frame does not have the content that the index names.
    #[error(
        "{name}, frame {frame} ({pages}): {reason}; the frame is damaged: take another copy of the image"
    )]
    Frame {
        /// Path or address of the image.
        name: String,
        /// Number of the frame in the image's index.
        frame: u32,
        /// The first pages that the frame holds, as block and numbers.
        pages: String,
        /// What differs.
        reason: String,
    },
    /// A frame could not be read, because its file or object changed, or its storage failed.
    #[error("{name}, frame {frame} ({pages}): {source}")]
    FrameRead {
        /// Path or address of the image.
        name: String,
        /// Number of the frame in the image's index.
        frame: u32,
        /// The first pages that the frame holds, as block and numbers.
        pages: String,
        /// Why the bytes could not be read.
        source: Box<StoreError>,
    },
    /// The image is encrypted, and no key was given.
    #[error("{name} is encrypted; give the file of its key with --key")]
    KeyNeeded {
        /// Path or address of the image.
        name: String,
    },
    /// The image is encrypted with another key.
    #[error(
        "{name} is encrypted with another key than the one that was given; give the key that it was saved with"
    )]
    WrongKey {
        /// Path or address of the image.
        name: String,
    },
    /// A key was given for an image that is not encrypted.
    ///
    /// It is refused because the user expects an image that only holders of the key can have written.
    #[error(
        "{name} is not encrypted, but a key was given; leave --key out if any user may have written the image"
    )]
    NotEncrypted {
        /// Path or address of the image.
        name: String,
    },
    /// The file of a key has no key.
    #[error(
        "{name} is not a key: it must have 32 bytes, or 64 hexadecimal digits; `head -c 32 /dev/urandom` makes one"
    )]
    BadKey {
        /// Path of the file.
        name: String,
    },
    /// A garbage collection took a save for dead, because the save had not written its lease for a day.
    #[error(
        "{name}: the save took so long that a garbage collection may have removed its frames; repeat the save"
    )]
    LeaseLost {
        /// Address of the store.
        name: String,
    },
    /// The store has no image with this name that its user can see, but names that another key hides.
    #[error(
        "{name} is not among the images that {}; {hidden} more need another key: check the name, or give the file of the image's key with --key", seen(.has_key)
    )]
    Hidden {
        /// Address of the image.
        name: String,
        /// Whether a key was given.
        has_key: bool,
        /// Number of names that cannot be read.
        hidden: usize,
    },
    /// The base of a layer was not found.
    #[error("{name} is a layer over {digest}{}, which was not found; give its path with --base, or run `sterna rebase`", named(.hint))]
    BaseMissing {
        /// Path or address of the layer.
        name: String,
        /// Digest of the base.
        digest: Digest,
        /// The name under which the layer's writer knew the base; empty if it had none.
        hint: String,
    },
    /// The file that should be the base of a layer is another image.
    #[error(
        "{name} is a layer over {digest}, but {base} is {found}: it was replaced; find the base, or run `sterna rebase`"
    )]
    BaseWrong {
        /// Path or address of the layer.
        name: String,
        /// Digest of the base that the layer names.
        digest: Digest,
        /// Path or address of the other image.
        base: String,
        /// Digest of the other image.
        found: Digest,
    },
    /// A chain of layers contains an image twice.
    #[error(
        "{name}: its chain of layers contains {digest} twice; no reader can resolve it: take another copy"
    )]
    BaseLoop {
        /// Path or address of the uppermost layer.
        name: String,
        /// The digest that occurs twice.
        digest: Digest,
    },
    /// A chain of layers is too long.
    #[error(
        "{name}: its chain has more than {limit} layers, the last one over {digest}; run `sterna flatten`"
    )]
    ChainTooLong {
        /// Path or address of the uppermost layer.
        name: String,
        /// The largest number of layers.
        limit: usize,
        /// Digest of the first base after the limit.
        digest: Digest,
    },
    /// A layer and its base describe different machines.
    #[error(
        "{name} is a layer over {digest}, whose RAM differs: {what}; a layer needs the base that it was made for"
    )]
    BaseUnlike {
        /// Path or address of the layer.
        name: String,
        /// Digest of the base.
        digest: Digest,
        /// The first difference.
        what: String,
    },
    /// The request is not possible. The text contains the reason and the next step.
    #[error("{0}")]
    Request(String),
}

fn seen(has_key: &bool) -> &'static str {
    if *has_key { "the key opens" } else { "are not encrypted" }
}

fn named(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!(" ({hint:?} when it was made)") }
}

impl StoreError {
    /// Makes [`StoreError::Io`], or [`StoreError::Missing`] for a file that is not there.
    pub fn io(name: &str, call: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::Missing { name: name.to_owned() },
            _ => Self::Io { name: name.to_owned(), call, source },
        }
    }

    /// Whether the image itself is damaged. False if this host, the request, or a server is the cause.
    pub fn is_image_at_fault(&self) -> bool {
        matches!(
            self,
            Self::Torn { .. }
                | Self::NotAnImage { .. }
                | Self::Broken { .. }
                | Self::Unsupported { .. }
                | Self::Frame { .. }
                | Self::BaseWrong { .. }
                | Self::BaseLoop { .. }
                | Self::ChainTooLong { .. }
                | Self::BaseUnlike { .. }
        )
    }
}
