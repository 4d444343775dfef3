//! The names of the objects that a protection adds to QEMU.

/// Prefix of the names of objects and character devices.
pub(super) const PREFIX: &str = "sterna-gate";

/// Prefix of the names of block nodes that write to the standby.
pub(super) const DISK_PREFIX: &str = "sterna-disk";

/// Suffix of the filter that redirects packets to the gate.
pub(super) const HOLD: &str = "-hold";

/// Suffix of the filter in which packets wait while the gate is removed.
pub(super) const WAIT: &str = "-wait";

/// The names in QEMU of one gate's parts.
pub(super) struct Names {
    pub(super) from_guest: String,
    pub(super) to_network: String,
    pub(super) hold: String,
    pub(super) give: String,
    pub(super) wait: String,
}

impl Names {
    pub(super) fn new(index: usize) -> Self {
        let name = |what: &str| format!("{PREFIX}{index}{what}");
        Self {
            from_guest: name("-out"),
            to_network: name("-in"),
            hold: name(HOLD),
            give: name("-give"),
            wait: name(WAIT),
        }
    }
}
