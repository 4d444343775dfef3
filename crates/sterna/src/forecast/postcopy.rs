//! What postcopy would do: the guest goes on at the destination, and the pages that it lacks follow.
//!
//! Precopy is simulated until the source would switch ([`simulate::switch`]). From then on the link is full with pages that
//! are missing, each once, so the time until the last one does not depend on what the guest does. Each missing page is waited for
//! at most once: by a guest that touches it before it came.

use serde::{Deserialize, Serialize};

use super::class::{Class, Order, PAGE_BYTES};
use super::inputs::Inputs;
use super::range::Range;
use super::simulate::{self, Luck, QUEUED_BYTES, Switch, Until};

/// Why the guest goes on at the destination when it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SwitchReason {
    /// Precopy stands still.
    NotConverging,
    /// Precopy would end, and an operator does not wait for it: right after the first round.
    AfterFirstRound,
    /// An operator starts it then ([`PostcopyInputs::after`](super::PostcopyInputs::after)).
    Operator,
    /// So many rounds are over ([`PostcopyInputs::after_rounds`](super::PostcopyInputs::after_rounds)).
    AfterRounds,
}

/// What postcopy would do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PostcopyForecast {
    /// When the switch is assumed.
    pub switch: SwitchReason,
    /// Seconds from the migration's start to the switch.
    pub switch_at: Range,
    /// Bytes of pages that the destination lacks then.
    pub missing_bytes: Range,
    /// Seconds in which the guest runs on neither side.
    pub downtime: Range,
    /// Seconds from the guest's start at the destination until the last page is there. Until then it depends on both hosts and the
    /// link, and waits for pages.
    pub degraded_time: Range,
    /// Seconds from the migration's start until the last page is there.
    pub total_time: Range,
    /// Pages that the guest waits for, if it reads only what it writes, as far as [`POSTCOPY_ASSUMPTIONS`] go.
    pub faults: Range,
    /// Page faults that are possible at most: one for each missing page, in the worst case of those above.
    pub most_faults: f64,
}

/// What a forecast of postcopy assumes, in sentences.
pub const POSTCOPY_ASSUMPTIONS: [&str; 5] = [
    "the guest writes after the switch as before, and waits for no page: one that waits writes less, and faults less",
    "pages come in an order that has nothing to do with what the guest writes next, of 4 KiB each",
    "the link carries no more after the switch than before, unless more is known of it: without a limit \
     (max-postcopy-bandwidth 0) pages may come faster than max-bandwidth",
    "only writes are known: a guest that reads other missing pages faults more often, at most once for each missing page",
    "the pause has no time in which the destination discards stale pages",
];

/// A range of pages to discard, as bytes on the wire.
const RANGE_BYTES: f64 = 16.0;

impl PostcopyForecast {
    /// Computes it, for a guest that precopy moves within so many seconds, or not at all.
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

/// Why postcopy begins, and how much of precopy comes before.
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

/// With one luck; pages and seconds.
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

/// Into how many ranges the missing `pages` of a class fall.
fn ranges(class: &Class, pages: f64) -> f64 {
    match class.order {
        Order::Random if class.pages > 0.0 => pages * (1.0 - pages / class.pages).max(0.0),
        Order::Random => 0.0,
        Order::Sequential => 1.0,
    }
}

/// Which part of a class's missing pages is written before it came, if each comes at a moment by chance within `seconds`.
fn faulting(class: &Class, seconds: f64) -> f64 {
    let through = class.pages / class.writes_per_second;
    if !(through.is_finite() && through > 0.0 && seconds > 0.0) {
        return 0.0;
    }
    let times = seconds / through;
    let part = match class.order {
        // A page's first write comes after a time that is exponentially distributed. For few writes the difference is mostly
        // rounding.
        Order::Random if times < 1e-6 => times / 2.0,
        Order::Random => 1.0 + (-times).exp_m1() / times,
        // The writer is at it once in each time through the class.
        Order::Sequential if times <= 1.0 => times / 2.0,
        Order::Sequential => 1.0 - 1.0 / (2.0 * times),
    };
    part.clamp(0.0, 1.0)
}
