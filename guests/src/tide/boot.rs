//! Tide as a boot sector: real mode, 512 bytes, one vCPU.
//!
//! It sweeps [`PAGES`] pages from [`FIRST_SWEPT`] on, in sequence, with the same words as the flat guest, and
//! keeps the words [`control::STEPS`], `BEATS`, `MAX_GAP`, `LAST_BEAT` and `CLOCK_WENT_BACK` of a control
//! page at [`CONTROL_ADDRESS`]. RAM must read as zero at the start. It prints `tide <steps>` to the serial
//! port at 0x3f8 every [`LINE_STEPS`] steps (their low 32 bits). A stop between the two halves of the
//! counter just as its low one overflows, once in 2³² steps, would look like corruption.

use sterna_ram::{GuestRam, PAGE_SIZE, RamError};

use super::{TideProgress, blob, control};
use crate::checker::{CheckError, Cut, InFlight, Verdict, WorkerCut, check};
use crate::model::{Fill, History, Pattern, Segment, Share, WordPlan};

/// Where the sector is loaded and entered, with any segments.
pub const LOAD_ADDRESS: u64 = 0x7c00;
/// Physical address of the control page.
pub const CONTROL_ADDRESS: u64 = 0x8000;
/// Physical address of the first page that is swept.
pub const FIRST_SWEPT: u64 = 0x1_0000;
/// Pages that are swept: 512 KiB, up to 0x9_0000.
pub const PAGES: u64 = 128;
/// Steps from line to line.
pub const LINE_STEPS: u64 = 4096;

/// Word of the control page: steps times their factor.
pub(super) const STEP_SUM: usize = 36;
/// Word of the control page: the page's number times its factor.
pub(super) const PAGE_SUM: usize = 37;
/// Word of the control page: the page's number.
pub(super) const PAGE: usize = 38;

/// The sector, with its signature.
pub fn boot_sector() -> [u8; 512] {
    let mut sector = [0; 512];
    let code = blob::boot();
    assert!(code.len() <= 510, "the boot sector's code was built too long");
    sector[..code.len()].copy_from_slice(code);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// Checks that RAM is one consistent cut of the boot sector's. `block` is the block that begins at
/// physical address 0. The guest must stand still.
///
/// # Errors
/// [`CheckError::Ram`].
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
    check(ram, &Cut { plan: WordPlan::TIDE, fill: Fill::Zero, workers: vec![worker] })
}

/// How far it has come; also while it runs.
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
