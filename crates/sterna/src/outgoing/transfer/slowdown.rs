//! Slows the guest down on the policy's request, and removes the limits at the end.
//!
//! It also finds out why a migration does not converge.

use std::sync::Arc;

use crate::error::{MigrationError, NoConvergence, Remedy, VmError};
use crate::events::Event;
use crate::outgoing::shared::Shared;
use crate::params::{Capabilities, Parameters};
use crate::precopy::{Output, Standstill};
use crate::threads::{call, tried};
use crate::throttle::Throttle;

/// The throttle and dirty limits of this migration.
pub(in crate::outgoing) struct Slowdown {
    shared: Arc<Shared>,
    limits: Limits,
}

impl Slowdown {
    /// A slowdown without limits.
    pub(in crate::outgoing) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, limits: Limits::default() }
    }

    /// Makes vCPUs sleep `percent` of the time.
    pub(in crate::outgoing) fn throttle(&self, percent: u8) {
        if let Some(throttle) = self.shared.guest.vm.throttle() {
            call("Throttle::set_cpu_throttle", || throttle.set_cpu_throttle(percent));
        }
    }

    /// Limits each vCPU to `bytes` per second, or to a lower limit of the operator.
    pub(in crate::outgoing) fn limit_dirty_rates(&mut self, bytes: u64) -> Result<(), MigrationError> {
        let Some(throttle) = self.shared.guest.vm.throttle() else { return Ok(()) };
        Ok(call("Throttle::set_dirty_limit", || self.limits.set(throttle, bytes))?)
    }

    /// Copies the times that vCPUs spent in dirty limits to the statistics.
    pub(in crate::outgoing) fn note_times(&self) {
        let times = self.shared.guest.vm.throttle().and_then(Throttle::dirty_limit_times);
        self.shared.measures.statistics.lock().dirty_limit_times = times;
    }

    /// Performs the policy's final outputs: removes the throttle and the limits.
    ///
    /// An error becomes a warning. The other outputs are still performed, and the guest continues to run.
    pub(in crate::outgoing) fn take_back(&mut self, outputs: &[Output]) {
        let limits = std::mem::take(&mut self.limits);
        let Some(throttle) = self.shared.guest.vm.throttle() else { return };
        for output in outputs {
            let (what, done) = match output {
                Output::Throttle(percent) => (
                    "the guest is still throttled",
                    tried("Throttle::set_cpu_throttle", || {
                        throttle.set_cpu_throttle(*percent);
                        Ok::<_, VmError>(())
                    }),
                ),
                Output::LimitDirtyRate(None) => (
                    "the dirty limit is not removed",
                    tried("Throttle::set_dirty_limit", || limits.take_back(throttle)),
                ),
                _ => continue,
            };
            if let Err(error) = done {
                self.shared.tell(&Event::Warning(format!("{what}: {error}")));
            }
        }
    }
}

/// Why a migration does not converge, and possible remedies.
pub(in crate::outgoing) fn why_not(shared: &Shared, standstill: Standstill) -> NoConvergence {
    let params = shared.params();
    let is_held = params.max_bandwidth_bytes > 0 && params.max_bandwidth_bytes < standstill.drained_bytes;
    let gains_by_multifd = shared.session.facts.gains_by_multifd;
    let can_throttle = shared.guest.vm.throttle().is_some();
    NoConvergence {
        dirtied_bytes_per_second: standstill.dirtied_bytes,
        sendable_bytes_per_second: if is_held {
            params.max_bandwidth_bytes
        } else {
            standstill.drained_bytes
        },
        is_bandwidth_limited: is_held,
        downtime: standstill.expected,
        downtime_limit: params.downtime_limit,
        device_streams: standstill.streams,
        remedies: remedies(&params, &shared.capabilities, is_held, gains_by_multifd, can_throttle),
    }
}

/// The dirty limits in force.
#[derive(Debug, Default)]
struct Limits {
    /// The limit of this migration in bytes per second.
    ours: Option<u64>,
    /// The vCPUs' limits of an operator; empty if the VM does not report limits.
    before: Vec<Option<u64>>,
}

impl Limits {
    fn set(&mut self, throttle: &dyn Throttle, bytes: u64) -> Result<(), VmError> {
        if self.ours.is_none() {
            self.before = throttle.vcpu_dirty_rates().iter().map(|rate| rate.limit_bytes).collect();
        }
        self.ours = Some(bytes);
        if self.before.iter().all(Option::is_none) {
            return throttle.set_dirty_limit(None, Some(bytes));
        }
        for (vcpu, before) in self.before.iter().enumerate() {
            throttle.set_dirty_limit(Some(vcpu), Some(before.map_or(bytes, |own| own.min(bytes))))?;
        }
        Ok(())
    }

    /// Restores each vCPU's earlier limit.
    fn take_back(&self, throttle: &dyn Throttle) -> Result<(), VmError> {
        if self.before.is_empty() {
            return throttle.set_dirty_limit(None, None);
        }
        let each = self.before.iter().enumerate();
        each.map(|(vcpu, limit)| throttle.set_dirty_limit(Some(vcpu), *limit)).fold(Ok(()), Result::and)
    }
}

/// Possible remedies that the settings do not use yet.
fn remedies(
    params: &Parameters,
    capabilities: &Capabilities,
    is_held: bool,
    gains_by_multifd: bool,
    can_throttle: bool,
) -> Vec<Remedy> {
    let mut remedies = vec![Remedy::RaiseDowntimeLimit];
    match (is_held, capabilities.multifd) {
        (true, _) => remedies.push(Remedy::RaiseBandwidthLimit),
        (false, true) => remedies.push(Remedy::MoreChannels),
        (false, false) if gains_by_multifd => remedies.push(Remedy::Multifd),
        (false, false) => {}
    }
    if capabilities.dirty_limit {
        remedies.push(Remedy::LowerDirtyLimit);
    } else if !capabilities.auto_converge && can_throttle {
        remedies.push(Remedy::AutoConverge);
    } else if capabilities.auto_converge && params.max_cpu_throttle < 99 {
        remedies.push(Remedy::RaiseThrottle);
    }
    remedies.push(Remedy::FewerWrites);
    remedies
}

#[cfg(test)]
mod tests {
    use super::Remedy::*;
    use super::*;

    #[test]
    fn remedies_name_only_what_is_not_done_already() {
        let params = Parameters { max_cpu_throttle: 99, ..Parameters::default() };
        let capabilities = Capabilities { multifd: true, auto_converge: true, ..Capabilities::default() };

        let held = remedies(&params, &capabilities, true, true, true);
        assert_eq!(held, [RaiseDowntimeLimit, RaiseBandwidthLimit, FewerWrites]);
        let free = remedies(&params, &Capabilities::default(), false, true, true);
        assert_eq!(free, [RaiseDowntimeLimit, Multifd, AutoConverge, FewerWrites]);
        let plain = remedies(&params, &Capabilities::default(), false, false, false);
        assert_eq!(plain, [RaiseDowntimeLimit, FewerWrites]);
        let lower = Capabilities { dirty_limit: true, ..Capabilities::default() };
        assert!(remedies(&params, &lower, false, true, true).contains(&LowerDirtyLimit));
        let more = Parameters { max_cpu_throttle: 50, ..params };
        assert!(remedies(&more, &capabilities, true, true, true).contains(&RaiseThrottle));
    }
}
