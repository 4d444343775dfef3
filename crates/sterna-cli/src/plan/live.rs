//! A plan for a running VM: values from the VM, combined with values that the operator states.

use std::time::Duration;

use sterna::forecast::{DirtyModel, FIXED_DOWNTIME, Fixed, Inputs, Point, PostcopyInputs, UNCERTAINTY};
use sterna_drive::survey::{self, Reading, Survey};

use super::format::Plan;
use super::link;
use super::measured::Measured;
use crate::exit::Stop;
use crate::monitor::Monitor;
use crate::units;

/// Values that the operator states. The others are read from the VM or assumed.
#[derive(Debug, Clone, PartialEq)]
pub struct Stated {
    /// The link's bandwidth, bytes per second.
    /// Used in full while the guest is stopped; before that, `max-bandwidth` may limit it.
    pub bandwidth_bytes: Option<u64>,
    /// Replaces the VM's `max-bandwidth`, bytes per second.
    pub max_bandwidth_bytes: Option<u64>,
    /// Bytes per second that the guest dirties.
    pub dirty_bytes: Option<u64>,
    /// Duration of one sync.
    pub sync: Option<Duration>,
    /// Replaces the VM's `downtime-limit`.
    pub downtime_limit: Option<Duration>,
    /// Size of RAM, bytes.
    pub ram_bytes: Option<u64>,
    /// RAM that is not zero, bytes.
    pub to_send_bytes: Option<u64>,
    /// Time to stop the guest, move its devices and start it.
    pub fixed: Option<Duration>,
    /// Relative uncertainty of the inputs, as a part of 1.
    pub uncertainty: f64,
    /// Intervals over which the dirty rate is measured.
    pub intervals: Vec<Duration>,
    /// Address of the destination.
    pub to: Option<String>,
    /// Time from the start to the switch to postcopy. None: when precopy does not converge.
    pub postcopy_after: Option<Duration>,
    /// Rounds before the switch to postcopy. None: when precopy does not converge.
    pub postcopy_after_rounds: Option<u32>,
}

/// The bandwidth in both phases, bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bandwidth {
    /// While the guest runs.
    rounds: u64,
    /// During the downtime, if that rate is different.
    pause: Option<u64>,
}

/// QEMU's default, used if neither operator nor VM states a limit.
const DOWNTIME_LIMIT: Duration = Duration::from_millis(300);
/// Time to read the dirty bits of 1 GiB from a kernel's log. Misaligned blocks and device logs cost more.
const SYNC_PER_GIB: Duration = Duration::from_micros(60);

impl Default for Stated {
    /// No value is stated.
    fn default() -> Self {
        Self {
            bandwidth_bytes: None,
            max_bandwidth_bytes: None,
            dirty_bytes: None,
            sync: None,
            downtime_limit: None,
            ram_bytes: None,
            to_send_bytes: None,
            fixed: None,
            uncertainty: UNCERTAINTY,
            intervals: survey::INTERVALS.to_vec(),
            to: None,
            postcopy_after: None,
            postcopy_after_rounds: None,
        }
    }
}

impl Stated {
    /// A plan without a VM. `bandwidth_bytes`, `dirty_bytes` and `sync` must be stated.
    pub fn plan(&self) -> Plan {
        let mut assumed = Vec::new();
        let downtime_limit = self.downtime_limit.unwrap_or_else(|| {
            assumed.push("downtime limit: QEMU's default".to_owned());
            DOWNTIME_LIMIT
        });
        let ram_bytes = self.ram_bytes.unwrap_or(0);
        let inputs = Inputs {
            ram_bytes,
            first_round_bytes: self.to_send_bytes.unwrap_or(ram_bytes).min(ram_bytes),
            bandwidth_bytes: self.bandwidth_bytes.unwrap_or(0),
            switchover_bandwidth_bytes: None,
            avail_switchover_bandwidth_bytes: None,
            dirty: DirtyModel::Rate(self.dirty_bytes.unwrap_or(0)),
            sync: self.sync.unwrap_or_default(),
            downtime_limit,
            fixed: fixed(self.fixed.unwrap_or_default()),
            postcopy: self.postcopy(None),
            uncertainty: self.uncertainty,
        };
        Plan::new(inputs, assumed, None)
    }

    /// The inputs for postcopy: the VM's settings and the destination's address.
    fn postcopy(&self, survey: Option<&Survey>) -> PostcopyInputs {
        let by_address = self.to.as_deref().and_then(survey::postcopy_excluded_by_address);
        PostcopyInputs {
            limit_bytes: survey.and_then(|survey| survey.max_postcopy_bandwidth_bytes),
            after: self.postcopy_after,
            after_rounds: self.postcopy_after_rounds,
            excluded: by_address.or_else(|| survey.and_then(|survey| survey.postcopy_excluded.clone())),
        }
    }

    /// A plan for the VM of `monitor`. Measures the guest's writes for a second or two, unless they are
    /// stated.
    pub fn plan_for(&self, monitor: &mut Monitor) -> Result<Plan, Stop> {
        let mut survey = Survey::ask(monitor.vm())?;
        if survey.run_state == "inmigrate" {
            return Err(Stop::failed(format!(
                "{} waits for a migration and has no guest: give the QMP socket of the source",
                monitor.endpoint()
            )));
        }
        let mut assumed = Vec::new();
        let mut stated = self.clone();
        if monitor.is_libvirt() {
            survey = survey.under_libvirt();
            assumed.push("settings of `virsh migrate`: no limit of the bandwidth".to_owned());
            if stated.bandwidth_bytes.is_none() && stated.max_bandwidth_bytes.is_none() {
                let (bandwidth, why) = link::of_this_host();
                assumed.push(format!("bandwidth: {why}; --bandwidth overrides it"));
                stated.bandwidth_bytes = Some(bandwidth);
            }
        }
        let bandwidth = stated.bandwidth(&survey, &mut assumed).ok_or_else(|| {
            Stop::usage(format!(
                "{} has no max-bandwidth, so only the link limits it: give the link's bandwidth, such as --bandwidth \
                 10Gbit/s",
                monitor.endpoint()
            ))
        })?;
        let readings = match self.dirty_bytes {
            Some(_) => Vec::new(),
            None => survey::measure(monitor.vm(), &self.intervals)?,
        };
        if !readings.is_empty() && readings.len() < self.intervals.len() {
            assumed.push(format!(
                "the VM measures only over whole seconds, so its dirty rate is known for {} interval(s)",
                readings.len()
            ));
        }
        let inputs = self.inputs(&survey, bandwidth, &readings, &mut assumed);
        let longest = readings.iter().max_by_key(|reading| reading.interval);
        let measured = Measured {
            at: monitor.endpoint().to_string(),
            monitor: monitor.version(),
            run_state: survey.run_state,
            mode: longest.map(|reading| reading.mode.clone()),
            vcpu_dirty_bytes: longest.map(|reading| reading.vcpu_dirty_bytes.clone()).unwrap_or_default(),
        };
        Ok(Plan::new(inputs, assumed, Some(measured)))
    }

    /// The bandwidth while the guest runs, and during the downtime; none if it is unknown.
    fn bandwidth(&self, survey: &Survey, assumed: &mut Vec<String>) -> Option<Bandwidth> {
        let link = self.bandwidth_bytes.filter(|rate| *rate > 0);
        let limit = self.max_bandwidth_bytes.or(survey.max_bandwidth_bytes).filter(|rate| *rate > 0);
        match (link, limit, survey.switchover_bandwidth_bytes) {
            (Some(link), Some(limit), stated) if limit < link => {
                assumed.push(format!(
                    "max-bandwidth limits the migration except the switchover to {}",
                    units::decimal_rate(limit as f64)
                ));
                if stated.is_none() {
                    assumed.push(
                        "the downtime is estimated at max-bandwidth; avail-switchover-bandwidth changes that"
                            .into(),
                    );
                }
                Some(Bandwidth { rounds: limit, pause: Some(link) })
            }
            (Some(link), ..) => Some(Bandwidth { rounds: link, pause: None }),
            (None, Some(limit), stated) => {
                let pause =
                    if stated.is_some() { "avail-switchover-bandwidth" } else { "max-bandwidth as well" };
                assumed.push(format!(
                    "bandwidth: max-bandwidth; it does not limit the switchover, for which {pause} is assumed; \
                     --bandwidth overrides both"
                ));
                Some(Bandwidth { rounds: limit, pause: stated })
            }
            (None, None, Some(stated)) => {
                assumed.push("bandwidth: avail-switchover-bandwidth; --bandwidth overrides it".into());
                Some(Bandwidth { rounds: stated, pause: None })
            }
            (None, None, None) => None,
        }
    }

    fn inputs(
        &self,
        survey: &Survey,
        bandwidth: Bandwidth,
        readings: &[Reading],
        assumed: &mut Vec<String>,
    ) -> Inputs {
        let ram_bytes = self.ram_bytes.unwrap_or(survey.ram_bytes);
        let touched = readings.iter().filter_map(|reading| reading.touched_bytes).max();
        let first_round_bytes = self.to_send_bytes.or(touched).unwrap_or_else(|| {
            assumed.push("no page of RAM is zero; --to-send overrides it".into());
            ram_bytes
        });
        if readings.iter().any(|reading| reading.mode == "page-sampling") {
            assumed
                .push("the VM compares only samples of pages, so its dirty rate is a rough estimate".into());
        }
        if survey.run_state != "running" {
            assumed.push(format!("the guest is `{}` and does not write memory now", survey.run_state));
        }
        // The slowest of several syncs, because the first one finds the fewest pages.
        let sync =
            self.sync.or(readings.iter().filter_map(|reading| reading.sync).max()).unwrap_or_else(|| {
                let sync = SYNC_PER_GIB.mul_f64(ram_bytes as f64 / f64::from(1u32 << 30));
                let shown = units::seconds(sync.as_secs_f64());
                assumed.push(format!("a sync takes {shown}, reading one dirty log; --sync overrides it"));
                sync
            });
        let fixed_part = self.fixed.unwrap_or_else(|| {
            let shown = units::seconds(FIXED_DOWNTIME.as_secs_f64());
            assumed.push(format!("stop, devices and start take {shown}; --fixed overrides it"));
            FIXED_DOWNTIME
        });
        let curve = || {
            let point = |reading: &Reading| Point {
                interval: reading.interval,
                distinct_bytes: reading.distinct_bytes,
            };
            DirtyModel::Curve(readings.iter().map(point).collect())
        };
        Inputs {
            ram_bytes,
            first_round_bytes: first_round_bytes.min(ram_bytes),
            bandwidth_bytes: bandwidth.rounds,
            switchover_bandwidth_bytes: bandwidth.pause,
            avail_switchover_bandwidth_bytes: survey.switchover_bandwidth_bytes,
            dirty: self.dirty_bytes.map_or_else(curve, DirtyModel::Rate),
            sync,
            downtime_limit: self.downtime_limit.unwrap_or(survey.downtime_limit),
            fixed: fixed(fixed_part),
            postcopy: self.postcopy(Some(survey)),
            uncertainty: self.uncertainty,
        }
    }
}

/// The fixed part of the downtime. The forecast needs only the sum, so it is stored as one part.
fn fixed(paused: Duration) -> Fixed {
    Fixed { devices: paused, ..Fixed::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// Bandwidth of the rounds, bandwidth of the downtime, and the number of remarks.
    fn bandwidth(
        link: Option<u64>,
        limit: Option<u64>,
        stated: Option<u64>,
    ) -> Option<(u64, Option<u64>, usize)> {
        let survey = Survey {
            run_state: "running".into(),
            ram_bytes: 1 << 30,
            max_bandwidth_bytes: limit,
            switchover_bandwidth_bytes: stated,
            downtime_limit: DOWNTIME_LIMIT,
            max_postcopy_bandwidth_bytes: None,
            postcopy_excluded: None,
            has_postcopy: true,
        };
        let mut assumed = Vec::new();
        let given = Stated { bandwidth_bytes: link, ..Stated::default() }.bandwidth(&survey, &mut assumed);
        given.map(|Bandwidth { rounds, pause }| (rounds, pause, assumed.len()))
    }

    #[test]
    fn max_bandwidth_holds_rounds_back_and_not_the_pause() {
        let (slow, fast, stated) = (Some(100 * MB), Some(1000 * MB), Some(700 * MB));

        assert_eq!(bandwidth(fast, slow, None), Some((100 * MB, fast, 2)));
        assert_eq!(bandwidth(fast, slow, stated), Some((100 * MB, fast, 1)));
        assert_eq!(bandwidth(slow, fast, stated), Some((100 * MB, None, 0)));
        assert_eq!(bandwidth(slow, None, None), Some((100 * MB, None, 0)));
        assert_eq!(bandwidth(None, slow, None), Some((100 * MB, None, 1)));
        assert_eq!(bandwidth(None, slow, stated), Some((100 * MB, stated, 1)));
        assert_eq!(bandwidth(None, None, stated), Some((700 * MB, None, 1)));
        assert_eq!(bandwidth(None, None, None), None);
    }
}
