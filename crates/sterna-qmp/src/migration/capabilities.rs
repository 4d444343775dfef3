//! Migration capabilities under QEMU's names: which Sterna has, which do nothing here, and which
//! combinations are refused (specs/stream.md §4).

use serde_json::{Value, json};
use sterna::Capabilities;

use crate::error::QmpError;
use crate::server::Arguments;

/// What switching a capability on means here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// The engine does it.
    Works,
    /// Kept and shown; it concerns only what Sterna does not do, so that on and off are the same.
    Harmless,
    /// Refused, since a program that asks for it relies on it.
    Missing,
}

use Support::{Harmless, Missing, Works};

/// Every capability of QEMU 11, and `x-sterna-hold`: hold the guest of a QEMU source at this destination
/// until `cont`.
pub const CAPABILITIES: &[(&str, Support)] = &[
    ("xbzrle", Works),
    ("rdma-pin-all", Works),
    ("auto-converge", Works),
    ("events", Works),
    ("postcopy-ram", Works),
    ("x-colo", Works),
    ("release-ram", Harmless),
    ("return-path", Works),
    ("pause-before-switchover", Works),
    ("multifd", Works),
    ("dirty-bitmaps", Missing),
    ("postcopy-blocktime", Works),
    ("late-block-activate", Harmless),
    ("x-ignore-shared", Missing),
    ("validate-uuid", Missing),
    ("background-snapshot", Missing),
    ("zero-copy-send", Missing),
    ("postcopy-preempt", Works),
    ("switchover-ack", Works),
    ("dirty-limit", Works),
    ("mapped-ram", Works),
    (HOLD, Works),
];

const HOLD: &str = "x-sterna-hold";

/// (this one, needs that one).
const NEEDS: &[(&str, &str)] = &[
    ("x-colo", "return-path"),
    ("switchover-ack", "return-path"),
    ("postcopy-preempt", "postcopy-ram"),
    ("zero-copy-send", "multifd"),
];

/// QEMU has them over the main channel alone. Checkpoints of a Sterna have them over lanes, too (specs/extension.md §10).
const DELTAS_OVER_LANES: (&str, &str) = ("multifd", "xbzrle");

/// Pairs that exclude each other.
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

/// What an operator has switched on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapabilitySet([bool; CAPABILITIES.len()]);

impl Default for CapabilitySet {
    /// All off as in QEMU, but `return-path`: without it nobody learns whether the migration succeeded.
    fn default() -> Self {
        Self(std::array::from_fn(|at| CAPABILITIES[at].0 == "return-path"))
    }
}

impl CapabilitySet {
    /// The set after `changes`, pairs of a name and its new state, as `migrate-set-capabilities` gives them.
    ///
    /// # Errors
    /// An unknown name, one that Sterna does not have, a combination that QEMU refuses.
    pub fn with(&self, changes: &[(String, bool)]) -> Result<Self, QmpError> {
        let mut next = self.clone();
        for (name, state) in changes {
            let at = CAPABILITIES.iter().position(|(known, _)| known == name).ok_or_else(|| {
                QmpError::generic(format!("Parameter 'capability' does not accept value '{name}'"))
            })?;
            next.0[at] = *state;
        }
        next.check()?;
        Ok(next)
    }

    /// Whether `name` is on; false for an unknown one.
    pub fn get(&self, name: &str) -> bool {
        CAPABILITIES.iter().zip(self.0).any(|((known, _), on)| *known == name && on)
    }

    /// Whether only what steers the monitor itself differs.
    pub fn same_for_engine(&self, other: &Self) -> bool {
        CAPABILITIES.iter().zip(self.0.iter().zip(other.0)).all(|((name, support), (one, another))| {
            *one == another || *name == "events" || *support == Harmless
        })
    }

    /// The answer to `query-migrate-capabilities`.
    pub fn to_json(&self) -> Value {
        let entries = CAPABILITIES.iter().zip(self.0);
        entries.map(|((name, _), on)| json!({"capability": name, "state": on})).collect()
    }

    /// In the engine's types. With `autostart` the guest of a QEMU source starts by itself.
    pub fn to_engine(&self, autostart: bool) -> Capabilities {
        Capabilities {
            multifd: self.get("multifd"),
            mapped_ram: self.get("mapped-ram"),
            return_path: self.get("return-path"),
            switchover_ack: self.get("switchover-ack"),
            auto_converge: self.get("auto-converge"),
            dirty_limit: self.get("dirty-limit"),
            pause_before_switchover: self.get("pause-before-switchover"),
            rdma_pin_all: self.get("rdma-pin-all"),
            postcopy_ram: self.get("postcopy-ram"),
            postcopy_preempt: self.get("postcopy-preempt"),
            // As in QEMU it may be on without the other, and measures nothing then.
            postcopy_blocktime: self.get("postcopy-blocktime") && self.get("postcopy-ram"),
            xbzrle: self.get("xbzrle"),
            unmanaged: autostart && !self.get(HOLD),
        }
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
        for ((name, support), on) in CAPABILITIES.iter().zip(self.0) {
            if on && *support == Missing {
                return Err(QmpError::generic(format!(
                    "Capability '{name}' is not supported by Sterna; leave it off on both sides"
                )));
            }
        }
        Ok(())
    }
}

/// The `capabilities` argument of `migrate-set-capabilities`.
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
