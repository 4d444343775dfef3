//! State of a simulated QEMU, which has no machine of this crate.

/// State of a QEMU source.
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

/// State of a QEMU destination.
#[derive(Debug, Default)]
pub(super) struct QemuDestination {
    pub(super) eof: bool,
}
