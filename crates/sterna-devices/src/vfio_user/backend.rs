//! The interface of a device that a [`super::Server`] serves.

use std::os::fd::OwnedFd;

use rustix::io::Errno;

use super::wire::{DeviceInfo, DmaLogRange, DmaMap, IrqInfo, IrqSet, PrecopySizes, RegionInfo};
use crate::vfio::{MigState, MigrationFeatures};

/// Why a device does not execute a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendError {
    /// The client gets this error number as the answer.
    Refused(Errno),
    /// The server closes the connection without an answer, as if its process had died.
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
    /// Address, size and permitted accesses of the region.
    pub map: DmaMap,
    /// The file that contains the region.
    pub file: OwnedFd,
}

/// A device. One thread calls its methods, one at a time.
pub trait Backend: Send + Sync {
    /// Number of regions and interrupt types, and the device's flags.
    fn info(&self) -> DeviceInfo;

    /// Describes region `index`.
    ///
    /// # Errors
    /// EINVAL if there is no such region.
    fn region_info(&self, index: u32) -> Result<RegionInfo, BackendError>;

    /// Describes interrupt type `index`.
    ///
    /// # Errors
    /// EINVAL if there is no such type.
    fn irq_info(&self, index: u32) -> Result<IrqInfo, BackendError> {
        let _ = index;
        Err(Errno::INVAL.into())
    }

    /// Connects interrupts to the eventfds in `fds`.
    ///
    /// # Errors
    /// EINVAL if there is no such type.
    fn set_irqs(&self, set: IrqSet<'_>, fds: Vec<OwnedFd>) -> Result<(), BackendError> {
        let _ = (set, fds);
        Err(Errno::INVAL.into())
    }

    /// Reads `to.len()` bytes of a region from byte `offset` on.
    ///
    /// # Errors
    /// EINVAL if there is no such region, or the range exceeds it.
    fn region_read(&self, region: u32, offset: u64, to: &mut [u8]) -> Result<(), BackendError>;

    /// Writes `from` into a region from byte `offset` on.
    ///
    /// # Errors
    /// The same as for [`Backend::region_read`].
    fn region_write(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), BackendError>;

    /// Permits the device to use a region of guest RAM.
    ///
    /// # Errors
    /// EEXIST if the region is already mapped; EINVAL if the file is too short.
    fn dma_map(&self, region: DmaRegion) -> Result<(), BackendError>;

    /// Withdraws a region of guest RAM. After the return, the device does not use it.
    ///
    /// # Errors
    /// ENOENT if there is no such region.
    fn dma_unmap(&self, address: u64, size: u64) -> Result<(), BackendError>;

    /// Withdraws all guest RAM.
    fn dma_unmap_all(&self);

    /// Resets the device to its first state.
    ///
    /// # Errors
    /// Errors of the device itself.
    fn reset(&self) -> Result<(), BackendError>;

    /// The optional migration states that the device has.
    fn features(&self) -> MigrationFeatures;

    /// The present migration state.
    fn state(&self) -> MigState;

    /// Changes the migration state along the shortest path.
    ///
    /// # Errors
    /// EINVAL if there is no path; errors of the device itself.
    fn set_state(&self, to: MigState) -> Result<(), BackendError>;

    /// Reads the next bytes of a save session. Fills all of `to`, unless fewer bytes are available.
    ///
    /// # Errors
    /// EINVAL if there is no session.
    fn read_data(&self, to: &mut [u8]) -> Result<usize, BackendError>;

    /// Writes the next bytes in RESUMING.
    ///
    /// # Errors
    /// EINVAL if the device is not in RESUMING, or the data is for another kind of device.
    fn write_data(&self, from: &[u8]) -> Result<(), BackendError>;

    /// Number of bytes to read if the device stopped now.
    ///
    /// # Errors
    /// Errors of the device itself.
    fn data_size(&self) -> Result<u64, BackendError>;

    /// Numbers of bytes that can be read while the device runs.
    ///
    /// # Errors
    /// EINVAL if the device is not in a PRE_COPY state.
    fn precopy_sizes(&self) -> Result<PrecopySizes, BackendError>;

    /// Begins to log the pages of `ranges` that the device writes.
    ///
    /// # Errors
    /// EBUSY if it already logs; EINVAL if it does not support the page size.
    fn start_logging(&self, page_size: u64, ranges: &[DmaLogRange]) -> Result<(), BackendError>;

    /// Stops logging of DMA writes. Idempotent.
    fn stop_logging(&self);

    /// Moves the logged bits of a range into `bitmap`, whose words are zero. Bit `n` is the range's page `n`.
    ///
    /// # Errors
    /// EINVAL if the device does not log, or does not log all of the range with this page size.
    fn report_logged(
        &self,
        range: DmaLogRange,
        page_size: u64,
        bitmap: &mut [u64],
    ) -> Result<(), BackendError>;
}
