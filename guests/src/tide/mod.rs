//! Tide: the [`crate::model`] as a bare-metal guest. Each vCPU sweeps its share of RAM.
//!
//! A flat 64-bit image of integer instructions alone (some machines' KVM emulates each of them), position
//! independent, loaded at [`LOAD_ADDRESS`]. Every vCPU starts at its first byte in long mode with RAM
//! mapped one to one and its own index in `rdi`; nothing else is asked of the VMM: no stack, no
//! interrupts, no descriptor beyond flat code. The image holds the code in its first page and then a
//! *control page* for each vCPU ([`control`]), which is all of the guest's state besides a few registers.
//! So everything the checker needs comes over in RAM, and a control page that is lost, late or another
//! vCPU's shows like any other page.
//!
//! RAM from [`FIRST_SWEPT`] on is divided among the vCPUs, around the hole below 4 GiB. What lies below is
//! the VMM's (page tables, boot parameters) and the image.
//!
//! vCPU 0 writes `tide <steps>` to the serial port at 0x3f8 every [`TideConfig::heartbeat_ticks`] ticks of
//! the time-stamp counter.
//!
//! Pattern, working set and pace can be changed while it runs, from the host ([`Tide::set_pattern`],
//! [`Tide::set_pace`]): a request in the control page, which the guest takes over before its next step.
//! KVM's dirty log does not see such a write of the host, but the guest writes its control page with each
//! beat, so it goes out again before the guest stops.
//!
//! [`boot`] is the same in real mode, in 512 bytes.

mod blob;
pub mod boot;
mod check;
pub mod control;
mod layout;

use sterna_ram::{GuestRam, PAGE_SIZE, RamError};

pub use boot::{boot_progress, boot_sector, check_boot};
pub use check::TideProgress;
pub use layout::{RamRange, pc_ranges};

use crate::model::{Fill, PageId, Pattern, Share, WORDS_PER_PAGE};

/// Guest-physical address at which the image is loaded and entered.
pub const LOAD_ADDRESS: u64 = 1 << 20;
/// Guest-physical address of the first page that is swept.
pub const FIRST_SWEPT: u64 = 2 << 20;
/// Most vCPUs that an image serves.
pub const MOST_VCPUS: usize = 64;

/// What a tide does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TideConfig {
    /// How many vCPUs the machine has, 1 to [`MOST_VCPUS`].
    pub vcpus: usize,
    /// The order in which pages are written, at first.
    pub pattern: Pattern,
    /// Pages of each vCPU's working set at first; None: its whole share. More than the share: the share.
    pub working_set_pages: Option<u64>,
    /// Ticks of the time-stamp counter from one step to the next, at first; 0: as fast as it can.
    pub pace_ticks: u64,
    /// Ticks of the time-stamp counter between two lines on the serial port; None: silent.
    pub heartbeat_ticks: Option<u64>,
    /// Tells one guest's random patterns from another's.
    pub seed: u64,
    /// What the swept RAM holds before; [`Tide::prepare`] puts it there.
    pub fill: Fill,
}

impl Default for TideConfig {
    /// One vCPU that sweeps zero-filled RAM at full speed and prints some ten lines a second.
    fn default() -> Self {
        Self {
            vcpus: 1,
            pattern: Pattern::Sequential,
            working_set_pages: None,
            pace_ticks: 0,
            heartbeat_ticks: Some(1 << 28),
            seed: 1,
            fill: Fill::Zero,
        }
    }
}

/// Why there is no tide.
#[derive(Debug, thiserror::Error)]
pub enum TideError {
    /// The configuration or RAM's layout breaks a rule.
    #[error("tide: {0}")]
    Config(String),
    /// RAM could not be read or written.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// A tide in a machine whose RAM lies in a certain way: image, checker and remote control. Made from
/// the same values on both sides it is the same.
#[derive(Debug, Clone)]
pub struct Tide {
    config: TideConfig,
    ranges: Vec<RamRange>,
    shares: Vec<Share>,
}

impl Tide {
    /// # Errors
    /// [`TideError::Config`]: the vCPUs' number, an empty working set, or RAM in more than two ranges, with
    /// no room for the image below [`FIRST_SWEPT`], or without a page for each vCPU above.
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

    /// Puts the fill into RAM, before the guest's first step. RAM must read as zero.
    ///
    /// # Errors
    /// [`TideError::Ram`].
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

    /// Loads the image into RAM, for machines that have no loader of their own.
    ///
    /// # Errors
    /// [`TideError::Ram`].
    pub fn load(&self, ram: &GuestRam) -> Result<(), TideError> {
        let (block, offset) = self.locate(LOAD_ADDRESS);
        Ok(ram.blocks()[block].write(offset, &self.image())?)
    }

    /// What the tide does.
    pub fn config(&self) -> &TideConfig {
        &self.config
    }

    /// The pages of each vCPU.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// The code, as a whole page.
    fn code(&self) -> Vec<u8> {
        let mut code = blob::flat().to_vec();
        code.resize(PAGE_SIZE, 0);
        code
    }

    /// Block and offset of a guest-physical address in the first range or second range.
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
