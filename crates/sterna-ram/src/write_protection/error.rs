//! Errors of [`WriteProtection`](super::WriteProtection), which blocks the first write to a page.

use std::io;

/// The reason why writes to guest RAM cannot be blocked. Every error is local.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteProtectionError {
    /// This host lacks the feature, or this process lacks the right to use it.
    #[error(
        "this host cannot hold writes to guest memory: {what} ({source}); this process needs Linux 6.4, and \
         CAP_SYS_PTRACE, access to /dev/userfaultfd, or vm.unprivileged_userfaultfd=1"
    )]
    Unsupported {
        /// The missing feature or right.
        what: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// A block's memory is registered with another userfaultfd.
    #[error(
        "writes to RAM block {block:?} cannot be held: its memory is registered with another userfaultfd, for example \
         of a dirty log"
    )]
    Taken {
        /// Name of the affected RAM block.
        block: String,
    },
    /// A block's memory does not support write protection.
    #[error("writes to RAM block {block:?} cannot be held: {rule}")]
    Refused {
        /// Name of the affected RAM block.
        block: String,
        /// The rule that the request violates.
        rule: &'static str,
    },
    /// The guest has no memory to protect.
    #[error("writes cannot be held: the guest has no memory")]
    NoMemory,
    /// A system call failed for one block.
    #[error("writes to RAM block {block:?} cannot be held: {call} failed: {source}")]
    Block {
        /// Name of the affected RAM block.
        block: String,
        /// Name of the system call that failed.
        call: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// A system call failed that concerns no single block.
    #[error("writes to guest memory cannot be held: {call} failed: {source}")]
    System {
        /// Name of the system call that failed.
        call: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// The pages are outside of the block, or the block is not protected.
    #[error("RAM block {block} does not have the {count} pages from page {first} to write-protect")]
    Outside {
        /// Index of the block in the guest's RAM.
        block: usize,
        /// Index of the first page in the block.
        first: u64,
        /// Number of pages of 4 KiB, from `first` on.
        count: u64,
    },
    /// The protection was [lifted](super::WriteProtection::lift), so no page can be protected.
    #[error("the write protection of guest memory was lifted")]
    Lifted,
}
