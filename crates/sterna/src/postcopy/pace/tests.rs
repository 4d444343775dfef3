use super::*;

/// A simulated link with a queue, and a sender that always has data.
struct Link {
    bytes_per_second: f64,
    round_trip: f64,
    /// Delay of acknowledgements that is not a queue of this link, and the largest random addition at each
    /// look.
    busy: f64,
    jitter: f64,
    queued: f64,
    delivered: f64,
    /// Bytes that the link lets through in one burst if it carried less before, and the present allowance.
    burst: f64,
    tokens: f64,
    /// Most bytes that are acknowledged later than they have arrived.
    late: f64,
    /// Looks of the second half at which the delay was longer than [`QUEUEING`].
    queued_looks: u32,
}

/// Length of the full queue, in seconds.
const LONGEST: f64 = 0.020;

impl Link {
    /// A link whose queue is full.
    fn new(bytes_per_second: f64, round_trip: f64) -> Self {
        let queued = LONGEST * bytes_per_second;
        Self {
            bytes_per_second,
            round_trip,
            busy: 0.0,
            jitter: 0.0,
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

    /// Simulates one second. Returns the longest delay in its second half, and the share of the link that was
    /// used in it.
    fn run(&mut self, lanes: usize) -> (f64, f64) {
        self.run_for(250, lanes)
    }

    /// As [`run`](Self::run), for a number of looks.
    fn run_for(&mut self, looks: u32, lanes: usize) -> (f64, f64) {
        let mut pacer = Pacer::default();
        let mut random = fastrand::Rng::with_seed(7);
        let (mut rates, mut acknowledged) = (vec![1e9; lanes], vec![0.0; lanes]);
        let begin = Instant::now();
        let (mut longest, mut half) = (0.0_f64, 0.0);
        for count in 0..looks {
            let (before, rate) = (self.delivered, rates.iter().sum::<f64>());
            self.step(LOOK.as_secs_f64(), rate);
            for lane in 0..lanes {
                acknowledged[lane] += (self.delivered - before) * rates[lane] / rate;
                let jitter = self.jitter * random.f64();
                let late =
                    self.late / lanes as f64 * f64::from(count % 5 * 4 % 5) / 4.0 + jitter * rates[lane];
                let second = |seconds: f64| Duration::from_secs_f64(seconds);
                let delivery = Delivery {
                    round_trip: second(self.round_trip + self.waits() + self.busy + jitter),
                    least_round_trip: second(self.round_trip),
                    acknowledged_bytes: (acknowledged[lane] - late).max(0.0) as u64,
                    busy: LOOK * count,
                    acknowledged_ago: Duration::ZERO,
                };
                let new = pacer.look(begin + LOOK * count, lane, &delivery);
                rates[lane] = new.map_or(rates[lane], |rate| rate as f64);
            }
            if count < looks / 2 {
                half = self.delivered;
            } else {
                longest = longest.max(self.waits());
                self.queued_looks += u32::from(self.waits() > QUEUEING.as_secs_f64());
            }
        }
        let seconds = LOOK.as_secs_f64() * f64::from(looks - looks / 2);
        (longest, (self.delivered - half) / (self.bytes_per_second * seconds))
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
fn delays_that_are_no_queue_of_its_own_cost_little_after_a_trial() {
    let mut link = Link::new(2e8, 40e-6);
    link.busy = 0.030;
    let (_, used) = link.run_for(1000, 2);
    assert!((0.9..=1.0).contains(&used), "{used}");
}

#[test]
fn round_trip_that_jitters_does_not_make_the_pace_decay_within_a_minute() {
    for jitter in [0.001, 0.005] {
        for round_trip in [0.2e-3, 2e-3, 20e-3] {
            for lanes in [1, 4] {
                // Packets keep their order, so most are as late as the latest of the previous ones.
                let mut link =
                    Link { busy: jitter / 2.0, jitter: jitter / 2.0, ..Link::new(4e7, round_trip) };
                let (_, used) = link.run_for(15_000, lanes);
                assert!(used > 0.9, "{jitter} {round_trip} {lanes}: {used}");
            }
        }
    }
}

#[test]
fn network_that_carries_less_than_before_is_believed_after_a_while() {
    let mut pacer = Pacer { rate: Some(2e8), windows: FIRST_WINDOWS, ..Pacer::default() };
    pacer.capacity.delivered_freely(2e8, true);
    let (begin, mut rate) = (Instant::now(), 0);
    for count in 0..1000 {
        let delivery = Delivery {
            round_trip: Duration::from_millis(20),
            least_round_trip: Duration::from_micros(40),
            acknowledged_bytes: u64::from(count) * 40_000,
            busy: LOOK * count,
            acknowledged_ago: Duration::ZERO,
        };
        rate = pacer.look(begin + LOOK * count, 0, &delivery).unwrap_or(rate);
    }
    assert!(
        (7_000_000..=11_000_000).contains(&rate),
        "it delivers 10 MB/s, and a probe sends a tenth more: {rate}"
    );
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
            acknowledged_ago: Duration::ZERO,
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
            // A busy processor has answered late.
            round_trip: Duration::from_millis(30),
            least_round_trip: Duration::from_micros(20),
            acknowledged_bytes: u64::from(count) * 100,
            busy: Duration::from_micros(50) * count,
            acknowledged_ago: Duration::ZERO,
        };
        assert_eq!(pacer.look(begin + LOOK * count, 0, &delivery), None);
    }
}
