//! Errors of [`MissingPages`](super::MissingPages), by which a guest runs before its pages have arrived.

use std::io;

use crate::RamError;

/// The reason why a guest cannot run before its pages have arrived. Every error is local.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MissingPagesError {
    /// This host lacks the feature, or this process lacks the right to use it.
    #[error(
        "this host cannot run a guest before all of its pages have arrived: {what} ({source}); this process needs \
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
        "pages of RAM block {block:?} cannot arrive while the guest runs: its memory is registered with another \
         userfaultfd, for example of a dirty log"
    )]
    Taken {
        /// Name of the affected RAM block.
        block: String,
    },
    /// A block's memory does not support missing pages.
    #[error("pages of RAM block {block:?} cannot arrive while the guest runs: {rule}")]
    Refused {
        /// Name of the affected RAM block.
        block: String,
        /// The rule that the request violates.
        rule: &'static str,
    },
    /// A system call failed for one block.
    #[error("pages of RAM block {block:?} cannot arrive while the guest runs: {call} failed: {source}")]
    Block {
        /// Name of the affected RAM block.
        block: String,
        /// Name of the system call that failed.
        call: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// A block's memory could not be discarded before the guest runs.
    #[error("pages that the guest must not see yet could not be removed: {0}")]
    Discard(#[from] RamError),
    /// There is no memory to assemble a huge page from its parts.
    #[error("the parts of huge pages cannot be collected before they are placed: {0}")]
    Staging(#[source] RamError),
    /// A system call failed that concerns no single block.
    #[error("pages cannot arrive while the guest runs: {call} failed: {source}")]
    System {
        /// Name of the system call that failed.
        call: &'static str,
        /// The error that the kernel returned.
        source: io::Error,
    },
    /// The pages are outside of the block, or not whole pages of the backing.
    #[error("RAM block number {block} does not have the {count} pages from page {first} to place")]
    Outside {
        /// Index of the block in the guest's RAM.
        block: usize,
        /// Index of the first page in the block.
        first: u64,
        /// Number of pages of 4 KiB, from `first` on.
        count: u64,
    },
}
