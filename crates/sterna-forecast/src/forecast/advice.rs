//! Proposes changes with which a migration ends.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::inputs::Inputs;
use super::seconds;
use super::simulate::{self, Luck, Run};

/// A change with which a migration ends, even if the inputs are wrong by the forecast's uncertainty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "what")]
#[non_exhaustive]
pub enum Advice {
    /// Set a higher downtime limit.
    RaiseDowntimeLimit {
        /// The new limit, in milliseconds.
        milliseconds: u64,
    },
    /// Use a faster link, or raise `max-bandwidth`.
    RaiseBandwidth {
        /// The bandwidth needed, in bytes per second.
        bytes_per_second: u64,
    },
    /// Use more channels on the same link, if the thread of a channel is the bottleneck.
    MoreChannels,
    /// Throttle the vCPUs: each sleeps for part of the time.
    Throttle {
        /// The part, in percent.
        percent: u8,
    },
    /// Let Sterna find the throttle by itself (`auto-converge`).
    AutoConverge {
        /// The throttle that must be allowed, in percent.
        percent: u8,
    },
    /// Use postcopy: the guest runs at the destination before all of its RAM is there. The effect is in
    /// [`Forecast::postcopy`](super::Forecast::postcopy).
    #[serde(alias = "postcopy-later")]
    Postcopy,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RaiseDowntimeLimit { milliseconds } => {
                write!(f, "raise the downtime limit to {milliseconds} ms")
            }
            Self::RaiseBandwidth { bytes_per_second } => {
                let gigabytes = *bytes_per_second as f64 / 1e9;
                write!(f, "send at {gigabytes:.2} GB/s or more: raise the bandwidth limit, or use a faster link")
            }
            Self::MoreChannels => {
                f.write_str("if the link is not full, use more multifd channels")
            }
            Self::Throttle { percent } => write!(f, "slow the guest's vCPUs down by {percent} %"),
            Self::AutoConverge { percent } => write!(
                f,
                "switch automatic throttling on, up to {percent} % or more: it slows the guest down as far as \
                 necessary"
            ),
            Self::Postcopy => f.write_str(
                "use postcopy, which ends at any dirty rate: until all pages have arrived, the guest runs more slowly \
                 at the destination, and depends on both hosts and the link",
            ),
        }
    }
}

/// The longest downtime limit that is proposed, in milliseconds: QEMU's maximum.
const LONGEST_MS: u64 = 2_000_000;
/// Maximum factor of the present bandwidth that is proposed.
const FASTEST: f64 = 64.0;

/// Finds the changes with which the migration ends. `expected` is the run with the given inputs.
pub(super) fn advise(inputs: &Inputs, expected: &Run) -> Vec<Advice> {
    // Use the worse inputs, so that the advice also works if the inputs are too optimistic.
    let worse = Luck::worse(inputs.sane_uncertainty());
    let ends = |bandwidth: f64, dirtying: f64| {
        let luck =
            Luck { bandwidth: worse.bandwidth * bandwidth, dirtying: worse.dirtying * dirtying, ..worse };
        simulate::run(inputs, luck).convergent
    };
    let mut advice = Vec::new();
    let worst = simulate::run(inputs, worse);
    let least = seconds::duration(worst.least_downtime.max(expected.least_downtime));
    let milliseconds = u64::try_from(least.as_millis()).unwrap_or(u64::MAX).saturating_add(1);
    if milliseconds <= LONGEST_MS {
        advice.push(Advice::RaiseDowntimeLimit { milliseconds });
    }
    if let Some(factor) = least_factor(FASTEST, |factor| ends(factor, 1.0)) {
        let bytes_per_second = (inputs.bandwidth_bytes as f64 * factor).ceil() as u64;
        advice.extend([Advice::RaiseBandwidth { bytes_per_second }, Advice::MoreChannels]);
    }
    // A binary search is possible because a higher throttle never hurts. The first percentage that works is proposed.
    let percents: Vec<u8> = (1..=99).collect();
    let first = percents.partition_point(|percent| !ends(1.0, 1.0 - f64::from(*percent) / 100.0));
    if let Some(percent) = percents.get(first).copied() {
        advice.extend([Advice::AutoConverge { percent }, Advice::Throttle { percent }]);
    }
    if inputs.postcopy.excluded.is_none() {
        advice.push(Advice::Postcopy);
    }
    advice
}

/// The least factor up to `greatest` for which `ends` is true. None if there is none.
fn least_factor(greatest: f64, ends: impl Fn(f64) -> bool) -> Option<f64> {
    let (mut fails, mut works) = (1.0, greatest);
    if !ends(works) {
        return None;
    }
    while works / fails > 1.01 {
        let middle = (fails * works).sqrt();
        if ends(middle) {
            works = middle;
        } else {
            fails = middle;
        }
    }
    Some(works)
}
