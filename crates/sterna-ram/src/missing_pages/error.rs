//! Why a guest cannot run before its pages are there.

use std::io;

use crate::RamError;

/// A guest cannot run before its pages are there. Every error here is local.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MissingPagesError {
    /// This host does not have it, or this process not the right.
    #[error(
        "this host cannot run a guest before its pages are there: {what} ({source}); it needs CAP_SYS_PTRACE, access to \
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
        "pages of RAM block {block:?} cannot come while the guest runs: its memory belongs to another userfaultfd, for \
         example to that of a dirty log"
    )]
    Taken {
        /// The block's name.
        block: String,
    },
    /// A block's memory is not of the kind whose pages can come later.
    #[error("pages of RAM block {block:?} cannot come while the guest runs: {rule}")]
    Refused {
        /// The block's name.
        block: String,
        /// Why.
        rule: &'static str,
    },
    /// The kernel refuses something for a block.
    #[error("pages of RAM block {block:?} cannot come while the guest runs: {call} failed: {source}")]
    Block {
        /// The block's name.
        block: String,
        /// The call that failed.
        call: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A block's memory could not be given back before the guest runs.
    #[error("pages that the guest must not see yet could not be taken away: {0}")]
    Discard(#[from] RamError),
    /// There is no memory in which the parts of a huge page wait for the others.
    #[error("parts of huge pages cannot be put together before they are placed: {0}")]
    Staging(#[source] RamError),
    /// A call of the kernel failed.
    #[error("pages cannot come while the guest runs: {call} failed: {source}")]
    System {
        /// The call that failed.
        call: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Pages that are not there, or not whole pages of the memory below.
    #[error("{count} pages from {first} on of RAM block number {block} cannot be placed: no such pages")]
    Outside {
        /// The block's index.
        block: usize,
        /// The first page.
        first: u64,
        /// How many.
        count: u64,
    },
}
