//! The state of guest memory that arrives as file descriptors (same-host migration).

/// How far the transfer of the descriptors has progressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum ComingMemory {
    /// Memory arrives as pages, or no channel has connected yet.
    #[default]
    NotExpected,
    /// The source has announced descriptors.
    Expected,
    /// The memory is mapped.
    Taken,
    /// The migration has failed: no descriptors are accepted any more.
    Over,
}
