//! A migration, pass by pass.
//!
//! The first pass sends all that is not zero. A look for dirty pages begins while the end of a pass is still being
//! sent, so a pass lasts as long as the longer of the two. What it finds is the next pass: pages that the pass had
//! sent and the guest wrote again afterwards, and pages that the pass had not to send and the guest wrote at any
//! time in it. As soon as the rest fits the downtime limit the guest stops; when passes no longer shrink it never
//! will.

use serde::{Deserialize, Serialize};

use super::dirty::{Class, Order};
use super::{Inputs, MARGIN, PAGE_BYTES, Pause};

/// One pass as it is expected.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PlannedRound {
    /// From 1.
    pub number: u64,
    /// Seconds since the migration's start.
    pub began: f64,
    /// Seconds that it lasts.
    pub took: f64,
    /// Bytes that it sends.
    pub bytes: f64,
    /// Bytes found dirty at its end.
    pub dirtied_bytes: f64,
    /// Whether the guest stands still: the last one, if it comes to that.
    pub stopped: bool,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Whether the guest got to stop.
    pub convergent: bool,
    /// Passes while the guest ran.
    pub rounds: u64,
    /// Seconds in all; up to the recognition that it does not end, if it does not.
    pub total_time: f64,
    /// Seconds of the pause; of the shortest that was reached, if it does not end.
    pub downtime: f64,
    /// Bytes sent in all.
    pub bytes: f64,
    /// The shortest pause that was possible after any pass, with the engine's margin, seconds.
    pub least_downtime: f64,
    /// The first [`CURVE`] passes, and the last.
    pub curve: Vec<PlannedRound>,
}

/// What lies in sockets and goes out before the last pages: about a packet of each channel, and what is on its way.
pub(crate) const QUEUED_BYTES: f64 = (2 << 20) as f64;
/// Passes kept in a curve.
pub const CURVE: usize = 300;
/// No migration of sense has more passes.
const CAP: u64 = 20_000;
/// A pass that shrinks by less than this part does not shrink.
const STANDSTILL: f64 = 1e-6;
/// So many of them in a row are a standstill.
const PATIENCE: u32 = 3;

/// Where a guest that walks through its memory is when the first pass begins. One that is just ahead of the pass
/// dirties nothing that has been sent; one just behind it dirties everything again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Walk {
    /// Ahead of the pass.
    Ahead,
    /// Anywhere, on average.
    Anywhere,
    /// Behind it.
    Behind,
}

/// How the figures differ from those that were given.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Luck {
    /// Times the bandwidth.
    pub bandwidth: f64,
    /// Times the dirty rate.
    pub dirtying: f64,
    /// Where walks are.
    pub walk: Walk,
}

impl Luck {
    /// The figures are right.
    pub const EXPECTED: Self = Self { bandwidth: 1.0, dirtying: 1.0, walk: Walk::Anywhere };

    /// All better than expected, by the part `off`.
    pub fn better(off: f64) -> Self {
        Self { bandwidth: 1.0 + off, dirtying: 1.0 - off, walk: Walk::Ahead }
    }

    /// All worse.
    pub fn worse(off: f64) -> Self {
        Self { bandwidth: 1.0 - off, dirtying: 1.0 + off, walk: Walk::Behind }
    }
}

/// Goes through a migration. With [`Inputs::pause_bandwidth_bytes`] above what the engine reckons with, the pause is
/// shorter than it was reckoned.
pub fn run(inputs: &Inputs, luck: Luck) -> Run {
    let Luck { bandwidth, dirtying, walk } = luck;
    let rate = (inputs.bandwidth_bytes as f64 * bandwidth).max(1.0);
    let pause_rate = inputs.pause_bandwidth_bytes.map_or(rate, |bytes| (bytes as f64 * bandwidth).max(1.0));
    // What an operator states is not measured, and so no luck changes it.
    let reckoned = inputs.avail_switchover_bandwidth_bytes.map_or(rate, |bytes| (bytes as f64).max(1.0));
    let classes: Vec<Class> =
        inputs.dirty.classes(inputs.ram_bytes).iter().map(|class| class.scaled(dirtying)).collect();
    let limit = inputs.downtime_limit.as_secs_f64();
    let sync = inputs.sync.as_secs_f64();
    let fixed = inputs.fixed.paused().as_secs_f64();
    let ram_pages = inputs.ram_bytes as f64 / PAGE_BYTES;

    let mut run = Run {
        convergent: false,
        rounds: 0,
        total_time: inputs.fixed.setup.as_secs_f64(),
        downtime: f64::INFINITY,
        bytes: 0.0,
        least_downtime: f64::INFINITY,
        curve: Vec::new(),
    };
    // Of the first pass: where a class's pages lie in RAM nobody knows, so any moment of it is as likely.
    let mut sent: Option<Vec<f64>> = None;
    let mut bytes = inputs.first_pass_bytes.min(inputs.ram_bytes) as f64;
    let mut standing = 0;
    while run.rounds < CAP {
        let sending = bytes / rate;
        let round = sending.max(sync);
        let found: Vec<f64> = match &sent {
            None => classes.iter().map(|class| first_pass(class, walk, sending, round)).collect(),
            Some(sent) => classes
                .iter()
                .zip(sent)
                .map(|(class, sent)| class.after_pass(*sent, sending, round))
                .collect(),
        };
        let found_bytes = found.iter().sum::<f64>().min(ram_pages) * PAGE_BYTES;
        run.push(bytes, round, found_bytes);
        let rest = found_bytes + QUEUED_BYTES;
        let pause = Pause { fixed, look: sync, rest: rest / reckoned, margin: MARGIN };
        run.least_downtime = run.least_downtime.min(pause.longest());
        if pause.fits(limit) {
            run.stop(Pause { rest: rest / pause_rate, ..pause }.expected(), found_bytes);
            return run;
        }
        // The first pass is of another kind: only from the second one on do they have to shrink.
        let stands = sent.is_some() && found_bytes >= bytes * (1.0 - STANDSTILL);
        standing = if stands { standing + 1 } else { 0 };
        if standing >= PATIENCE {
            break;
        }
        bytes = found_bytes;
        sent = Some(found);
    }
    run.downtime = run.least_downtime;
    run
}

/// Pages of `class` that are dirty after a first pass that lasted `round` seconds, `sending` of them spent on
/// sending.
fn first_pass(class: &Class, walk: Walk, sending: f64, round: f64) -> f64 {
    match (class.order, walk) {
        // It stays ahead of the pass, as long as it does not come round to what was sent before.
        (Order::Sequential, Walk::Ahead) => (class.written(sending) - class.pages).clamp(0.0, class.pages),
        (Order::Sequential, Walk::Behind) => class.distinct(round),
        _ => class.mean_distinct(round - sending, round),
    }
}

impl Run {
    fn push(&mut self, bytes: f64, took: f64, dirtied_bytes: f64) {
        self.rounds += 1;
        if self.curve.len() < CURVE {
            self.curve.push(PlannedRound {
                number: self.rounds,
                began: self.total_time,
                took,
                bytes,
                dirtied_bytes,
                stopped: false,
            });
        }
        self.total_time += took;
        self.bytes += bytes;
    }

    fn stop(&mut self, downtime: f64, bytes: f64) {
        self.curve.push(PlannedRound {
            number: self.rounds + 1,
            began: self.total_time,
            took: downtime,
            bytes,
            dirtied_bytes: 0.0,
            stopped: true,
        });
        self.convergent = true;
        self.downtime = downtime;
        self.total_time += downtime;
        self.bytes += bytes;
    }
}
