//! Computes the effect of postcopy: the guest runs at the destination, and the missing pages follow.
//!
//! Precopy is simulated until the source switches ([`simulate::switch`]). From then on missing pages use the whole
//! link, each once. So the time until the last page does not depend on the guest. The guest waits for each missing
//! page at most once: when it touches the page before the page has arrived.

use serde::{Deserialize, Serialize};

use super::class::{Class, Order, PAGE_BYTES};
use super::inputs::Inputs;
use super::range::Range;
use super::simulate::{self, Luck, QUEUED_BYTES, Switch, Until};

/// The reason for the time of the switch to postcopy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SwitchReason {
    /// Precopy does not converge.
    NotConverging,
    /// Precopy would end, but an operator switches right after the first round.
    AfterFirstRound,
    /// An operator switches at a given time ([`PostcopyInputs::after`](super::PostcopyInputs::after)).
    Operator,
    /// A given number of rounds is complete ([`PostcopyInputs::after_rounds`](super::PostcopyInputs::after_rounds)).
    AfterRounds,
}

/// The expected course of a migration with postcopy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PostcopyForecast {
    /// The reason for the assumed time of the switch.
    pub switch: SwitchReason,
    /// Seconds from the migration's start to the switch.
    pub switch_at: Range,
    /// Bytes of pages that are missing at the destination at the switch.
    pub missing_bytes: Range,
    /// Seconds in which the guest runs on neither side.
    pub downtime: Range,
    /// Seconds from the guest's start at the destination until the last page arrives. During this time the guest
    /// depends on both hosts and the link, and waits for pages.
    pub degraded_time: Range,
    /// Seconds from the migration's start until the last page arrives.
    pub total_time: Range,
    /// Number of pages that the guest waits for, if it reads only pages that it writes. See [`POSTCOPY_ASSUMPTIONS`].
    pub faults: Range,
    /// Maximum number of page faults: one for each missing page, in the worst of the three cases.
    pub most_faults: f64,
}

/// The assumptions of a forecast of postcopy, as sentences.
pub const POSTCOPY_ASSUMPTIONS: [&str; 5] = [
    "after the switch the guest writes at the same rate, without waiting for pages (a waiting guest writes less and \
     has fewer page faults)",
    "pages of 4 KiB arrive in an order that is independent of the guest's writes",
    "the bandwidth after the switch is not larger than before, unless a larger one is known: without a limit \
     (max-postcopy-bandwidth 0) pages may arrive faster than max-bandwidth",
    "only writes are known: a guest that reads other missing pages has more page faults, at most one for each missing \
     page",
    "the pause does not include the time in which the destination discards stale pages",
];

/// Bytes on the wire for one range of pages to discard.
const RANGE_BYTES: f64 = 16.0;

impl PostcopyForecast {
    /// Computes the forecast. `precopy`: seconds that precopy needs to move the guest; none if it does not end.
    pub(super) fn new(inputs: &Inputs, precopy: Option<f64>) -> Self {
        let off = inputs.sane_uncertainty();
        let (reason, until) = when(inputs, precopy);
        let cases = [Luck::better(off), Luck::EXPECTED, Luck::worse(off)]
            .map(|luck| Case::new(inputs, &simulate::switch(inputs, luck, until)));
        let range = |of: fn(&Case) -> f64| Range::of(cases.each_ref().map(of));
        let most = |of: fn(&Case) -> f64| cases.iter().map(of).fold(0.0, f64::max);
        Self {
            switch: reason,
            switch_at: range(|case| case.at),
            missing_bytes: range(|case| case.missing * PAGE_BYTES),
            downtime: range(|case| case.downtime),
            degraded_time: range(|case| case.degraded),
            total_time: range(|case| case.at + case.downtime + case.degraded),
            faults: range(|case| case.faults),
            most_faults: most(|case| case.missing).ceil(),
        }
    }
}

/// The reason for the switch, and the part of precopy before it.
fn when(inputs: &Inputs, precopy: Option<f64>) -> (SwitchReason, Until) {
    let rounds =
        inputs.postcopy.after_rounds.map(|rounds| (SwitchReason::AfterRounds, Until::Rounds(rounds)));
    let time = inputs.postcopy.after.map(|after| {
        let seconds = after.as_secs_f64() - inputs.fixed.setup.as_secs_f64();
        (SwitchReason::Operator, Until::Seconds(seconds))
    });
    let wanted = rounds.into_iter().chain(time);
    let comes =
        wanted.filter_map(|(reason, until)| Some((simulate::switch_at(inputs, until)?, reason, until)));
    match (comes.min_by(|one, other| one.0.total_cmp(&other.0)), precopy) {
        (Some((_, reason, until)), _) => (reason, until),
        (None, Some(_)) => (SwitchReason::AfterFirstRound, Until::Rounds(1)),
        (None, None) => (SwitchReason::NotConverging, Until::Ended),
    }
}

/// The result for one [`Luck`], in pages and seconds.
struct Case {
    at: f64,
    missing: f64,
    downtime: f64,
    degraded: f64,
    faults: f64,
}

impl Case {
    fn new(inputs: &Inputs, switch: &Switch) -> Self {
        let Switch { at, missing, unwritten_pages, rate, link_rate } = switch;
        let pages = missing.iter().map(|(_, pages)| pages).sum::<f64>() + unwritten_pages;
        let degraded = pages * PAGE_BYTES / rate;
        let ranges: f64 = missing.iter().map(|(class, pages)| ranges(class, *pages)).sum();
        let in_pause = QUEUED_BYTES + ranges * RANGE_BYTES;
        let pause = inputs.fixed.downtime() + inputs.sync;
        Self {
            at: *at,
            missing: pages,
            downtime: pause.as_secs_f64() + in_pause / link_rate,
            degraded,
            faults: missing.iter().map(|(class, pages)| pages * faulting(class, degraded)).sum(),
        }
    }
}

/// The number of contiguous ranges that the missing `pages` of a class form.
fn ranges(class: &Class, pages: f64) -> f64 {
    match class.order {
        Order::Random if class.pages > 0.0 => pages * (1.0 - pages / class.pages).max(0.0),
        Order::Random => 0.0,
        Order::Sequential => 1.0,
    }
}

/// The part of a class's missing pages that is written before the page arrives. Pages arrive at random times within
/// `seconds`.
fn faulting(class: &Class, seconds: f64) -> f64 {
    let through = class.pages / class.writes_per_second;
    if !(through.is_finite() && through > 0.0 && seconds > 0.0) {
        return 0.0;
    }
    let times = seconds / through;
    let part = match class.order {
        // The time until a page's first write is distributed exponentially. For few writes the exact difference would
        // be mostly a rounding error.
        Order::Random if times < 1e-6 => times / 2.0,
        Order::Random => 1.0 + (-times).exp_m1() / times,
        // The writer reaches a page once in each walk through the class.
        Order::Sequential if times <= 1.0 => times / 2.0,
        Order::Sequential => 1.0 - 1.0 / (2.0 * times),
    };
    part.clamp(0.0, 1.0)
}
