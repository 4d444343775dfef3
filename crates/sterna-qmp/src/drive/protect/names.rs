//! What is put into QEMU, by name.

/// What the objects and character devices are called.
pub(super) const PREFIX: &str = "sterna-gate";

/// How the object ends that takes packets to the gate.
pub(super) const HOLD: &str = "-hold";

/// The names in QEMU of what makes a gate.
pub(super) struct Names {
    pub(super) from_guest: String,
    pub(super) to_network: String,
    pub(super) hold: String,
    pub(super) give: String,
}

impl Names {
    pub(super) fn new(index: usize) -> Self {
        let name = |what: &str| format!("{PREFIX}{index}-{what}");
        Self { from_guest: name("out"), to_network: name("in"), hold: name("hold"), give: name("give") }
    }
}
