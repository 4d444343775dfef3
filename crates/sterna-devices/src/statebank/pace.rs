//! Limits the rate at which a device's state is read or loaded.

use std::time::{Duration, Instant};

/// Highest number of bytes that a device reads ahead, or takes without having loaded them.
const BUFFER_BYTES: u64 = 1 << 20;

/// A rate limiter that counts from the start of the transfer. The bytes of one second at the rate take one
/// second. Without requests, the device works ahead until its buffer of 1 MiB is full, and then pauses.
#[derive(Debug)]
pub struct Pace {
    bytes_per_second: u64,
    /// Time at which the last bytes were due. `None` before the first bytes.
    due: Option<Instant>,
}

impl Pace {
    /// A limiter of `bytes_per_second`; 0 for no limit.
    pub fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, due: None }
    }

    /// Starts again with an empty buffer.
    pub fn begin(&mut self) {
        self.due = None;
    }

    /// Accounts for `bytes` requested at `now`. Returns the time until which the caller must sleep before it
    /// delivers them.
    pub fn ask(&mut self, bytes: usize, now: Instant) -> Option<Instant> {
        if self.bytes_per_second == 0 || bytes == 0 {
            return None;
        }
        let takes = |bytes: u64| Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let ahead = now.checked_sub(takes(BUFFER_BYTES)).unwrap_or(now);
        let began = self.due.map_or(now, |due| due.max(ahead));
        let due = began + takes(bytes as u64);
        self.due = Some(due);
        Some(due)
    }
}

pub(super) fn sleep_until(due: Instant) {
    while let Some(left) = due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        std::thread::sleep(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 100 << 20;

    #[test]
    fn ask_of_a_stream_takes_its_time_in_all_however_late_its_reader_wakes() {
        let start = Instant::now();
        let mut pace = Pace::new(RATE);
        let mut now = start;
        for _ in 0..100 {
            let due = pace.ask(1 << 20, now).unwrap();
            // Both the end of the sleep and the next request are late.
            now = now.max(due) + Duration::from_millis(3);
        }
        let took = now - start;
        let most = Duration::from_millis(1004);
        assert!(took >= Duration::from_secs(1) && took <= most, "{took:?}");
    }

    #[test]
    fn ask_after_a_rest_finds_no_more_than_a_full_buffer() {
        let start = Instant::now();
        let mut pace = Pace::new(RATE);
        pace.ask(1000, start).unwrap();
        let later = start + Duration::from_secs(5);
        assert_eq!(pace.ask(1 << 20, later), Some(later));
        assert_eq!(pace.ask(1 << 20, later), Some(later + Duration::from_millis(10)));
    }

    #[test]
    fn ask_after_a_new_begin_finds_an_empty_buffer() {
        let start = Instant::now();
        let mut pace = Pace::new(RATE);
        pace.ask(1000, start).unwrap();
        pace.begin();
        let later = start + Duration::from_secs(5);
        assert_eq!(pace.ask(1 << 20, later), Some(later + Duration::from_millis(10)));
    }

    #[test]
    fn ask_without_a_limit_takes_no_time() {
        assert_eq!(Pace::new(0).ask(1 << 30, Instant::now()), None);
    }
}
