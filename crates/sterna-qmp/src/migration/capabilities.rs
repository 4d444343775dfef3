//! Migration capabilities under QEMU's names (specs/stream.md §4). Some are supported, some have no effect here, and
//! some combinations are refused.
//!
//! [`CAPABILITIES`] declares each one once. All other information about a capability is derived from its row.

use serde_json::{Value, json};
use sterna::Capabilities;

use super::parameters::Change;
use crate::error::QmpError;
use crate::server::Arguments;

/// The support of a capability in this engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// The engine implements it.
    Works,
    /// It is stored and shown, but has no effect. It affects only features that Sterna does not have.
    Harmless,
    /// It is refused, because a program that requests it relies on it.
    Missing,
}

use Support::{Harmless, Missing, Works};

/// A capability, as a row of the table.
#[derive(Debug, Clone, Copy)]
pub struct CapabilitySpec {
    /// Name of the capability in QEMU.
    pub name: &'static str,
    /// The support in this engine.
    pub support: Support,
    /// The states in which it may change.
    pub change: Change,
    /// The effect, in one sentence.
    pub about: &'static str,
    /// The first version of Sterna that has it.
    pub since: &'static str,
    /// The engine's field. `None` if only the monitor stores it.
    field: Option<fn(&mut Capabilities) -> &mut bool>,
}

/// All capabilities of QEMU 11 and of Sterna.
#[rustfmt::skip]
pub const CAPABILITIES: &[CapabilitySpec] = &[
    engine("xbzrle", |to| &mut to.xbzrle,
        "Checkpoints contain differences to the standby's pages, where they are shorter; only with `x-colo`."),
    engine("rdma-pin-all", |to| &mut to.rdma_pin_all,
        "Both sides of a migration over `rdma:` register all guest memory before the first page. The source's setting counts."),
    engine("auto-converge", |to| &mut to.auto_converge,
        "Throttles all vCPUs while the guest writes faster than pages can be sent."),
    monitor(EVENTS, Works, Change::Live,
        "Sends the events about migrations."),
    engine("postcopy-ram", |to| &mut to.postcopy_ram,
        "Allows the guest to start at the destination before all of its pages have arrived. On both sides."),
    monitor("x-colo", Works, Change::Frozen,
        "`migrate` protects the guest by a standby with checkpoints, and `migrate-incoming` makes this VM a standby."),
    monitor("release-ram", Harmless, Change::Harmless,
        "In QEMU the source frees memory that it has sent. No effect here."),
    engine("return-path", |to| &mut to.return_path,
        "The destination answers the source. On by default, unlike in QEMU: without it a source never learns whether its guest arrived."),
    engine("pause-before-switchover", |to| &mut to.pause_before_switchover,
        "Waits for `migrate-continue` after the guest was stopped for the switchover."),
    engine("multifd", |to| &mut to.multifd,
        "Sends pages over `multifd-channels` channels. Both sides must agree."),
    monitor("dirty-bitmaps", Missing, Change::Frozen,
        "Dirty bitmaps of block devices."),
    engine("postcopy-blocktime", |to| &mut to.postcopy_blocktime,
        "The destination measures how long vCPUs wait for pages; only with `postcopy-ram`."),
    monitor("late-block-activate", Harmless, Change::Harmless,
        "In QEMU the destination activates its disks only when the guest starts. No effect here."),
    monitor("x-ignore-shared", Missing, Change::Frozen,
        "Leaves shared memory out."),
    monitor("validate-uuid", Missing, Change::Frozen,
        "Sends the VM's UUID, which the destination compares with its own."),
    monitor("background-snapshot", Missing, Change::Frozen,
        "Writes the state of one moment while the guest continues to run."),
    monitor("zero-copy-send", Missing, Change::Frozen,
        "Sends pages without copying them into the kernel."),
    engine("postcopy-preempt", |to| &mut to.postcopy_preempt,
        "Requested pages have a separate channel. On both sides; only with `postcopy-ram`."),
    engine("switchover-ack", |to| &mut to.switchover_ack,
        "The guest is stopped only after the destination's devices have reported that they are ready."),
    engine("dirty-limit", |to| &mut to.dirty_limit,
        "Limits the dirty rate of each vCPU (`vcpu-dirty-limit`) when the guest writes faster than pages can be sent. Needs a dirty ring."),
    engine("mapped-ram", |to| &mut to.mapped_ram,
        "Gives every page a fixed place in a file; without it a file contains a stream."),
    monitor(HOLD, Works, Change::Frozen,
        "Leaves the guest of a QEMU source stopped at this destination until `cont`."),
];

const EVENTS: &str = "events";
const HOLD: &str = "x-sterna-hold";

const fn engine(
    name: &'static str,
    field: fn(&mut Capabilities) -> &mut bool,
    about: &'static str,
) -> CapabilitySpec {
    let (support, change) = (Works, Change::Frozen);
    CapabilitySpec { name, support, change, about, since: "0.1", field: Some(field) }
}

const fn monitor(
    name: &'static str,
    support: Support,
    change: Change,
    about: &'static str,
) -> CapabilitySpec {
    CapabilitySpec { name, support, change, about, since: "0.1", field: None }
}

/// The names of all capabilities.
pub(super) const NAMES: &[&str] = &names();

const fn names() -> [&'static str; CAPABILITIES.len()] {
    let mut names = [""; CAPABILITIES.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = CAPABILITIES[at].name;
        at += 1;
    }
    names
}

impl CapabilitySpec {
    /// The capabilities that must be on for this one.
    pub fn needs(&self) -> impl Iterator<Item = &'static str> + use<> {
        let name = self.name;
        NEEDS.iter().filter(move |(one, _)| *one == name).map(|(_, needed)| *needed)
    }

    /// The capabilities that exclude this one.
    pub fn excludes(&self) -> impl Iterator<Item = &'static str> + use<> {
        let name = self.name;
        EXCLUDE.iter().filter_map(move |(one, other)| match name {
            _ if *one == name => Some(*other),
            _ if *other == name => Some(*one),
            _ => None,
        })
    }
}

/// (capability, the capability that it needs).
const NEEDS: &[(&str, &str)] = &[
    ("x-colo", "return-path"),
    ("switchover-ack", "return-path"),
    ("postcopy-preempt", "postcopy-ram"),
    ("zero-copy-send", "multifd"),
];

/// QEMU sends deltas only on the main channel. A Sterna's checkpoints also contain them on lanes (specs/extension.md
/// §10).
const DELTAS_OVER_LANES: (&str, &str) = ("multifd", "xbzrle");

/// Pairs of capabilities that exclude each other.
const EXCLUDE: &[(&str, &str)] = &[
    ("postcopy-ram", "x-ignore-shared"),
    DELTAS_OVER_LANES,
    ("mapped-ram", "xbzrle"),
    ("mapped-ram", "postcopy-ram"),
    ("zero-copy-send", "xbzrle"),
    ("dirty-limit", "auto-converge"),
    ("background-snapshot", "postcopy-ram"),
    ("background-snapshot", "dirty-bitmaps"),
    ("background-snapshot", "return-path"),
    ("background-snapshot", "multifd"),
    ("background-snapshot", "pause-before-switchover"),
    ("background-snapshot", "auto-converge"),
    ("background-snapshot", "release-ram"),
    ("background-snapshot", "xbzrle"),
    ("background-snapshot", "x-colo"),
    ("mapped-ram", "x-colo"),
    ("pause-before-switchover", "x-colo"),
    ("postcopy-ram", "x-colo"),
    ("background-snapshot", "validate-uuid"),
    ("background-snapshot", "zero-copy-send"),
];

/// The operator's capabilities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapabilitySet([bool; CAPABILITIES.len()]);

impl Default for CapabilitySet {
    /// All are off as in QEMU, except `return-path`. Without it the source does not learn whether the migration
    /// succeeded.
    fn default() -> Self {
        let mut engine = Capabilities::default();
        Self(std::array::from_fn(|at| CAPABILITIES[at].field.is_some_and(|field| *field(&mut engine))))
    }
}

impl CapabilitySet {
    /// The set after `changes`: pairs of a name and its new state, from `migrate-set-capabilities`.
    ///
    /// # Errors
    /// An unknown name, a capability that Sterna does not support, or a combination that QEMU refuses.
    pub fn with(&self, changes: &[(String, bool)]) -> Result<Self, QmpError> {
        let mut next = self.clone();
        for (name, state) in changes {
            let at = NAMES.iter().position(|known| known == name).ok_or_else(|| {
                QmpError::generic(format!("Parameter 'capability' does not accept value '{name}'"))
            })?;
            next.0[at] = *state;
        }
        next.check()?;
        Ok(next)
    }

    /// Whether `name` is on. False for an unknown name.
    pub fn get(&self, name: &str) -> bool {
        NAMES.iter().zip(self.0).any(|(known, on)| *known == name && on)
    }

    /// Whether the sets differ only in capabilities that may change while a migration runs.
    pub fn same_for_engine(&self, other: &Self) -> bool {
        let differs = |((spec, one), another): ((&CapabilitySpec, bool), bool)| {
            one != another && spec.change == Change::Frozen
        };
        !CAPABILITIES.iter().zip(self.0).zip(other.0).any(differs)
    }

    /// The answer to `query-migrate-capabilities`.
    pub fn to_json(&self) -> Value {
        NAMES.iter().zip(self.0).map(|(name, on)| json!({"capability": name, "state": on})).collect()
    }

    /// Converts the set into the engine's types. With `autostart` the guest of a QEMU source starts by itself.
    pub fn to_engine(&self, autostart: bool) -> Capabilities {
        let unmanaged = autostart && !self.get(HOLD);
        let mut engine = Capabilities { unmanaged, ..Capabilities::default() };
        for (spec, on) in CAPABILITIES.iter().zip(self.0) {
            if let Some(field) = spec.field {
                *field(&mut engine) = on;
            }
        }
        // As in QEMU, it may be on without `postcopy-ram`. It then measures nothing.
        engine.postcopy_blocktime &= engine.postcopy_ram;
        engine
    }

    fn check(&self) -> Result<(), QmpError> {
        for (one, needed) in NEEDS {
            if self.get(one) && !self.get(needed) {
                return Err(QmpError::generic(format!(
                    "Capability '{one}' requires capability '{needed}'; switch both on"
                )));
            }
        }
        for (one, other) in EXCLUDE {
            let goes_with_standby = (*one, *other) == DELTAS_OVER_LANES && self.get("x-colo");
            if self.get(one) && self.get(other) && !goes_with_standby {
                return Err(QmpError::generic(format!(
                    "Capability '{one}' is not compatible with '{other}'"
                )));
            }
        }
        for (CapabilitySpec { name, support, .. }, on) in CAPABILITIES.iter().zip(self.0) {
            if on && *support == Missing {
                return Err(QmpError::generic(format!(
                    "Capability '{name}' is not supported by Sterna; leave it off on both sides"
                )));
            }
        }
        Ok(())
    }
}

/// Parses the argument `capabilities` of `migrate-set-capabilities`.
pub(crate) fn parse_changes(list: &Value) -> Result<Vec<(String, bool)>, QmpError> {
    let list = list.as_array().ok_or_else(|| QmpError::wrong_type("capabilities", "array"))?;
    let change = |entry: &Value| {
        let entry = entry.as_object().ok_or_else(|| QmpError::wrong_type("capabilities[0]", "object"))?;
        let entry = Arguments(entry);
        let name = entry.required_string("capability")?.to_owned();
        if !entry.0.contains_key("state") {
            return Err(QmpError::missing("state"));
        }
        let state = entry.flag("state")?;
        entry.only(&["capability", "state"])?;
        Ok((name, state))
    };
    list.iter().map(change).collect()
}
