//! What a peer did wrong, and the broken rule.

mod answers;
mod connections;
mod devices;
mod memory;
mod order;
mod pages;
#[cfg(feature = "standby")]
mod protection;

pub use answers::{BadAnswer, BadRequest};
pub use connections::{BadComeback, BadConnection, BadLane, BadQuestion, ChannelRole, Unproven};
pub use devices::{BadChunk, BadGrant};
pub use memory::BadMemory;
pub use order::{BadPackage, Untimely, UntimelyCommand};
pub use pages::{BadPage, BadPayload, BadRound};
#[cfg(feature = "standby")]
pub use protection::BadProtection;

/// A peer's action that no single message shows to be wrong, and the rule that it broke.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Misbehaviour {
    /// A new connection does not belong to this migration.
    #[error("{peer}: {why}")]
    Connection {
        /// Address of the peer.
        peer: String,
        /// The broken rule.
        #[source]
        why: BadConnection,
    },
    /// A source that reconnects cannot be admitted.
    #[error("a source that claims to come back from {peer} {why}")]
    Comeback {
        /// Address of the source.
        peer: String,
        /// Why it is refused.
        #[source]
        why: BadComeback,
    },
    /// A source that asks about the guest gets no answer.
    #[error("a status question from {peer} {why}")]
    Question {
        /// Address of the source.
        peer: String,
        /// Why it gets no answer.
        #[source]
        why: BadQuestion,
    },
    /// A connection that offers memory as descriptors does not come from the migration's source.
    #[error("memory offered by {peer} {why}")]
    Offer {
        /// Address of the peer.
        peer: String,
        /// The missing proof.
        #[source]
        why: Unproven,
    },
    /// A page of guest RAM that must not arrive, or not in this way.
    #[error(transparent)]
    Page(#[from] BadPage),
    /// Packets of a multifd channel and the flushes of the main channel do not fit.
    #[error(transparent)]
    Round(#[from] BadRound),
    /// Compressed pages cannot be decompressed.
    #[error("a {codec} payload does not decompress: {why}")]
    Payload {
        /// Name of the compression method.
        codec: &'static str,
        /// What is wrong with the payload.
        #[source]
        why: BadPayload,
    },
    /// The source sent an element at a wrong time.
    #[error(transparent)]
    Untimely(#[from] Untimely),
    /// The package of postcopy does not have its form.
    #[error("the package {0} (specs/postcopy.md §2)")]
    Package(#[source] BadPackage),
    /// An answer or a request of the destination.
    #[error(transparent)]
    Answer(#[from] BadAnswer),
    /// A part of the state that a device streams.
    #[error("device {device:?}, instance {instance}: {why} (specs/extension.md §8)")]
    Chunk {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
        /// What is wrong with the chunk, or with its stream.
        #[source]
        why: BadChunk,
    },
    /// Room that the destination grants to a device's stream.
    #[error(transparent)]
    Grant(#[from] BadGrant),
    /// Guest memory that comes as descriptors.
    #[error(transparent)]
    Memory(#[from] BadMemory),
    /// A checkpoint, or another part of the protection by a standby.
    #[cfg(feature = "standby")]
    #[error(transparent)]
    Protection(#[from] BadProtection),
    /// The image file was changed while it was loaded.
    #[error("{file} was changed while it was loaded; load it again when no program writes it")]
    FileChanged {
        /// Address of the file.
        file: String,
    },
}

impl From<BadPackage> for Misbehaviour {
    fn from(why: BadPackage) -> Self {
        Self::Package(why)
    }
}
