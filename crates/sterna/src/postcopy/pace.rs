//! Limits the rate of pages that were not requested to a little less than the network's capacity.
//!
//! A sender that is faster than the network fills the network's queues. Requested pages wait there, on
//! whichever channel, because most of TCP's congestion controls detect a queue only when it is full.
//!
//! Therefore the pace follows the round trip time that the kernel measures. After the first queue, all lanes
//! together are paced below the network's capacity ([`capacity`]), so that requested pages find no queue. From
//! time to time the lanes send more, to test whether the capacity has grown. A delay that is not caused by this
//! migration's queue ([`delay`]) does not slow it.

mod capacity;
mod delay;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_transport::{Channel, Delivery};

use capacity::Capacity;
use delay::{Verdict, Watch};

/// A longer additional delay counts as a queue.
const QUEUEING: Duration = Duration::from_micros(500);
/// Share of the network's capacity that is used while there is no queue.
const SHARE: f64 = 0.95;
/// Time after the last queue until a higher rate is tried.
const PROBE: Duration = Duration::from_millis(250);
/// Time after the last probe until a higher rate is tried although a queue seems to exist. The probe ends when
/// the queue has reached [`PROBED_QUEUE`].
const FORCED_PROBE: Duration = Duration::from_secs(1);
/// Time to the next probe after one that has found more capacity. That probe sends still more, because the
/// estimate may be far too low.
const NEXT_PROBE: Duration = Duration::from_millis(50);
const FOUND: f64 = 1.04;
const LARGEST_PROBE: f64 = 2.0;
const PROBED_QUEUE: Duration = Duration::from_millis(4);
/// Time within which a queue is drained, approximately.
const DRAINING: Duration = Duration::from_millis(10);
/// Interval at which the delivery of a lane's channel is read.
const LOOK: Duration = Duration::from_millis(4);
/// Busy time over which deliveries are averaged to a rate. A shorter time would mistake the bursts that a
/// network lets through for its rate.
const WINDOW: Duration = Duration::from_millis(20);
/// Multiple of the delay's noise that is added to [`WINDOW`]: bytes that are late in one window arrive in the
/// next.
const WINDOW_OF_NOISE: u32 = 20;
/// Windows without pacing at the start, because a lane may have begun only just before.
const FIRST_WINDOWS: u32 = 2;
/// Busy time before the pacing after which a lane's earlier deliveries show the network's capacity.
const BEFORE: Duration = Duration::from_secs(1);
/// Growth of the rate at each look while no queue is seen, and its limit beyond the capacity.
const GROWTH: f64 = 0.05;
const BEYOND: f64 = 1.1;
/// Share of the capacity that is sent however long the queue seems, because the delay may have another cause.
const LEAST: f64 = 0.8;

/// The common pace of all lanes of a migration, or of its main channel.
#[derive(Default)]
pub struct Pace {
    pacer: Mutex<Pacer>,
}

impl Pace {
    /// Reads how the network delivers the bytes of `lane`'s channel, and sets the channel's rate. The thread
    /// that writes to the channel calls this repeatedly.
    pub fn keep(&self, lane: usize, channel: &Channel) {
        let now = Instant::now();
        let mut pacer = self.pacer.lock();
        if pacer.is_due(now, lane)
            && let Some(delivery) = channel.delivery()
            && let Some(rate) = pacer.look(now, lane, &delivery)
        {
            channel.pace(rate);
        }
    }
}

#[derive(Default)]
struct Pacer {
    lanes: Vec<LaneDeliveries>,
    capacity: Capacity,
    watch: Watch,
    windows: u32,
    /// For this window: number of looks, number of looks that saw a queue, and the sum of the rates.
    looks: u32,
    queued_looks: u32,
    rates: f64,
    /// Rate of all lanes together, in bytes per second. `None` until the first queue was seen.
    rate: Option<f64>,
    /// When a queue was seen last.
    queued: Option<Instant>,
    /// When a higher rate was tried last.
    probed: Option<Instant>,
    /// The forced probe that is in progress.
    probing: Option<Probe>,
    /// Set if the last forced probe has found more capacity: the factor for the next probe.
    found: Option<f64>,
    /// Bytes that all lanes had delivered when they began, and the busy time of the busiest lane.
    before: (u64, Duration),
    /// The shortest round trip of the lane that was looked at last.
    round_trip: Duration,
}

/// A period in which more is sent than the estimate allows, to test whether it is delivered.
struct Probe {
    /// End of the probe. It ends earlier if a queue grows.
    ends: Instant,
    /// Number of windows, and the sum of their rates. The first window is not summed, because its deliveries were
    /// sent before the probe.
    windows: u32,
    delivered: f64,
    /// Set if the network seemed to deliver only this many bytes per second.
    ///
    /// The probe then shows how much it delivers while the lanes are not held back. A busy processor delivers less,
    /// and still less if less is sent.
    short: Option<f64>,
}

#[derive(Default, Clone)]
struct LaneDeliveries {
    last: Option<(Instant, Delivery)>,
    /// Bytes that were delivered in this window, and the time in which some were on their way. A lane without
    /// anything to send gives no information about the network.
    delivered: u64,
    busy: Duration,
    /// The lane's share of all bytes that were delivered in the last window.
    share: f64,
}

impl Pacer {
    fn is_due(&self, now: Instant, lane: usize) -> bool {
        let last = self.lanes.get(lane).and_then(|lane| lane.last);
        last.is_none_or(|(last, _)| now.saturating_duration_since(last) >= LOOK)
    }

    /// Returns the lane's new rate in bytes per second, if it has one.
    fn look(&mut self, now: Instant, lane: usize, delivery: &Delivery) -> Option<u64> {
        if self.lanes.len() <= lane {
            self.lanes.resize(lane + 1, LaneDeliveries::default());
        }
        let this = &mut self.lanes[lane];
        let before = this.last.replace((now, *delivery));
        if before.is_none() {
            self.begin(delivery);
        }
        let this = &mut self.lanes[lane];
        if let Some((_, before)) = before {
            this.delivered += delivery.acknowledged_bytes.saturating_sub(before.acknowledged_bytes);
            this.busy += delivery.busy.saturating_sub(before.busy);
        }
        let busy = this.busy;
        self.round_trip = delivery.least_round_trip;
        // The round trip time over long distances varies by itself.
        let allowed = QUEUEING + delivery.least_round_trip / 8;
        let excess = delivery.queueing().saturating_sub(allowed);
        let over = self.watch.over(excess);
        self.looks += 1;
        self.rates += self.rate.unwrap_or(f64::INFINITY);
        if over.is_some() {
            self.queued_looks += 1;
            self.queued = Some(now);
        }
        if busy >= self.window() {
            self.close_window(busy);
        }
        if self.windows < FIRST_WINDOWS {
            return None;
        }
        self.rate = Some(self.next_rate(now, excess, over)?);
        // A lane that has sent nothing may begin now, so it gets a minimum.
        let least_share = 0.25 / self.lanes.len() as f64;
        Some((self.rate? * self.lanes[lane].share.max(least_share)) as u64)
    }

    /// Handles a lane's first look. The bytes that its channel carried before, in precopy, give a rate if the
    /// busy time was long enough.
    fn begin(&mut self, delivery: &Delivery) {
        self.before.0 += delivery.acknowledged_bytes;
        self.before.1 = self.before.1.max(delivery.busy);
        if self.before.1 >= BEFORE {
            self.capacity.is_at_least(self.before.0 as f64 / self.before.1.as_secs_f64());
        }
    }

    /// The rate of all lanes after a look, if they are paced.
    fn next_rate(&mut self, now: Instant, excess: Duration, over: Option<Duration>) -> Option<f64> {
        if self.rate.is_some() && self.probing.is_none() {
            match self.watch.look(now, excess) {
                Some(Verdict::Short(delivered)) => self.start_probe(now, Some(delivered)),
                Some(Verdict::Queue) => self.capacity.was_exceeded(),
                Some(Verdict::Noise) | None => {}
            }
        }
        let capacity = self.capacity.bytes_per_second();
        if self.watch.is_trying() {
            return Some(capacity * LEAST);
        }
        self.probe(now, over);
        let draining = DRAINING + self.watch.noise() * 2;
        match over {
            _ if self.probing.is_some() => {
                if self.probing.as_ref().is_some_and(|probe| probe.short.is_some()) {
                    return Some(capacity * LARGEST_PROBE);
                }
                let most = self.found.unwrap_or(BEYOND);
                Some((self.rate? * (1.0 + GROWTH)).clamp(capacity, capacity * most))
            }
            Some(over) => Some(capacity * (SHARE - over.as_secs_f64() / draining.as_secs_f64()).max(LEAST)),
            None => {
                let probes = self.queued.is_some_and(|queued| now.saturating_duration_since(queued) >= PROBE);
                // A noisy delay would interrupt this probe before the delivery is measured.
                if probes && self.watch.noise().is_zero() {
                    self.probed = Some(now);
                }
                let most = capacity * if probes { BEYOND } else { SHARE };
                Some((self.rate? * (1.0 + GROWTH)).min(most))
            }
        }
    }

    /// Begins or ends a forced probe.
    fn probe(&mut self, now: Instant, over: Option<Duration>) {
        let has_queue = over.is_some_and(|over| over > PROBED_QUEUE);
        let is_over = |probe: &mut Probe| now >= probe.ends || has_queue && probe.short.is_none();
        if let Some(probe) = self.probing.take_if(is_over) {
            self.probed_to(&probe);
        }
        let probed = *self.probed.get_or_insert(now);
        let wait = self.found.map_or(FORCED_PROBE, |_| NEXT_PROBE);
        if self.probing.is_none() && now.saturating_duration_since(probed) >= wait {
            self.start_probe(now, None);
        }
    }

    fn start_probe(&mut self, now: Instant, short: Option<f64>) {
        self.watch.restart();
        let ends = now + self.window() * 3 + self.round_trip;
        (self.probed, self.probing) = (Some(now), Some(Probe { ends, windows: 0, delivered: 0.0, short }));
    }

    /// Applies the result of a forced probe.
    fn probed_to(&mut self, probe: &Probe) {
        let delivered = probe.delivered / f64::from(probe.windows.saturating_sub(1).max(1));
        if let Some(short) = probe.short {
            self.capacity.is_less(delivered.max(short));
            return;
        }
        let has_found = delivered > self.capacity.bytes_per_second() * FOUND;
        self.found = has_found.then(|| (self.found.unwrap_or(BEYOND) * BEYOND).min(LARGEST_PROBE));
        self.capacity.is_at_least(delivered);
    }

    /// The length of a window.
    fn window(&self) -> Duration {
        WINDOW + self.watch.noise() * WINDOW_OF_NOISE
    }

    /// Evaluates a window. `longest` is the busy time of the lane that completes it.
    fn close_window(&mut self, longest: Duration) {
        // Each lane is measured by its own busy time, because the lanes' looks are at different times. A short
        // busy time gives no rate.
        let rate = |lane: &LaneDeliveries| lane.delivered as f64 / lane.busy.max(longest / 2).as_secs_f64();
        let delivered: f64 = self.lanes.iter().map(rate).sum();
        for lane in &mut self.lanes {
            lane.share = rate(lane) / delivered.max(1.0);
            (lane.delivered, lane.busy) = (0, Duration::ZERO);
        }
        self.windows = self.windows.saturating_add(1);
        let sent = self.rates / f64::from(self.looks.max(1));
        if sent.is_infinite() {
            self.capacity.delivered_freely(delivered, self.queued_looks == self.looks);
        } else {
            self.watch.window(delivered, sent);
            if let Some(probe) = &mut self.probing {
                probe.delivered += if probe.windows > 0 { delivered } else { 0.0 };
                probe.windows += 1;
            }
            self.capacity.delivered_paced(delivered);
        }
        (self.looks, self.queued_looks, self.rates) = (0, 0, 0.0);
    }
}
