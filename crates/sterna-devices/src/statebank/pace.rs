//! Lets bytes through at a rate.

use std::time::{Duration, Instant};

/// Bytes that a device has read ahead, or taken in without having loaded them, at most.
const BUFFER_BYTES: u64 = 1 << 20;

/// A rate that is kept to: what takes a second at the rate takes a second from when it was begun. While nobody asks, the
/// device works on for as long as its buffer of 1 MiB lasts, and then rests.
#[derive(Debug)]
pub struct Pace {
    bytes_per_second: u64,
    /// When the last bytes were, or should have been, through; none before the first.
    due: Option<Instant>,
}

impl Pace {
    /// So many bytes per second; 0: without limit.
    pub fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, due: None }
    }

    /// Begins anew, with an empty buffer.
    pub fn begin(&mut self) {
        self.due = None;
    }

    /// `bytes` are asked for at `now`: until when to sleep, before they are given.
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

/// Sleeps until then.
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
            // The sleep ends late, and the next is asked for even later.
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
