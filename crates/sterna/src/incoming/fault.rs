//! Faults that tests plant in the destination.

/// How a destination with a planted fault treats memory that its source has handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SharingFault {
    /// The destination makes the memory writable before the commit.
    WritesEarly,
    /// As [`SharingFault::WritesEarly`]. The destination also clears pages that did not arrive, and gives all
    /// memory back to the host after a failure.
    Empties,
}
