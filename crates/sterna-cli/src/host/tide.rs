//! Tide in the KVM machine: the host reads the guest's counters from its RAM.

use sterna::ram::GuestRam;
use sterna_guests::Verdict;
use sterna_guests::tide::boot::{boot_progress, check_boot};
use sterna_guests::tide::{RamRange, Tide, TideConfig, TideProgress};
use sterna_vmm::KvmMachine;
use sterna_vmm::layout::BOOT_PARAMETERS;

use super::config::Config;
use super::machine::{Guest, GuestProgress};
use crate::units::PAGE_BYTES;

/// Offset of the time-stamp counter's frequency, in kHz, in the boot-parameter page ([`sterna_vmm::layout`]).
const TSC_KHZ: u64 = 24;

/// The flat guest, with 1 to 8 vCPUs.
pub struct TideGuest {
    tide: Tide,
    ram: GuestRam,
}

impl TideGuest {
    /// The tide of `config`. Both sides get the same, because the rate is set later.
    pub fn plan(config: &Config) -> Result<Tide, String> {
        let vcpus = usize::from(config.machine.vcpus);
        let pages = |bytes: u64| (bytes / PAGE_BYTES / vcpus as u64).max(1);
        let plan = TideConfig {
            vcpus,
            pattern: config.load.pattern,
            working_set_pages: config.load.working_set_bytes.map(pages),
            fill: config.load.fill,
            ..TideConfig::default()
        };
        let ranges: Vec<RamRange> = sterna_vmm::layout::ranges(config.machine.ram_bytes)
            .iter()
            .map(|range| RamRange {
                block: range.block,
                guest_address: range.start,
                len_bytes: range.len_bytes,
            })
            .collect();
        Tide::new(plan, &ranges).map_err(|error| error.to_string())
    }

    /// The guest in `machine`.
    ///
    /// A guest that boots there gets its fill and `rate` here, before it runs. `rate` is `None` for a guest that arrives.
    pub fn new(tide: Tide, machine: &KvmMachine, rate: Option<u64>) -> Result<Self, String> {
        let guest = Self { tide, ram: machine.ram().clone() };
        if let Some(rate) = rate {
            guest.tide.prepare(&guest.ram).map_err(|error| error.to_string())?;
            guest.set_rate(rate)?;
        }
        Ok(guest)
    }

    fn ticks_per_second(&self) -> Result<u64, String> {
        ticks_per_second(&self.ram)
    }
}

impl Guest for TideGuest {
    fn check(&self) -> Result<Verdict, String> {
        self.tide.check(&self.ram).map_err(|error| error.to_string())
    }

    fn progress(&self) -> Result<GuestProgress, String> {
        let progress = self.tide.progress(&self.ram).map_err(|error| error.to_string())?;
        progress_of(progress, self.ticks_per_second()?)
    }

    fn set_rate(&self, pages_per_second: u64) -> Result<(), String> {
        let ticks = match pages_per_second {
            0 => 0,
            rate => (self.ticks_per_second()? / rate).max(1),
        };
        self.tide.set_pace(&self.ram, ticks).map_err(|error| error.to_string())
    }

    fn reset_gap(&self) -> Result<(), String> {
        self.tide.reset_max_gap(&self.ram).map_err(|error| error.to_string())
    }
}

/// Tide as 512 bytes of real mode code, on one vCPU, over 512 KiB of RAM.
pub struct BootTide {
    ram: GuestRam,
}

impl BootTide {
    /// The boot sector's guest in `machine`.
    pub fn new(machine: &KvmMachine) -> Self {
        Self { ram: machine.ram().clone() }
    }
}

impl Guest for BootTide {
    fn check(&self) -> Result<Verdict, String> {
        check_boot(&self.ram, 0).map_err(|error| error.to_string())
    }

    fn progress(&self) -> Result<GuestProgress, String> {
        let progress = boot_progress(&self.ram, 0).map_err(|error| error.to_string())?;
        // In real mode there is no boot-parameter page with the counter's frequency, so the gap cannot be
        // converted to seconds.
        Ok(GuestProgress { steps: progress.steps, beats: progress.beats, ..GuestProgress::default() })
    }

    fn set_rate(&self, pages_per_second: u64) -> Result<(), String> {
        if pages_per_second == 0 {
            Ok(())
        } else {
            Err("the boot-sector guest has a fixed speed; use `--rate 0`".into())
        }
    }

    fn reset_gap(&self) -> Result<(), String> {
        Ok(())
    }
}

fn ticks_per_second(ram: &GuestRam) -> Result<u64, String> {
    let khz = ram.block(0).read_u64(BOOT_PARAMETERS + TSC_KHZ).map_err(|error| error.to_string())?;
    match khz {
        1_000..=100_000_000 => Ok(khz * 1000),
        _ => Err(format!("the boot-parameter page contains {khz} kHz: the guest is missing or damaged")),
    }
}

fn progress_of(progress: TideProgress, ticks_per_second: u64) -> Result<GuestProgress, String> {
    if progress.clock_went_back > 0 {
        return Err(format!("the guest's clock went backwards {} times", progress.clock_went_back));
    }
    let longest = progress.max_gap_ticks as f64 / ticks_per_second as f64;
    Ok(GuestProgress {
        steps: progress.steps,
        beats: progress.beats,
        longest_gap_seconds: Some(longest),
        pages_per_second: None,
    })
}
