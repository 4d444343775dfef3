//! The clauses of the page order, as names for their planted violations.

/// A clause that tests may order the engine to violate, to prove that the guests' checker notices.
///
/// Only a build with the feature `planted-faults` can hand one to the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Clause {
    /// Clause 1: harvested bits are mixed into the running pass, so a page may travel on two lanes at once.
    OncePerPass,
    /// Clause 2: tracking is re-armed after the pages were read.
    RearmBeforeRead,
    /// Clause 3: the whole slice is re-armed, harvested or not.
    RearmOnlyHarvested,
    /// Clause 4: a lane does not wait until the slice is re-armed.
    WholeSliceFirst,
    /// Clause 5: a lane writes SYNC before its last pages.
    SyncAfterLastPage,
    /// Clause 6: a report is dropped though its page was sent before the harvest.
    DropOnlyUnsent,
}

impl Clause {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::OncePerPass,
        Self::RearmBeforeRead,
        Self::RearmOnlyHarvested,
        Self::WholeSliceFirst,
        Self::SyncAfterLastPage,
        Self::DropOnlyUnsent,
    ];
}
