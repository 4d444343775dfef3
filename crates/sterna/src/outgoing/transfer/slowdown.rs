//! Slows the guest down on the policy's request, and removes the limits at the end.
//!
//! It also explains why a migration does not converge.

use std::sync::Arc;

use crate::error::{MigrationError, VmError};
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

/// A text: why a migration does not converge, and possible remedies.
pub(in crate::outgoing) fn why_not(shared: &Shared, standstill: Standstill) -> String {
    let params = shared.params();
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    let is_held = params.max_bandwidth_bytes > 0 && params.max_bandwidth_bytes < standstill.drained_bytes;
    let (sent, held) = match is_held {
        true => (params.max_bandwidth_bytes, " under the bandwidth limit"),
        false => (standstill.drained_bytes, ""),
    };
    let gains_by_multifd = shared.session.facts.gains_by_multifd;
    let can_throttle = shared.guest.vm.throttle().is_some();
    let devices = match standstill.streams {
        time if time.is_zero() => String::new(),
        time => format!(
            "Devices' state takes {} ms of it, which further rounds do not shorten: raise the downtime limit above that. ",
            time.as_millis()
        ),
    };
    format!(
        "the guest dirties {:.0} MB/s, {:.0} MB/s can be sent{held}, and the downtime would be {:.0} ms where \
         the downtime limit is {} ms. {devices}{}",
        megabytes(standstill.dirtied_bytes),
        megabytes(sent),
        standstill.expected.as_secs_f64() * 1e3,
        params.downtime_limit.as_millis(),
        remedies(&params, &shared.capabilities, is_held, gains_by_multifd, can_throttle)
    )
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
) -> String {
    let mut remedies = vec!["Raise the downtime limit"];
    match (is_held, capabilities.multifd) {
        (true, _) => remedies.push("raise the bandwidth limit"),
        (false, true) => remedies.push("use more multifd channels if the link is not full"),
        (false, false) if gains_by_multifd => remedies.push("switch multifd on if the link is not full"),
        (false, false) => {}
    }
    if capabilities.dirty_limit {
        remedies.push("lower the dirty limit of the vCPUs");
    } else if !capabilities.auto_converge && can_throttle {
        remedies.push("switch automatic throttling on");
    } else if capabilities.auto_converge && params.max_cpu_throttle < 99 {
        remedies.push("raise the highest throttle");
    }
    remedies.push("or reduce the guest's writes");
    remedies.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedies_name_only_what_is_not_done_already() {
        let params = Parameters { max_cpu_throttle: 99, ..Parameters::default() };
        let capabilities = Capabilities { multifd: true, auto_converge: true, ..Capabilities::default() };

        let held = remedies(&params, &capabilities, true, true, true);
        assert_eq!(held, "Raise the downtime limit, raise the bandwidth limit, or reduce the guest's writes");
        let free = remedies(&params, &Capabilities::default(), false, true, true);
        for part in ["switch multifd on", "switch automatic throttling on"] {
            assert!(free.contains(part), "{free}");
        }
        let plain = remedies(&params, &Capabilities::default(), false, false, false);
        assert_eq!(plain, "Raise the downtime limit, or reduce the guest's writes");
        let lower = Capabilities { dirty_limit: true, ..Capabilities::default() };
        assert!(remedies(&params, &lower, false, true, true).contains("lower the dirty limit of the vCPUs"));
        let more = Parameters { max_cpu_throttle: 50, ..params };
        assert!(remedies(&more, &capabilities, true, true, true).contains("raise the highest throttle"));
    }
}
