//! Carries out what [`super::convergence`] decides: slows the guest down, warns, or gives up.

use std::sync::Arc;
use std::time::Instant;

use sterna_ram::PAGE_SIZE;
use sterna_transport::Address;

use super::control::Control;
use super::convergence::{Convergence, LOOK_EVERY, Look, Step};
use super::counters::Counts;
use super::shared::lock;
use crate::error::{MigrationError, VmError};
use crate::events::Event;
use crate::params::{Capabilities, NonConvergence, Parameters};
use crate::threads::{call, caught, tried};
use crate::throttle::Throttle;

/// What is known since the last look.
pub(super) struct Watch {
    convergence: Convergence,
    since: Instant,
    counts: Counts,
    /// Pages found dirty since.
    pub dirtied_pages: u64,
    /// Whether the operator was told that it does not converge: once.
    is_told: bool,
}

impl Watch {
    pub fn new(counts: Counts) -> Self {
        Self {
            convergence: Convergence::default(),
            since: Instant::now(),
            counts,
            dirtied_pages: 0,
            is_told: false,
        }
    }
}

/// The dirty limits in force.
#[derive(Debug, Default)]
pub(super) struct Limits {
    /// This migration's, bytes per second.
    ours: Option<u64>,
    /// Each vCPU's own, set by an operator before; empty where the VM does not say.
    before: Vec<Option<u64>>,
}

impl Limits {
    /// Gives each vCPU back what it had.
    fn take_back(&self, throttle: &dyn Throttle) -> Result<(), VmError> {
        if self.before.is_empty() {
            return throttle.set_dirty_limit(None, None);
        }
        let each = self.before.iter().enumerate();
        each.map(|(vcpu, limit)| throttle.set_dirty_limit(Some(vcpu), *limit)).fold(Ok(()), Result::and)
    }
}

fn set_cpu_throttle(throttle: &dyn Throttle, percent: u8) {
    call("Throttle::set_cpu_throttle", || throttle.set_cpu_throttle(percent));
}

/// Holds each vCPU to `bytes` per second, or to the operator's limit if that is less.
fn limit_dirty_rates(
    throttle: Option<&dyn Throttle>,
    limits: &mut Limits,
    bytes: u64,
) -> Result<(), MigrationError> {
    let Some(throttle) = throttle.filter(|_| limits.ours != Some(bytes)) else { return Ok(()) };
    if limits.ours.is_none() {
        limits.before = throttle.vcpu_dirty_rates().iter().map(|rate| rate.limit_bytes).collect();
    }
    limits.ours = Some(bytes);
    if limits.before.iter().all(Option::is_none) {
        return Ok(call("Throttle::set_dirty_limit", || throttle.set_dirty_limit(None, Some(bytes)))?);
    }
    for (vcpu, before) in limits.before.iter().enumerate() {
        throttle.set_dirty_limit(Some(vcpu), Some(before.map_or(bytes, |own| own.min(bytes))))?;
    }
    Ok(())
}

impl Control {
    /// After a round: whether the end comes nearer.
    pub(super) fn converge(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let Some(rounds) = &mut self.rounds else { return Ok(()) };
        let watch = &mut rounds.watch;
        if watch.since.elapsed() < LOOK_EVERY {
            return Ok(());
        }
        let params = shared.params();
        if let Some(percent) = watch.convergence.lower_to(params.max_cpu_throttle)
            && let Some(throttle) = shared.vm.throttle()
        {
            set_cpu_throttle(throttle, percent);
        }
        if watch.convergence.is_limited() {
            // The operator may have changed it.
            limit_dirty_rates(shared.vm.throttle(), &mut self.limits, params.vcpu_dirty_limit_bytes)?;
        }
        let counts = shared.counters.now();
        let look = Look {
            dirtied_bytes: watch.dirtied_pages * PAGE_SIZE as u64,
            sent_bytes: (counts.pages() - watch.counts.pages()) * PAGE_SIZE as u64,
            expected: lock(&shared.figures).expected_downtime,
            fits: rounds.fits,
        };
        (watch.since, watch.counts, watch.dirtied_pages) = (Instant::now(), counts, 0);
        let step = watch.convergence.look(look, &params, &shared.capabilities);
        let was_told = watch.is_told;
        watch.is_told |= step == Step::NotConverging;
        let is_limited = watch.convergence.is_limited();
        let times = shared.vm.throttle().filter(|_| is_limited).and_then(Throttle::dirty_limit_times);
        let mut figures = lock(&shared.figures);
        figures.cpu_throttle_percent = watch.convergence.throttle_percent();
        figures.is_dirty_limited = is_limited;
        figures.dirty_limit_times = times;
        drop(figures);
        let throttle = shared.vm.throttle();
        match (step, throttle) {
            (Step::Throttle(percent), Some(throttle)) => set_cpu_throttle(throttle, percent),
            (Step::LimitDirtyRate, throttle) => {
                limit_dirty_rates(throttle, &mut self.limits, params.vcpu_dirty_limit_bytes)?;
            }
            (Step::NotConverging, _) => {
                let why = self.why_not(look, &params);
                if params.non_convergence == NonConvergence::Fail {
                    return Err(MigrationError::NotConverging { why });
                }
                if !was_told {
                    shared.tell(&Event::Warning(format!("the migration does not converge: {why}")));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Lets the guest run as fast as it did. However the migration ends; idempotent.
    pub(super) fn unthrottle(&mut self) {
        let (percent, is_limited) = {
            let mut figures = lock(&self.shared.figures);
            figures.dirty_limit_times = None;
            let limited = std::mem::take(&mut figures.is_dirty_limited);
            (std::mem::take(&mut figures.cpu_throttle_percent), limited)
        };
        let limits = std::mem::take(&mut self.limits);
        let Some(throttle) = self.shared.vm.throttle().filter(|_| percent > 0 || is_limited) else { return };
        // Neither keeps the other from being tried, nor the guest from running on.
        if percent > 0
            && let Err(error) = caught("Throttle", || set_cpu_throttle(throttle, 0))
        {
            self.shared.tell(&Event::Warning(format!("the guest is still throttled: {error}")));
        }
        if is_limited && let Err(error) = tried("Throttle::set_dirty_limit", || limits.take_back(throttle)) {
            self.shared.tell(&Event::Warning(format!("the dirty limit is not taken back: {error}")));
        }
    }

    fn why_not(&self, look: Look, params: &Parameters) -> String {
        let shared = &self.shared;
        let devices = self.streams_need();
        let figures = lock(&shared.figures);
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        let dirtied = megabytes(figures.dirty_pages_per_second * PAGE_SIZE as u64);
        let drained = figures.pace(shared.counters.now()).drain_bytes();
        let is_held = params.max_bandwidth_bytes > 0 && params.max_bandwidth_bytes < drained;
        let (sent, held) = match is_held {
            true => (params.max_bandwidth_bytes, " under max-bandwidth"),
            false => (drained, ""),
        };
        let is_network = matches!(shared.to, Address::Tcp { .. } | Address::Unix { .. });
        let can_throttle = shared.vm.throttle().is_some();
        let devices = match devices {
            time if time.is_zero() => String::new(),
            time => format!(
                "Devices' state takes {} ms of it, which no round makes shorter: raise downtime-limit above that. ",
                time.as_millis()
            ),
        };
        format!(
            "the guest dirties {dirtied:.0} MB/s, {:.0} MB/s can be sent{held}, and the pause would be {:.0} ms where \
             downtime-limit allows {} ms. {devices}{}",
            megabytes(sent),
            look.expected.as_secs_f64() * 1e3,
            params.downtime_limit.as_millis(),
            remedies(params, &shared.capabilities, is_held, is_network, can_throttle)
        )
    }
}

/// What may help, and is not done already.
fn remedies(
    params: &Parameters,
    capabilities: &Capabilities,
    is_held: bool,
    is_network: bool,
    can_throttle: bool,
) -> String {
    let mut remedies = vec!["Raise downtime-limit"];
    match (is_held, capabilities.multifd) {
        (true, _) => remedies.push("raise max-bandwidth"),
        (false, true) => remedies.push("raise multifd-channels if the link is not full"),
        (false, false) if is_network => remedies.push("switch multifd on if the link is not full"),
        (false, false) => {}
    }
    if capabilities.dirty_limit {
        remedies.push("lower vcpu-dirty-limit");
    } else if !capabilities.auto_converge && can_throttle {
        remedies.push("switch auto-converge on");
    } else if capabilities.auto_converge && params.max_cpu_throttle < 99 {
        remedies.push("raise max-cpu-throttle");
    }
    remedies.push("or let the guest write less");
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
        assert_eq!(held, "Raise downtime-limit, raise max-bandwidth, or let the guest write less");
        let free = remedies(&params, &Capabilities::default(), false, true, true);
        for part in ["switch multifd on", "switch auto-converge on"] {
            assert!(free.contains(part), "{free}");
        }
        let plain = remedies(&params, &Capabilities::default(), false, false, false);
        assert_eq!(plain, "Raise downtime-limit, or let the guest write less");
        let lower = Capabilities { dirty_limit: true, ..Capabilities::default() };
        assert!(remedies(&params, &lower, false, true, true).contains("lower vcpu-dirty-limit"));
        let more = Parameters { max_cpu_throttle: 50, ..params };
        assert!(remedies(&more, &capabilities, true, true, true).contains("raise max-cpu-throttle"));
    }
}
