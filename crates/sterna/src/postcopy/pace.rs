//! How fast pages that nobody asks for may follow the guest: a little slower than the network carries them.
//!
//! Whoever sends faster fills the queues of the network, and requested pages wait there, whichever channel they use: most of
//! TCP's congestion controls notice a queue only when it is full. So the kernel's measure of the round trip is watched. Once a
//! queue was seen, all lanes together are paced: below what the network carries, so that what is requested finds no queue. Now
//! and then they send more, to see whether it carries more.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_transport::{Channel, Delivery};

/// Bytes that wait longer wait in a queue.
const QUEUEING: Duration = Duration::from_micros(500);
/// This part of what the network carries is used while there is no queue.
const SHARE: f64 = 0.95;
/// So long after the last queue more is tried.
const PROBE: Duration = Duration::from_millis(250);
/// What waits longer is let run out within about this time.
const DRAINING: Duration = Duration::from_millis(10);
/// How often a lane looks.
const LOOK: Duration = Duration::from_millis(4);
/// How long deliveries are counted for a rate, while there is something to deliver. A shorter time would take the bursts that a
/// network lets through for its rate.
const WINDOW: Duration = Duration::from_millis(20);
/// Nobody is held back before so many windows: in the first one a lane may just have begun.
const FIRST_WINDOWS: u32 = 2;
/// By how much of itself the rate grows with each look, while no queue is seen, and how far beyond what was delivered.
const GROWTH: f64 = 0.05;
const BEYOND: f64 = 1.1;
/// This much of what the network can carry is sent however long its queue seems: others may fill it, or a busy processor may
/// delay acknowledgements, and then to send less would help nobody.
const LEAST: f64 = 0.8;
/// In a window with a queue it is the network that delivers no more if that is not what was sent, by this part of it.
const TELLING: f64 = 0.03;
/// Over so many such windows is averaged, and over so many others: acknowledgements come in bursts.
const TOLD_WINDOWS: usize = 8;
const OTHER_WINDOWS: usize = 4;
/// Much less than before is believed only after so many in a row: a busy processor delivers less, too.
const SHORT_WINDOWS: u32 = 50;

/// The pace of all lanes of a migration, or of its main channel.
#[derive(Default)]
pub(crate) struct Pace {
    pacer: Mutex<Pacer>,
}

impl Pace {
    /// To be called again and again by whoever writes to that lane's channel: looks how the network takes its bytes, and lets
    /// it send faster or slower.
    pub(crate) fn keep(&self, lane: usize, channel: &Channel) {
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
    windows: u32,
    /// Looks in this window, in how many of them a queue was seen, and the sum of their rates.
    looks: u32,
    queued_looks: u32,
    rates: f64,
    /// Of all lanes, in bytes a second; `None` while no queue was ever seen.
    rate: Option<f64>,
    /// When a queue was seen last.
    queued: Option<Instant>,
}

/// What the network was seen to carry, in bytes a second.
#[derive(Default)]
struct Capacity {
    /// In the last windows in which something waited all the time, so that no more could be carried.
    told: VecDeque<f64>,
    /// In other windows since: a network may let more through for a while than it carries.
    others: VecDeque<f64>,
    short_windows: u32,
}

impl Capacity {
    fn bytes_per_second(&self) -> f64 {
        let most = self.others.iter().copied().fold(0.0, f64::max);
        match (self.told.is_empty(), self.others.len() < OTHER_WINDOWS) {
            (true, _) => most,
            (false, true) => mean(&self.told),
            (false, false) => mean(&self.told).max(mean(&self.others)),
        }
    }

    /// In another window.
    fn delivered(&mut self, delivered: f64, is_telling: bool) {
        let is_short = delivered < self.bytes_per_second() * LEAST;
        self.short_windows = if is_telling && is_short { self.short_windows + 1 } else { 0 };
        if self.short_windows > SHORT_WINDOWS {
            self.told.clear();
            self.short_windows = 0;
        } else if is_short {
            return;
        }
        let (windows, most) = match is_telling {
            true => (&mut self.told, TOLD_WINDOWS),
            false => (&mut self.others, OTHER_WINDOWS),
        };
        windows.truncate(most - 1);
        windows.push_front(delivered);
        if is_telling {
            // TCP may just have begun then.
            windows.retain(|before| *before >= delivered * LEAST);
            self.others.clear();
        }
    }
}

fn mean(windows: &VecDeque<f64>) -> f64 {
    windows.iter().sum::<f64>() / windows.len().max(1) as f64
}

#[derive(Default, Clone)]
struct LaneDeliveries {
    last: Option<(Instant, Delivery)>,
    /// Bytes in this window, and how long some were on their way: a lane that has nothing to send says nothing of the network.
    delivered: u64,
    busy: Duration,
    /// Of all that was delivered in the last window.
    share: f64,
}

impl Pacer {
    fn is_due(&self, now: Instant, lane: usize) -> bool {
        let last = self.lanes.get(lane).and_then(|lane| lane.last);
        last.is_none_or(|(last, _)| now.saturating_duration_since(last) >= LOOK)
    }

    /// Gives the lane's new rate, in bytes a second, if it has one.
    fn look(&mut self, now: Instant, lane: usize, delivery: &Delivery) -> Option<u64> {
        if self.lanes.len() <= lane {
            self.lanes.resize(lane + 1, LaneDeliveries::default());
        }
        let this = &mut self.lanes[lane];
        if let Some((_, before)) = this.last.replace((now, *delivery)) {
            this.delivered += delivery.acknowledged_bytes.saturating_sub(before.acknowledged_bytes);
            this.busy += delivery.busy.saturating_sub(before.busy);
        }
        let busy = this.busy;
        // Round trips of long ways vary by themselves.
        let allowed = QUEUEING + delivery.least_round_trip / 8;
        let over = delivery.queueing().checked_sub(allowed).filter(|over| !over.is_zero());
        self.looks += 1;
        self.rates += self.rate.unwrap_or(f64::INFINITY);
        if over.is_some() {
            self.queued_looks += 1;
            self.queued = Some(now);
        }
        if busy >= WINDOW {
            self.close_window(busy);
        }
        if self.windows < FIRST_WINDOWS {
            return None;
        }
        let capacity = self.capacity.bytes_per_second();
        let rate = match over {
            Some(over) => capacity * (SHARE - over.as_secs_f64() / DRAINING.as_secs_f64()).max(LEAST),
            None => {
                let probes = self.queued.is_some_and(|queued| now.saturating_duration_since(queued) >= PROBE);
                (self.rate? * (1.0 + GROWTH)).min(capacity * if probes { BEYOND } else { SHARE })
            }
        };
        self.rate = Some(rate);
        // A lane that sent nothing may begin.
        let least_share = 0.25 / self.lanes.len() as f64;
        Some((rate * self.lanes[lane].share.max(least_share)) as u64)
    }

    /// A lane has been busy for so long since the last one.
    fn close_window(&mut self, longest: Duration) {
        // Each by its own time: they are not looked at at once. What a lane sends in a moment is no rate.
        let rate = |lane: &LaneDeliveries| lane.delivered as f64 / lane.busy.max(longest / 2).as_secs_f64();
        let delivered: f64 = self.lanes.iter().map(rate).sum();
        for lane in &mut self.lanes {
            lane.share = rate(lane) / delivered.max(1.0);
            (lane.delivered, lane.busy) = (0, Duration::ZERO);
        }
        self.windows = self.windows.saturating_add(1);
        let sent = self.rates / f64::from(self.looks.max(1));
        // What is delivered as it is sent says nothing of the network, though answers come late: a processor may be busy.
        let is_telling = self.queued_looks == self.looks
            && !((1.0 - TELLING) * sent..(1.0 + TELLING) * sent).contains(&delivered);
        self.capacity.delivered(delivered, is_telling);
        (self.looks, self.queued_looks, self.rates) = (0, 0, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link with a queue, and a sender that has all it wants to send.
    struct Link {
        bytes_per_second: f64,
        round_trip: f64,
        /// What delays acknowledgements and is no queue of this link.
        busy: f64,
        queued: f64,
        delivered: f64,
        /// Bytes that it lets through at once, if it carried less for a while; and how many of them now.
        burst: f64,
        tokens: f64,
        /// So many bytes at most are acknowledged later than they came.
        late: f64,
        /// Looks of the second half at which something waited for longer than [`QUEUEING`].
        queued_looks: u32,
    }

    /// The longest queue, in seconds.
    const LONGEST: f64 = 0.020;

    impl Link {
        /// Its queue is full.
        fn new(bytes_per_second: f64, round_trip: f64) -> Self {
            let queued = LONGEST * bytes_per_second;
            Self {
                bytes_per_second,
                round_trip,
                busy: 0.0,
                queued,
                delivered: 0.0,
                burst: 0.0,
                tokens: 0.0,
                late: 0.0,
                queued_looks: 0,
            }
        }

        fn step(&mut self, seconds: f64, rate: f64) {
            let carried = self.bytes_per_second * seconds + self.tokens;
            let room = LONGEST * self.bytes_per_second - self.queued + carried;
            let sent = (rate * seconds).min(room);
            let out = carried.min(self.queued + sent);
            self.queued += sent - out;
            self.delivered += out;
            self.tokens = (carried - out).min(self.burst);
        }

        fn waits(&self) -> f64 {
            self.queued / self.bytes_per_second
        }

        /// Runs for a second. Gives the longest wait in its second half, and the part of the link that was used in it.
        fn run(&mut self, lanes: usize) -> (f64, f64) {
            let mut pacer = Pacer::default();
            let (mut rates, mut acknowledged) = (vec![1e9; lanes], vec![0.0; lanes]);
            let begin = Instant::now();
            let (mut longest, mut half) = (0.0_f64, 0.0);
            for count in 0..250 {
                let (before, rate) = (self.delivered, rates.iter().sum::<f64>());
                self.step(LOOK.as_secs_f64(), rate);
                for lane in 0..lanes {
                    acknowledged[lane] += (self.delivered - before) * rates[lane] / rate;
                    let late = self.late / lanes as f64 * f64::from(count * 7919 % 5) / 4.0;
                    let second = |seconds: f64| Duration::from_secs_f64(seconds);
                    let delivery = Delivery {
                        round_trip: second(self.round_trip + self.waits() + self.busy),
                        least_round_trip: second(self.round_trip),
                        acknowledged_bytes: (acknowledged[lane] - late).max(0.0) as u64,
                        busy: LOOK * count,
                    };
                    let new = pacer.look(begin + LOOK * count, lane, &delivery);
                    rates[lane] = new.map_or(rates[lane], |rate| rate as f64);
                }
                match count {
                    ..125 => half = self.delivered,
                    _ => {
                        longest = longest.max(self.waits());
                        self.queued_looks += u32::from(self.waits() > QUEUEING.as_secs_f64());
                    }
                }
            }
            (longest, (self.delivered - half) / (self.bytes_per_second * LOOK.as_secs_f64() * 125.0))
        }
    }

    #[test]
    fn queue_that_is_full_runs_out_and_the_link_stays_full() {
        for (rate, round_trip) in [(2e8, 40e-6), (2e7, 500e-6), (1.2e9, 100e-6), (1e8, 0.020)] {
            for lanes in [1, 2, 8] {
                let (longest, used) = Link::new(rate, round_trip).run(lanes);
                let allowed = 2.0 * (QUEUEING.as_secs_f64() + round_trip / 8.0);
                assert!(longest < allowed, "{rate} {round_trip} {lanes}: {longest}");
                assert!(used > 0.93, "{rate} {round_trip} {lanes}: {used}");
            }
        }
    }

    #[test]
    fn link_that_lets_bursts_through_is_not_taken_for_a_faster_one() {
        for lanes in [1, 2, 8] {
            let link = Link::new(2e8, 40e-6);
            let (longest, used) = Link { burst: f64::from(512 << 10), ..link }.run(lanes);
            assert!(longest < 0.002, "{lanes}: {longest}");
            assert!(used > 0.93, "{lanes}: {used}");
        }
    }

    #[test]
    fn acknowledgements_in_bursts_are_not_taken_for_a_faster_link() {
        for lanes in [1, 2, 8] {
            let mut link = Link { late: 500_000.0, burst: f64::from(512 << 10), ..Link::new(2e8, 40e-6) };
            let (_, used) = link.run(lanes);
            assert!(link.queued_looks < 20, "{lanes}: {} of 125", link.queued_looks);
            assert!(used > 0.9, "{lanes}: {used}");
        }
    }

    #[test]
    fn delays_that_are_no_queue_of_its_own_cost_a_fifth_and_no_more() {
        let mut link = Link::new(2e8, 40e-6);
        link.busy = 0.030;
        let (_, used) = link.run(2);
        assert!((LEAST * 0.95..=1.0).contains(&used), "{used}");
    }

    #[test]
    fn network_that_carries_less_than_before_is_believed_after_a_while() {
        let mut pacer = Pacer { rate: Some(2e8), windows: FIRST_WINDOWS, ..Pacer::default() };
        pacer.capacity.delivered(2e8, true);
        let (begin, mut rate) = (Instant::now(), 0);
        for count in 0..1000 {
            let delivery = Delivery {
                round_trip: Duration::from_millis(20),
                least_round_trip: Duration::from_micros(40),
                acknowledged_bytes: u64::from(count) * 40_000,
                busy: LOOK * count,
            };
            rate = pacer.look(begin + LOOK * count, 0, &delivery).unwrap_or(rate);
        }
        assert!((7_000_000..10_000_000).contains(&rate), "it delivers 10 MB/s: {rate}");
    }

    #[test]
    fn channel_without_a_queue_is_never_paced() {
        let mut pacer = Pacer::default();
        let begin = Instant::now();
        for count in 0..100 {
            let delivery = Delivery {
                round_trip: Duration::from_micros(300),
                least_round_trip: Duration::from_micros(20),
                acknowledged_bytes: u64::from(count) << 20,
                busy: LOOK * count,
            };
            assert_eq!(pacer.look(begin + LOOK * count, 0, &delivery), None);
        }
    }

    #[test]
    fn lane_that_has_little_to_send_says_nothing_of_the_network() {
        let mut pacer = Pacer::default();
        let begin = Instant::now();
        for count in 0..100 {
            let delivery = Delivery {
                // A busy processor answered late.
                round_trip: Duration::from_millis(30),
                least_round_trip: Duration::from_micros(20),
                acknowledged_bytes: u64::from(count) * 100,
                busy: Duration::from_micros(50) * count,
            };
            assert_eq!(pacer.look(begin + LOOK * count, 0, &delivery), None);
        }
    }
}
