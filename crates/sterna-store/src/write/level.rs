//! Chooses zstd's level while an image is written, so that neither the disk nor the processors wait. Pure: no clock.
//!
//! Each frame tells how long its thread worked, and how long it waited: for the disk, or for the next pages. Threads that
//! wait have time for a higher level, which gives the disk less to do. Threads that never wait are the bottleneck, and get a
//! lower level.

use std::time::Duration;

/// zstd's levels, from the fastest to those that rarely pay.
pub(super) const LADDER: [i32; 13] = [-5, -3, -1, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15];
/// Frames after which the level is judged.
const FRAMES: u32 = 64;
/// Time of all threads together after which the level is judged.
const TIME: Duration = Duration::from_millis(100);
/// Stored bytes after which the level is judged: a pack, and what a file may have before the disk. Threads wait for all of them
/// together, so that a shorter time would see waits only, or none.
const STORED_BYTES: u64 = 32 << 20;
/// Shares of waiting, in percent, between which the level stays.
const STAYS: std::ops::RangeInclusive<u128> = 5..=15;
/// The share of waiting, in percent, from which a step is three levels.
const FAR: u128 = 50;
/// The share of frames that compression does not shorten, in percent, from which a higher level helps nothing.
const INCOMPRESSIBLE: u32 = 90;
/// Most judgements for which a level that was too high is not tried again.
const LONGEST_HOLD: u32 = 64;

/// The level of an image that is being written.
pub(super) struct Chooser {
    step: usize,
    worked: Duration,
    waited: Duration,
    frames: u32,
    raw_frames: u32,
    stored_bytes: u64,
    /// Whether the last change was a step up.
    was_up: bool,
    /// Judgements until the next step up, and how many there are after the next step that was too high.
    hold: u32,
    next_hold: u32,
}

impl Chooser {
    /// Starts at the highest level of the ladder that is not above `level`.
    pub(super) fn new(level: i32) -> Self {
        let step = LADDER.iter().rposition(|rung| *rung <= level).unwrap_or(0);
        let (worked, waited) = (Duration::ZERO, Duration::ZERO);
        let (frames, raw_frames, stored_bytes) = (0, 0, 0);
        Self { step, worked, waited, frames, raw_frames, stored_bytes, was_up: false, hold: 0, next_hold: 1 }
    }

    /// The level for the next frame.
    pub(super) fn level(&self) -> i32 {
        LADDER[self.step]
    }

    /// Notes the times of one frame, its stored bytes, and whether compression did not shorten it.
    pub(super) fn note(&mut self, worked: Duration, waited: Duration, stored_bytes: u64, is_raw: bool) {
        self.stored_bytes += stored_bytes;
        self.worked += worked;
        self.waited += waited;
        self.frames += 1;
        self.raw_frames += u32::from(is_raw);
        let is_due = self.frames >= FRAMES && self.stored_bytes >= STORED_BYTES;
        if is_due && self.worked + self.waited >= TIME {
            self.judge();
            (self.worked, self.waited) = (Duration::ZERO, Duration::ZERO);
            (self.frames, self.raw_frames, self.stored_bytes) = (0, 0, 0);
        }
    }

    fn judge(&mut self) {
        let all = (self.worked + self.waited).as_nanos().max(1);
        let share = self.waited.as_nanos() * 100 / all;
        if share < *STAYS.start() {
            // The last step was too high. The same step is not repeated soon, so that the level does not swing.
            if self.was_up {
                self.hold = self.next_hold;
                self.next_hold = (self.next_hold * 2).min(LONGEST_HOLD);
            }
            self.was_up = false;
            self.step = self.step.saturating_sub(1);
        } else if share > *STAYS.end() && self.raw_frames * 100 < self.frames * INCOMPRESSIBLE {
            match self.hold {
                0 => {
                    // Far from the balance the steps are long.
                    let steps = if share > FAR { 3 } else { 1 };
                    self.was_up = self.step + 1 < LADDER.len();
                    self.step = (self.step + steps).min(LADDER.len() - 1);
                }
                _ => self.hold -= 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a frame's pages.
    const FRAME: u64 = 64 << 10;
    const THREADS: usize = 2;

    /// Rates of compression in bytes per second, and the stored part of the pages: shaped like zstd's.
    fn cost(step: usize) -> (f64, f64) {
        let rates = [900e6, 800e6, 650e6, 450e6, 350e6, 220e6, 180e6, 110e6, 80e6, 60e6, 35e6, 18e6, 8e6];
        let parts = [0.52, 0.48, 0.45, 0.40, 0.385, 0.375, 0.37, 0.36, 0.355, 0.35, 0.345, 0.34, 0.335];
        (rates[step], parts[step])
    }

    /// Two threads fill packs while the disk, which takes `rate_at` bytes per second at a time, takes the pack before.
    /// Returns the bytes of RAM after `seconds`, and the step at the end. A fixed step makes no choice.
    fn simulate(seconds: f64, rate_at: impl Fn(f64) -> f64, fixed: Option<usize>) -> (u64, usize) {
        let mut chooser = Chooser::new(1);
        let mut clocks = [0.0f64; THREADS];
        // The time until which the disk is busy, the time until which no thread can append, and the bytes of the pack.
        let (mut busy_until, mut blocked_until, mut filled, mut bytes) = (0.0f64, 0.0f64, 0.0, 0);
        loop {
            let thread = (0..THREADS).min_by(|a, b| clocks[*a].total_cmp(&clocks[*b])).unwrap();
            let step = fixed.unwrap_or(chooser.step);
            let (rate, part) = cost(step);
            let worked = FRAME as f64 / rate;
            let packed = clocks[thread] + worked;
            let mut stored = packed.max(blocked_until);
            filled += FRAME as f64 * part;
            if filled >= STORED_BYTES as f64 {
                stored = stored.max(busy_until);
                blocked_until = stored;
                busy_until = stored + filled / rate_at(stored);
                filled = 0.0;
            }
            clocks[thread] = stored;
            if stored > seconds {
                return (bytes, step);
            }
            bytes += FRAME;
            let time = Duration::from_secs_f64;
            chooser.note(time(worked), time(stored - packed), (FRAME as f64 * part) as u64, false);
        }
    }

    #[test]
    fn level_comes_close_to_the_best_fixed_one_on_disks_of_every_speed() {
        for disk in [5e6, 20e6, 60e6, 150e6, 400e6, 2e9, 20e9] {
            let seconds = 20.0 + 60.0 * STORED_BYTES as f64 / disk;
            let of = |fixed| simulate(seconds, |_| disk, fixed);
            let best = (0..LADDER.len()).map(|step| of(Some(step)).0).max().unwrap();

            let (bytes, step) = of(None);

            assert!(bytes as f64 >= 0.9 * best as f64, "{disk}: {bytes} of {best}, at {}", LADDER[step]);
        }
    }

    #[test]
    fn level_falls_to_the_fastest_on_a_fast_disk_and_rises_on_a_slow_one() {
        assert_eq!(simulate(30.0, |_| 20e9, None).1, 0);
        assert!(simulate(300.0, |_| 5e6, None).1 >= LADDER.len() - 3);
    }

    #[test]
    fn level_follows_a_disk_that_becomes_slow_and_fast_again() {
        let step =
            |seconds| simulate(seconds, |now| if (20.0..120.0).contains(&now) { 20e6 } else { 5e9 }, None).1;

        let (before, between, after) = (step(19.0), step(119.0), step(160.0));

        assert!(before + 3 < between && after + 3 < between, "{before} {between} {after}");
    }

    #[test]
    fn incompressible_pages_do_not_raise_the_level() {
        let mut chooser = Chooser::new(1);
        for _ in 0..10_000 {
            chooser.note(Duration::from_micros(100), Duration::from_millis(10), FRAME, true);
        }
        assert_eq!(chooser.level(), 1);
    }
}
