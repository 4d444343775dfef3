//! Guest memory that the source hands over as descriptors.

use std::sync::Arc;

use sterna_ram::RamError;

/// An offer of memory as descriptors that breaks a rule.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum BadMemory {
    /// The announcement came without a secret, twice, or after RAM.
    #[error("the source announced memory as descriptors, for which it was too early or too late")]
    UntimelyAnnouncement,
    /// RAM began, and the announced memory has not come.
    #[error("the source announced memory as descriptors, and RAM began without it")]
    NotOffered,
    /// An offer that was not announced, or came twice.
    #[error("memory was offered that the main channel has not announced, or a second time")]
    NotAnnounced,
    /// The table lists more descriptors than came.
    #[error("a descriptor is missing")]
    NoDescriptor,
    /// The number of descriptors differs from the table.
    #[error("{descriptors} descriptors came for {listed} that are listed")]
    Count {
        /// Descriptors that came.
        descriptors: usize,
        /// Descriptors that the table lists.
        listed: usize,
    },
    /// The table contains a block twice.
    #[error("RAM block {block:?} is listed twice")]
    Twice {
        /// Name of the block.
        block: String,
    },
    /// The table lacks a block of this machine.
    #[error("the memory of RAM block {block:?} did not come")]
    NoBlock {
        /// Name of the block.
        block: String,
    },
    /// Bytes of a file are memory of two blocks.
    #[error("the descriptors of RAM blocks {one:?} and {two:?} are the same memory")]
    Shared {
        /// Name of a block.
        one: String,
        /// Name of the other block.
        two: String,
    },
    /// A descriptor is not usable as the block's memory.
    #[error("{0}")]
    Descriptor(#[source] Arc<RamError>),
}
