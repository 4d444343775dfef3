//! The boot sector's words in a guest's memory, read alike from QEMU and Sterna: what it is asked for and what it did.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use sterna_benches::clock::ticks_per_second;
use sterna_interop::{GAPS, GAPS_ADDRESS, Guest, PACE_ADDRESS, SAYS_ADDRESS, gap_ticks};

use crate::Failure;
use crate::plan::Load;

/// The memory whose first byte is physical address 0.
pub(crate) struct GuestWords(File);

/// How often there was a time of each length between two pages.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gaps(Vec<u32>);

/// The guest that makes such a load.
pub(crate) fn writer(load: Load) -> Guest {
    match load {
        Load::Upload | Load::Sparse => Guest::Ring,
        _ => Guest::Scattered,
    }
}

impl GuestWords {
    pub(crate) fn new(ram: File) -> Self {
        Self(ram)
    }

    pub(crate) fn open(ram: &Path) -> Result<Self, Failure> {
        let file = OpenOptions::new().read(true).write(true).open(ram);
        file.map(Self).map_err(|error| format!("{}: {error}", ram.display()))
    }

    pub(crate) fn set_pace(&self, pages_per_second: u64) -> Result<(), Failure> {
        let ticks = u32::try_from(ticks_per_second() / pages_per_second.max(1)).unwrap_or(u32::MAX);
        self.write(PACE_ADDRESS, &ticks.to_le_bytes())
    }

    /// It says something with each page.
    pub(crate) fn say(&self) -> Result<(), Failure> {
        self.write(SAYS_ADDRESS, &[1])
    }

    /// What was there before the guest wrote to it means nothing.
    pub(crate) fn clear_gaps(&self) -> Result<(), Failure> {
        self.write(GAPS_ADDRESS, &[0; GAPS * 4])
    }

    pub(crate) fn gaps(&self) -> Result<Gaps, Failure> {
        let mut bytes = [0; GAPS * 4];
        self.0.read_exact_at(&mut bytes, GAPS_ADDRESS).map_err(|error| format!("guest RAM: {error}"))?;
        Ok(Gaps(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()))
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.0.write_all_at(bytes, address).map_err(|error| format!("guest RAM: {error}"))
    }
}

impl Gaps {
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self(self.0.iter().zip(&before.0).map(|(now, before)| now.wrapping_sub(*before)).collect())
    }

    /// Pages that were written.
    pub(crate) fn pages(&self) -> u64 {
        self.0.iter().map(|count| u64::from(*count)).sum()
    }

    /// The longest but so many, which is exact to a quarter.
    pub(crate) fn longest_but(&self, others: u64) -> Duration {
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
