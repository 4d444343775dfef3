//! Computes when a packet reaches the other end of a link, or that it is lost. Pure: the caller
//! passes the time.

use std::time::Duration;

/// The properties of one direction of a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Rate in bytes per second; 0 means no limit.
    pub bytes_per_second: u64,
    /// Longest wait before a packet is sent. A packet that would wait longer is dropped.
    pub queue: Duration,
    /// Time from one end to the other, the same for every packet.
    pub delay: Duration,
    /// Largest additional delay, drawn for each packet. Packets keep their order, so a late packet
    /// delays the later ones.
    pub jitter: Duration,
    /// The share of packets that are lost, 0.0 to 1.0.
    pub loss: f64,
    /// Drops every packet of this direction.
    pub is_cut: bool,
}

impl Default for Shape {
    /// No rate limit, delay or loss. The queue is 20 ms, which matters once a rate is set.
    fn default() -> Self {
        Self {
            bytes_per_second: 0,
            queue: Duration::from_millis(20),
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: 0.0,
            is_cut: false,
        }
    }
}

/// The state of one direction. All times count from the same arbitrary moment.
pub(crate) struct Shaper {
    pub(crate) shape: Shape,
    /// Time at which the last accepted packet has been sent.
    free_at: Duration,
    /// Time at which the last accepted packet arrives.
    last_arrival: Duration,
    random: fastrand::Rng,
}

impl Shaper {
    pub(crate) fn new(shape: Shape, seed: u64) -> Self {
        let random = fastrand::Rng::with_seed(seed);
        Self { shape, free_at: Duration::ZERO, last_arrival: Duration::ZERO, random }
    }

    /// How long a packet that is handed over at `now` waits before it is sent.
    pub(crate) fn queue(&self, now: Duration) -> Duration {
        self.free_at.saturating_sub(now)
    }

    /// The arrival of a packet that is handed over at `now`; `None` for a lost packet.
    pub(crate) fn arrival(&mut self, now: Duration, len_bytes: usize) -> Option<Duration> {
        let begins = self.free_at.max(now);
        if self.shape.is_cut || begins - now > self.shape.queue {
            return None;
        }
        let seconds = match self.shape.bytes_per_second {
            0 => 0.0,
            rate => len_bytes as f64 / rate as f64,
        };
        self.free_at = begins + Duration::from_secs_f64(seconds);
        // A lost packet still occupies the link.
        if self.shape.loss > 0.0 && self.random.f64() < self.shape.loss {
            return None;
        }
        let late = self.shape.jitter.mul_f64(self.random.f64());
        self.last_arrival = self.last_arrival.max(self.free_at + self.shape.delay + late);
        Some(self.last_arrival)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Arrival times of 100 packets of 1000 bytes that are handed over at the same moment.
    fn burst(shape: Shape) -> Vec<Option<Duration>> {
        let mut shaper = Shaper::new(shape, sterna_testing::seed("burst"));
        (0..100).map(|_| shaper.arrival(10 * MS, 1000)).collect()
    }

    #[test]
    fn burst_over_a_link_arrives_at_its_rate_after_its_delay() {
        let shape = Shape { bytes_per_second: 10_000_000, delay: 5 * MS, ..Shape::default() };

        let arrivals = burst(shape);

        let expected = |n: u32| Some(15 * MS + MS / 10 * n);
        assert_eq!((arrivals[0], arrivals[99]), (expected(1), expected(100)));
    }

    #[test]
    fn packets_beyond_the_queue_are_dropped() {
        let shape = Shape { bytes_per_second: 10_000_000, queue: 2 * MS, ..Shape::default() };

        let arrived = burst(shape).iter().flatten().count();

        assert_eq!(arrived, 21, "those that wait for at most 2 ms");
    }

    #[test]
    fn jitter_delays_packets_and_keeps_their_order() {
        let shape = Shape { delay: MS, jitter: MS, ..Shape::default() };

        let arrivals: Vec<_> = burst(shape).into_iter().flatten().collect();

        assert!(arrivals.is_sorted() && arrivals.len() == 100);
        assert!(arrivals[0] >= 11 * MS && arrivals[99] <= 12 * MS && arrivals[99] > arrivals[0]);
    }

    #[test]
    fn cut_link_delivers_no_packet_and_a_lossy_one_some() {
        assert_eq!(burst(Shape { is_cut: true, ..Shape::default() }).iter().flatten().count(), 0);
        let some = burst(Shape { loss: 0.5, ..Shape::default() }).iter().flatten().count();
        assert!((20..80).contains(&some), "{some}");
    }
}
