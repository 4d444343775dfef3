//! Computes the handover machines' limits from the operator's wait limits.

use crate::params::WaitLimits;

/// Limits for the handover machine of either side.
pub(crate) fn machine_limits(limits: &WaitLimits) -> sterna_proto::Limits {
    sterna_proto::Limits {
        setup: limits.setup,
        switchover: limits.switchover,
        prepare: limits.prepare,
        commit: limits.stall,
        acknowledge: limits.acknowledge,
        ask: limits.acknowledge,
        ask_interval: limits.ask_interval,
        // The destination waits no longer than the source, so it has given up before the source tries again.
        load: limits.prepare,
        prepared: limits.prepare,
        reacquire: limits.prepare.saturating_mul(3) / 2,
        ..sterna_proto::Limits::default()
    }
}
