//! Kinds of mappings.

/// The kind of a mapping. It decides how memory is given back and how absent pages are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Private, without a file.
    Anonymous,
    /// Shared, without a file.
    SharedAnonymous,
    /// Shared, of a file on tmpfs (a memfd is one).
    Tmpfs,
    /// Shared, of a file on hugetlbfs.
    Hugetlbfs,
    /// Shared, of a file on another file system.
    File,
    /// Private, of a file on tmpfs.
    PrivateTmpfs,
    /// Private, of a file on another file system.
    PrivateFile,
}

impl Kind {
    /// Whether other mappings of the same memory see writes.
    pub(crate) fn is_shared(self) -> bool {
        !matches!(self, Kind::Anonymous | Kind::PrivateTmpfs | Kind::PrivateFile)
    }

    /// Whether a page that was given back reads as zero. A private page of a file reads as the file instead.
    pub(crate) fn is_zero_when_discarded(self) -> bool {
        !matches!(self, Kind::PrivateTmpfs | Kind::PrivateFile)
    }
}
