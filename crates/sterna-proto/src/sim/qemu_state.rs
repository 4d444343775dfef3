//! What a QEMU knows of its migration.

/// A QEMU source.
#[derive(Debug, Default)]
pub(super) struct QemuSource {
    pub(super) stage: Stage,
    pub(super) stopped: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Active,
    Completed,
    Failed,
}

/// A QEMU destination.
#[derive(Debug, Default)]
pub(super) struct QemuDestination {
    pub(super) eof: bool,
}
