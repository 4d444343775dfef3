//! Tide: the [`crate::model`] as a bare-metal guest. Each vCPU sweeps its share of RAM.
//!
//! The image is flat, position independent 64-bit code, loaded at [`LOAD_ADDRESS`]. It consists of integer
//! instructions only, because some machines' KVM emulates each instruction. Every vCPU starts at the first
//! byte in long mode, with RAM mapped one to one and its own index in `rdi`. The guest needs nothing else
//! from the VMM: no stack, no interrupts, no descriptors except flat code.
//!
//! The first page of the image contains the code. A *control page* for each vCPU ([`control`]) follows. The
//! control pages and a few registers are the whole state of the guest. So RAM contains everything that the
//! checker needs, and the check detects a lost, late or misplaced control page like any other page.
//!
//! RAM from [`FIRST_SWEPT`] on is divided among the vCPUs, around the hole below 4 GiB. RAM below that
//! address contains the VMM's data (page tables, boot parameters) and the image.
//!
//! vCPU 0 writes `tide <steps>` to the serial port at 0x3f8 every [`TideConfig::heartbeat_ticks`] ticks of
//! the time-stamp counter.
//!
//! The host can change pattern, working set and pace while the guest runs ([`Tide::set_pattern`],
//! [`Tide::set_pace`]). It writes a request into the control page, which the guest adopts before its next
//! step. KVM's dirty log does not see this write of the host. The guest itself writes its control page with
//! each beat, so the page is sent again before the guest stops.
//!
//! [`boot`] is the same guest in real mode, in 512 bytes.

mod blob;
pub mod boot;
mod check;
pub mod control;
mod layout;

use sterna_ram::{GuestRam, PAGE_SIZE, RamError};

pub use boot::{boot_progress, boot_sector, check_boot};
pub use check::TideProgress;
pub use layout::{RamRange, pc_ranges};

use crate::model::{Acts, Fill, PageId, Pattern, Share, WORDS_PER_PAGE};

/// Guest-physical address at which the image is loaded and entered.
pub const LOAD_ADDRESS: u64 = 1 << 20;
/// Guest-physical address of the first page that is swept.
pub const FIRST_SWEPT: u64 = 2 << 20;
/// Largest number of vCPUs that an image supports.
pub const MOST_VCPUS: usize = 64;

/// The configuration of a tide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TideConfig {
    /// Number of vCPUs of the machine, 1 to [`MOST_VCPUS`].
    pub vcpus: usize,
    /// The first pattern: the order in which pages are written.
    pub pattern: Pattern,
    /// Pages of each vCPU's first working set, at most its share. `None`: its whole share.
    pub working_set_pages: Option<u64>,
    /// Ticks of the time-stamp counter between two steps, at first; 0 means full speed.
    pub pace_ticks: u64,
    /// Ticks of the time-stamp counter between two lines on the serial port; `None`: no lines.
    pub heartbeat_ticks: Option<u64>,
    /// Number of steps of 256 that store zeros instead of words, 0 to 192.
    ///
    /// They zero the whole page ([`crate::model::Act::Zero`]).
    pub zero_of_256: u8,
    /// Seed of the random patterns, which differ between guests with different seeds.
    pub seed: u64,
    /// Content of the swept RAM before the first step; [`Tide::prepare`] writes it.
    pub fill: Fill,
}

impl Default for TideConfig {
    /// One vCPU that sweeps zero-filled RAM at full speed and prints some ten lines per second.
    fn default() -> Self {
        Self {
            vcpus: 1,
            pattern: Pattern::Sequential,
            working_set_pages: None,
            pace_ticks: 0,
            heartbeat_ticks: Some(1 << 28),
            zero_of_256: 0,
            seed: 1,
            fill: Fill::Zero,
        }
    }
}

impl TideConfig {
    /// The steps that zero pages. A bare-metal guest has no balloon.
    pub(crate) fn acts(&self) -> Acts {
        Acts::new(self.zero_of_256, 0, 0).unwrap_or_default()
    }
}

/// The reason why a tide cannot be created or accessed.
#[derive(Debug, thiserror::Error)]
pub enum TideError {
    /// The configuration or RAM's layout breaks a rule.
    #[error("tide: {0}")]
    Config(String),
    /// RAM could not be read or written.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// A tide for a machine with a certain RAM layout: image, checker and remote control.
///
/// Both sides of a migration create the same tide from the same values.
#[derive(Debug, Clone)]
pub struct Tide {
    config: TideConfig,
    ranges: Vec<RamRange>,
    shares: Vec<Share>,
}

impl Tide {
    /// Creates a tide for a machine with this RAM.
    ///
    /// # Errors
    /// [`TideError::Config`] in these cases:
    /// - the number of vCPUs is out of range;
    /// - the working set is empty;
    /// - too many steps store zeros;
    /// - RAM has more than two ranges, no space for the image below [`FIRST_SWEPT`], or less than one page
    ///   for each vCPU above it.
    pub fn new(config: TideConfig, ranges: &[RamRange]) -> Result<Self, TideError> {
        let shares = layout::shares(&config, ranges)?;
        Ok(Self { config, ranges: ranges.to_vec(), shares })
    }

    /// The flat image, to be loaded at [`LOAD_ADDRESS`].
    pub fn image(&self) -> Vec<u8> {
        let mut image = self.code();
        for worker in 0..self.shares.len() {
            image.extend(control::page(self, worker).iter().flat_map(|word| word.to_le_bytes()));
        }
        image
    }

    /// Writes the fill into RAM, before the guest's first step. RAM must read as zero.
    ///
    /// # Errors
    /// [`TideError::Ram`] if RAM could not be written.
    pub fn prepare(&self, ram: &GuestRam) -> Result<(), TideError> {
        for (worker, share) in self.shares.iter().enumerate() {
            for page in 0..share.pages() {
                let id = PageId::new(worker, page);
                let Some((block, block_page)) = share.locate(page).filter(|_| !self.config.fill.is_zero(id))
                else {
                    continue;
                };
                let mut words = [0; WORDS_PER_PAGE];
                self.config.fill.put(id, &mut words);
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                ram.blocks()[block].write(block_page * PAGE_SIZE as u64, &bytes)?;
            }
        }
        Ok(())
    }

    /// Loads the image into RAM, for machines without a loader of their own.
    ///
    /// # Errors
    /// [`TideError::Ram`] if RAM could not be written.
    pub fn load(&self, ram: &GuestRam) -> Result<(), TideError> {
        let (block, offset) = self.locate(LOAD_ADDRESS);
        Ok(ram.blocks()[block].write(offset, &self.image())?)
    }

    /// The configuration from which the tide was created.
    pub fn config(&self) -> &TideConfig {
        &self.config
    }

    /// The pages of each vCPU, by its index.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// The code, padded to a whole page.
    fn code(&self) -> Vec<u8> {
        let mut code = blob::flat().to_vec();
        code.resize(PAGE_SIZE, 0);
        code
    }

    /// Block and offset of a guest-physical address in one of the two ranges.
    fn locate(&self, address: u64) -> (usize, u64) {
        let range =
            self.ranges.iter().rev().find(|range| range.guest_address <= address).unwrap_or(&self.ranges[0]);
        (range.block, address - range.guest_address)
    }

    /// Block and offset of a word in a vCPU's control page.
    fn control_word(&self, worker: usize, index: usize) -> (usize, u64) {
        self.locate(LOAD_ADDRESS + (PAGE_SIZE * (1 + worker) + index * 8) as u64)
    }
}
