//! Why writes cannot be held.

use std::io;

/// Writes to guest RAM cannot be held. Every error here is local.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteProtectionError {
    /// This host does not have it, or this process not the right.
    #[error(
        "this host cannot hold writes to guest memory: {what} ({source}); it needs Linux 6.4, and CAP_SYS_PTRACE, access to \
         /dev/userfaultfd, or vm.unprivileged_userfaultfd=1"
    )]
    Unsupported {
        /// What is missing.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A block's memory is registered with another userfaultfd.
    #[error(
        "writes to RAM block {block:?} cannot be held: its memory belongs to another userfaultfd, for example to that of the \
         dirty log"
    )]
    Taken {
        /// The block's name.
        block: String,
    },
    /// A block's memory is not of the kind that can be protected.
    #[error("writes to RAM block {block:?} cannot be held: {rule}")]
    Refused {
        /// The block's name.
        block: String,
        /// Why.
        rule: &'static str,
    },
    /// The guest has no memory.
    #[error("writes cannot be held: the guest has no memory")]
    NoMemory,
    /// The kernel refuses something for a block.
    #[error("writes to RAM block {block:?} cannot be held: {call} failed: {source}")]
    Block {
        /// The block's name.
        block: String,
        /// The call that failed.
        call: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A call of the kernel failed.
    #[error("writes to guest memory cannot be held: {call} failed: {source}")]
    System {
        /// The call that failed.
        call: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Pages that are not there, or not protected by this.
    #[error("{count} pages from {first} on of RAM block {block} cannot be write-protected: no such pages")]
    Outside {
        /// The block's index.
        block: usize,
        /// The first page.
        first: u64,
        /// How many.
        count: u64,
    },
    /// The protection was lifted.
    #[error("the write protection of guest memory was lifted")]
    Lifted,
}
