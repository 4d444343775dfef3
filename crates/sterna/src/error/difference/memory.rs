//! Guest memory that moves as descriptors.

use std::sync::Arc;

use sterna_ram::RamError;

/// Why memory cannot move as descriptors between these two processes.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryDifference {
    /// The destination copies pages.
    #[error(
        "this destination copies what comes and takes no memory as descriptors: set mode to normal at the source"
    )]
    CopiesHere,
    /// The destination cannot take descriptors.
    #[error(
        "the destination cannot take memory as descriptors (it is a QEMU or an older Sterna): set mode to normal"
    )]
    CopiesThere,
    /// The destination has no memory of its own, and the source sends pages.
    #[error(
        "this side waits for memory as descriptors, and the source sends pages: set mode to cpr-transfer at the source \
         (`sterna migrate --same-host`), or wait here with memory of its own"
    )]
    ExpectedHere,
    /// A device of the destination keeps the destination's memory mapped.
    #[error(
        "{device} has this machine's memory mapped and cannot follow it into the source's: start this side without it, or so \
         that it waits for the source's devices (`sterna run --same-host`)"
    )]
    MappedByDevice {
        /// Name of the device.
        device: String,
    },
    /// The processes belong to different users.
    #[error(
        "process {pid} at the other end of {peer} is of user {theirs}, and this one of user {ours}: descriptors of a guest's \
         memory go between processes of the same user{}",
        if *is_roots { ", unless x-sterna-cpr-allow-root is set on both sides" } else { "" }
    )]
    OtherUser {
        /// Process at the other end.
        pid: i32,
        /// Address of the connection.
        peer: String,
        /// User of the other process.
        theirs: u32,
        /// User of this process.
        ours: u32,
        /// Whether one of the users is root.
        is_roots: bool,
    },
    /// The source hands over the descriptors of a device that this machine lacks.
    #[error("the source hands over {device} ({instance}), and this machine has none: use the same")]
    NoDevice {
        /// Name of the device.
        device: String,
        /// Its instance.
        instance: u32,
    },
    /// The source hands over a block that this machine lacks.
    #[error("this machine has no RAM block {block:?}")]
    NoBlock {
        /// Name of the block.
        block: String,
    },
    /// A block of another size.
    #[error(
        "RAM block {block:?} has {length} bytes in pages of {page} at the source, and {our_length} in pages of {our_page} here"
    )]
    BlockSize {
        /// Name of the block.
        block: String,
        /// Its length at the source in bytes.
        length: u64,
        /// Its page size at the source in bytes.
        page: u64,
        /// Its length here in bytes.
        our_length: u64,
        /// Its page size here in bytes.
        our_page: u64,
    },
    /// A block of this machine whose memory cannot be replaced.
    #[error("{0}")]
    NotReplaceable(#[source] Arc<RamError>),
    /// The destination's reason to refuse the memory.
    #[error("the destination does not take the guest's memory: {why}")]
    RefusedThere {
        /// The destination's sentence.
        why: String,
    },
}
