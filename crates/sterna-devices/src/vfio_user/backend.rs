//! What a device behind a [`super::Server`] is.

use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::wire::{DeviceInfo, DmaLogRange, DmaMap, IrqInfo, IrqSet, PrecopySizes, RegionInfo};
use crate::vfio::{MigState, MigrationFeatures};

/// Why a device does not do what it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendError {
    /// The client is told so.
    Refused(Errno),
    /// The connection is closed without an answer, as if the process had died.
    HangUp,
}

impl From<Errno> for BackendError {
    fn from(errno: Errno) -> Self {
        BackendError::Refused(errno)
    }
}

/// A region of guest RAM that the client lets the device use.
#[derive(Debug)]
pub struct DmaRegion {
    /// Where it is and what is allowed.
    pub map: DmaMap,
    /// The file that has it.
    pub file: OwnedFd,
}

/// A device. Calls come from one thread, one at a time.
pub trait Backend: Send + Sync {
    /// What it is.
    fn info(&self) -> DeviceInfo;

    /// What region `index` is.
    ///
    /// # Errors
    /// EINVAL: there is no such region.
    fn region_info(&self, index: u32) -> Result<RegionInfo, BackendError>;

    /// What interrupt type `index` is.
    ///
    /// # Errors
    /// EINVAL: there is no such type.
    fn irq_info(&self, index: u32) -> Result<IrqInfo, BackendError> {
        let _ = index;
        Err(Errno::INVAL.into())
    }

    /// Connects interrupts to the events in `fds`.
    ///
    /// # Errors
    /// EINVAL: there is no such type.
    fn set_irqs(&self, set: IrqSet<'_>, fds: Vec<OwnedFd>) -> Result<(), BackendError> {
        let _ = (set, fds);
        Err(Errno::INVAL.into())
    }

    /// Reads a region.
    ///
    /// # Errors
    /// EINVAL: there is no such region, or the range is not in it.
    fn region_read(&self, region: u32, offset: u64, to: &mut [u8]) -> Result<(), BackendError>;

    /// Writes a region.
    ///
    /// # Errors
    /// As [`Backend::region_read`].
    fn region_write(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), BackendError>;

    /// May use a region of guest RAM.
    ///
    /// # Errors
    /// EEXIST: there is one already; EINVAL: the file does not have so many bytes.
    fn dma_map(&self, region: DmaRegion) -> Result<(), BackendError>;

    /// May use it no longer; on return it does not.
    ///
    /// # Errors
    /// ENOENT: there is no such region.
    fn dma_unmap(&self, address: u64, size: u64) -> Result<(), BackendError>;

    /// May use no guest RAM any more.
    fn dma_unmap_all(&self);

    /// Back to the first state.
    ///
    /// # Errors
    /// The device's own.
    fn reset(&self) -> Result<(), BackendError>;

    /// Which migration states it has.
    fn features(&self) -> MigrationFeatures;

    /// The state that it is in.
    fn state(&self) -> MigState;

    /// Goes to a state, along the shortest way.
    ///
    /// # Errors
    /// EINVAL: there is no way; or the device's own.
    fn set_state(&self, to: MigState) -> Result<(), BackendError>;

    /// Reads on in a save session; fills all of `to` unless nothing more is there.
    ///
    /// # Errors
    /// EINVAL: there is no session.
    fn read_data(&self, to: &mut [u8]) -> Result<usize, BackendError>;

    /// Writes on in RESUMING.
    ///
    /// # Errors
    /// EINVAL: it is not in RESUMING, or the data is not of a device like this.
    fn write_data(&self, from: &[u8]) -> Result<(), BackendError>;

    /// How much would be read if it stopped now.
    ///
    /// # Errors
    /// The device's own.
    fn data_size(&self) -> Result<u64, BackendError>;

    /// What can be read while it runs.
    ///
    /// # Errors
    /// EINVAL: it is not in a PRE_COPY state.
    fn precopy_sizes(&self) -> Result<PrecopySizes, BackendError>;

    /// Logs which pages of `ranges` it writes.
    ///
    /// # Errors
    /// EBUSY: it does so already; EINVAL: it has no pages of that size.
    fn start_logging(&self, page_size: u64, ranges: &[DmaLogRange]) -> Result<(), BackendError>;

    /// Logs no more. Idempotent.
    fn stop_logging(&self);

    /// Moves what was logged of a range into `bitmap`, whose words are clear: bit `n` is the range's page `n`.
    ///
    /// # Errors
    /// EINVAL: it does not log, or not all of that range with pages of that size.
    fn report_logged(
        &self,
        range: DmaLogRange,
        page_size: u64,
        bitmap: &mut [u64],
    ) -> Result<(), BackendError>;
}
