//! Faults that tests plant.

/// What a destination with a planted fault does to memory that its source has handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SharingFault {
    /// It makes the memory writable before the commit.
    WritesEarly,
    /// It does the same, and treats the memory as its own: clears pages that did not come, and gives all of it back after a failure.
    Empties,
}
