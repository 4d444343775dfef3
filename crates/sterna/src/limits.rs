//! The handover machines' limits, out of what an operator sets.

use crate::params::WaitLimits;

/// For the machine of either side.
pub(crate) fn machine_limits(limits: &WaitLimits) -> sterna_proto::Limits {
    sterna_proto::Limits {
        setup: limits.setup,
        switchover: limits.switchover,
        prepare: limits.prepare,
        commit: limits.stall,
        acknowledge: limits.acknowledge,
        ask: limits.acknowledge,
        ask_interval: limits.ask_interval,
        // The destination's waits mirror the source's: it has given up when the source tries again.
        load: limits.prepare,
        prepared: limits.prepare,
        reacquire: limits.prepare.saturating_mul(3) / 2,
        ..sterna_proto::Limits::default()
    }
}
