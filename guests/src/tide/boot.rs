//! Tide as a boot sector: real mode, 512 bytes, one vCPU.
//!
//! The guest sweeps [`PAGES`] pages from [`FIRST_SWEPT`] on, in sequence, with the same words as the flat
//! guest. It maintains the words [`control::STEPS`], `BEATS`, `MAX_GAP`, `LAST_BEAT` and `CLOCK_WENT_BACK`
//! of a control page at [`CONTROL_ADDRESS`]. RAM must read as zero at the start. It prints `tide <steps>`
//! to the serial port at 0x3f8 every [`LINE_STEPS`] steps (their low 32 bits).
//!
//! Known limit: the guest updates its step counter in two halves. A stop between them when the low half
//! overflows, once in 2³² steps, would look like corruption.

use sterna_ram::{GuestRam, PAGE_SIZE, RamError};

use super::{TideProgress, blob, control};
use crate::checker::{CheckError, Cut, InFlight, Verdict, WorkerCut, check};
use crate::model::{Acts, Fill, History, Pattern, Segment, Share, WordPlan};

/// Address at which the sector is loaded and entered, with any segments.
pub const LOAD_ADDRESS: u64 = 0x7c00;
/// Physical address of the control page.
pub const CONTROL_ADDRESS: u64 = 0x8000;
/// Physical address of the first page that is swept.
pub const FIRST_SWEPT: u64 = 0x1_0000;
/// Number of swept pages: 512 KiB, up to 0x9_0000.
pub const PAGES: u64 = 128;
/// Number of steps between two lines.
pub const LINE_STEPS: u64 = 4096;

/// Index of the control page's word for steps times their factor.
pub(super) const STEP_SUM: usize = 36;
/// Index of the control page's word for the page's number times its factor.
pub(super) const PAGE_SUM: usize = 37;
/// Index of the control page's word for the page's number.
pub(super) const PAGE: usize = 38;

/// The boot sector, including its signature.
pub fn boot_sector() -> [u8; 512] {
    let mut sector = [0; 512];
    let code = blob::boot();
    assert!(code.len() <= 510, "the boot sector's code was built too long");
    sector[..code.len()].copy_from_slice(code);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// Checks that RAM is one consistent cut of the boot sector's guest, which must be paused.
///
/// `block` is the block that begins at physical address 0.
///
/// # Errors
/// [`CheckError::Ram`] if RAM could not be read.
pub fn check_boot(ram: &GuestRam, block: usize) -> Result<Verdict, CheckError> {
    let segment = Segment { block, first_page: FIRST_SWEPT / PAGE_SIZE as u64, pages: PAGES };
    let worker = WorkerCut {
        share: Share::new(vec![segment]),
        steps: word(ram, block, control::STEPS)?,
        in_flight: InFlight::UnknownHalves,
        history: History::new(Pattern::Sequential, PAGES),
        seed: 0,
        witness: None,
    };
    let cut = Cut { plan: WordPlan::TIDE, fill: Fill::Zero, acts: Acts::WRITES, workers: vec![worker] };
    check(ram, &cut)
}

/// The guest's progress; also while it runs.
///
/// # Errors
/// RAM could not be read.
pub fn boot_progress(ram: &GuestRam, block: usize) -> Result<TideProgress, RamError> {
    Ok(TideProgress {
        steps: vec![word(ram, block, control::STEPS)?],
        beats: vec![word(ram, block, control::BEATS)?],
        max_gap_ticks: word(ram, block, control::MAX_GAP)?,
        clock_went_back: word(ram, block, control::CLOCK_WENT_BACK)?,
        refused: 0,
    })
}

fn word(ram: &GuestRam, block: usize, index: usize) -> Result<u64, RamError> {
    ram.blocks()[block].read_u64(CONTROL_ADDRESS + index as u64 * 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_sector_ends_with_its_signature() {
        let sector = boot_sector();
        assert_eq!(sector[510..], [0x55, 0xaa]);
        assert_eq!(sector[0], 0xfa, "it begins with cli");
    }

    #[test]
    fn flat_code_fits_its_page() {
        let len = blob::flat().len();
        assert!((100..PAGE_SIZE).contains(&len), "{len}");
    }
}
