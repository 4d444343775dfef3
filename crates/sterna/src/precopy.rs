//! The precopy policy of [`sterna_forecast`], and its settings from an operator's parameters.

pub(crate) use sterna_forecast::precopy::{
    Answer, Backlog, Begun, Counts, HALF_LIFE, Input, LONGEST, Meter, Output, Recorded, RoundProgress,
    SHOWN_HALF_LIFE, Settings, Snapshot, Standstill, StreamsRemaining, SyncResult, TRIED_PAGES, WINDOW,
};
pub use sterna_forecast::precopy::{DowntimeEstimate, FIXED_DOWNTIME, MARGIN, Recording, allowed};

use crate::params::{Capabilities, NonConvergence, Parameters};

/// Selects the operator's settings that the precopy policy reads.
pub(crate) fn settings(params: &Parameters, capabilities: &Capabilities) -> Settings {
    Settings {
        max_bandwidth_bytes: params.max_bandwidth_bytes,
        avail_switchover_bandwidth_bytes: params.avail_switchover_bandwidth_bytes,
        downtime_limit: params.downtime_limit,
        cpu_throttle_initial: params.cpu_throttle_initial,
        cpu_throttle_increment: params.cpu_throttle_increment,
        cpu_throttle_tailslow: params.cpu_throttle_tailslow,
        max_cpu_throttle: params.max_cpu_throttle,
        throttle_trigger_threshold: params.throttle_trigger_threshold,
        vcpu_dirty_limit_bytes: params.vcpu_dirty_limit_bytes,
        // Both values end precopy. The caller decides whether the migration fails or switches to postcopy.
        fails: matches!(params.non_convergence, NonConvergence::Fail | NonConvergence::Postcopy),
        exceeds_limit: params.non_convergence == NonConvergence::Switchover,
        auto_converge: capabilities.auto_converge,
        dirty_limit: capabilities.dirty_limit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The forecast runs the policy with the policy's own defaults, so these must be equal.
    #[test]
    fn defaults_of_the_policy_are_those_of_parameters_and_capabilities() {
        let settings = settings(&Parameters::default(), &Capabilities::default());

        assert_eq!(settings, Settings::default());
    }

    #[test]
    fn guest_that_does_not_converge_fails_precopy_also_where_postcopy_follows() {
        let settings = |non_convergence| {
            let params = Parameters { non_convergence, ..Parameters::default() };
            settings(&params, &Capabilities::default())
        };

        assert!(settings(NonConvergence::Fail).fails && settings(NonConvergence::Postcopy).fails);
        assert!(!settings(NonConvergence::KeepGoing).fails && !settings(NonConvergence::Switchover).fails);
        assert!(settings(NonConvergence::Switchover).exceeds_limit);
    }
}
