//! The boot sector's words in a guest's memory: its orders and its counts. They are read in the same way from
//! QEMU and Sterna.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use sterna_interop::{GAPS, GAPS_ADDRESS, LONGEST_GAP_ADDRESS, PACE_ADDRESS, SAYS_ADDRESS, gap_ticks};

use crate::Failure;
use crate::clock::ticks_per_second;
use crate::peer::ram_of;

/// The memory file whose first byte is physical address 0.
pub struct GuestWords(File);

/// Number of times between two pages, by length.
#[derive(Debug, Clone, Default)]
pub struct Gaps(Vec<u32>);

impl GuestWords {
    /// The words of the guest in that process.
    pub fn of_process(id: u32) -> Result<Self, Failure> {
        ram_of(id)?.into_iter().next().map(Self).ok_or_else(|| "a machine without memory files".to_owned())
    }

    /// The words in that file.
    pub fn open(ram: &Path) -> Result<Self, Failure> {
        let file = OpenOptions::new().read(true).write(true).open(ram);
        file.map(Self).map_err(|error| format!("{}: {error}", ram.display()))
    }

    /// Makes the guest write `pages_per_second`, and count the times between pages.
    pub fn set_pace(&self, pages_per_second: u64) -> Result<(), Failure> {
        let ticks = u32::try_from(ticks_per_second() / pages_per_second.max(1)).unwrap_or(u32::MAX);
        self.write(PACE_ADDRESS, &ticks.to_le_bytes())
    }

    /// Makes the guest write at full speed, and count the times between pages.
    pub fn set_full_speed(&self) -> Result<(), Failure> {
        self.write(PACE_ADDRESS, &1_u32.to_le_bytes())
    }

    /// Makes the guest print with each page.
    pub fn say(&self) -> Result<(), Failure> {
        self.write(SAYS_ADDRESS, &[1])
    }

    /// Clears the counts. Content from before the guest first wrote them has no meaning.
    pub fn clear_gaps(&self) -> Result<(), Failure> {
        self.write(GAPS_ADDRESS, &[0; GAPS * 4])
    }

    /// Clears the longest time.
    pub fn clear_longest_gap(&self) -> Result<(), Failure> {
        self.write(LONGEST_GAP_ADDRESS, &[0; 4])
    }

    /// The longest time between two pages since it was cleared.
    pub fn longest_gap(&self) -> Result<Duration, Failure> {
        let mut word = [0; 4];
        self.0
            .read_exact_at(&mut word, LONGEST_GAP_ADDRESS)
            .map_err(|error| format!("guest RAM: {error}"))?;
        Ok(Duration::from_secs_f64(f64::from(u32::from_le_bytes(word)) / ticks_per_second() as f64))
    }

    /// The counts so far.
    pub fn gaps(&self) -> Result<Gaps, Failure> {
        let mut bytes = [0; GAPS * 4];
        self.0.read_exact_at(&mut bytes, GAPS_ADDRESS).map_err(|error| format!("guest RAM: {error}"))?;
        Ok(Gaps(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()))
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.0.write_all_at(bytes, address).map_err(|error| format!("guest RAM: {error}"))
    }
}

impl Gaps {
    /// The counts after `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self(self.0.iter().zip(&before.0).map(|(now, before)| now.wrapping_sub(*before)).collect())
    }

    /// The sum of both counts.
    pub fn with(&self, other: &Self) -> Self {
        let longest = self.0.len().max(other.0.len());
        let at = |gaps: &Self, index: usize| gaps.0.get(index).copied().unwrap_or_default();
        Self((0..longest).map(|index| at(self, index).wrapping_add(at(other, index))).collect())
    }

    /// The time that the given share of the `count` longest times does not exceed. The `skipped` longest of
    /// all are ignored. Interpolates between the bounds of a length, as if its times were evenly distributed.
    /// NaN if there are fewer times.
    pub fn share_of_longest(&self, skipped: u64, count: u64, share: f64) -> f64 {
        let from_top = skipped as f64 + (1.0 - share) * count as f64;
        let mut above = 0.0;
        for (index, here) in self.0.iter().enumerate().rev() {
            let here = f64::from(*here);
            if here > 0.0 && count > 0 && from_top < above + here {
                let (low, high) = (gap_ticks(index) as f64, gap_ticks(index + 1) as f64);
                let ticks = high - (high - low) * (from_top - above) / here;
                return ticks / ticks_per_second() as f64;
            }
            above += here;
        }
        f64::NAN
    }

    /// Number of pages that were written.
    pub fn pages(&self) -> u64 {
        self.0.iter().map(|count| u64::from(*count)).sum()
    }

    /// The longest time except the `others` longest; exact to a quarter.
    pub fn longest_but(&self, others: u64) -> Duration {
        let mut left = others;
        for (index, count) in self.0.iter().enumerate().rev() {
            let count = u64::from(*count);
            if count > left {
                return Duration::from_secs_f64(gap_ticks(index) as f64 / ticks_per_second() as f64);
            }
            left -= count;
        }
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_the_longest_lie_between_the_bounds_of_their_length() {
        // 1000 short times, 100 of one length, 10 of another, and one longest.
        let mut counts = vec![0; GAPS];
        (counts[40], counts[60], counts[70], counts[90]) = (1000, 100, 10, 1);
        let gaps = Gaps(counts);
        let ticks = |share| gaps.share_of_longest(1, 110, share) * ticks_per_second() as f64;
        let is_within = |ticks: f64, index| {
            (gap_ticks(index) as f64..=gap_ticks(index + 1) as f64 + 1.0).contains(&ticks)
        };

        assert!(is_within(ticks(0.5), 60), "{}", ticks(0.5));
        assert!(is_within(ticks(0.99), 70), "{}", ticks(0.99));
        assert!(ticks(0.2) < ticks(0.5) && ticks(0.5) < ticks(0.8));
        assert!(Gaps::default().share_of_longest(1, 110, 0.5).is_nan());
        assert!(gaps.share_of_longest(0, 0, 0.5).is_nan());
        assert_eq!(gaps.with(&gaps).pages(), 2 * gaps.pages());
        assert_eq!(Gaps::default().with(&gaps).pages(), 1111);
    }
}
