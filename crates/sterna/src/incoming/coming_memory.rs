//! Where the memory is that comes as descriptors.

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum ComingMemory {
    /// Pages come, or nothing has come yet.
    #[default]
    NotExpected,
    /// The source has announced it.
    Expected,
    /// It is mapped.
    Taken,
}
