//! What the port asks of the system.

use rustix::io::Errno;

/// The system calls of a [`super::KernelPort`]: those that can be on one VFIO device. Arguments are the uAPI's
/// structures, byte for byte, so that a record of a real device's calls can stand in for it.
pub trait Calls: Send + Sync {
    /// The data descriptor of a session. Closed when dropped.
    type Data: Send;

    /// VFIO_DEVICE_FEATURE with a `struct vfio_device_feature` and its data, which the answer overwrites. A feature
    /// with an address in its data gets that of `pointed`, whatever stands there. Gives the data descriptor that
    /// came with a new state.
    ///
    /// # Errors
    /// The kernel's; EINVAL also for what it cannot be asked safely: an unknown feature, sizes that do not fit.
    fn feature(&self, argument: &mut [u8], pointed: &mut [u64]) -> Result<Option<Self::Data>, Errno>;

    /// VFIO_DEVICE_RESET.
    ///
    /// # Errors
    /// The kernel's.
    fn reset(&self) -> Result<(), Errno>;

    /// VFIO_MIG_GET_PRECOPY_INFO with a `struct vfio_precopy_info`, which the answer overwrites.
    ///
    /// # Errors
    /// The kernel's.
    fn precopy_info(&self, data: &Self::Data, argument: &mut [u8; 24]) -> Result<(), Errno>;

    /// read(2).
    ///
    /// # Errors
    /// The kernel's.
    fn read(&self, data: &Self::Data, to: &mut [u8]) -> Result<usize, Errno>;

    /// write(2).
    ///
    /// # Errors
    /// The kernel's.
    fn write(&self, data: &Self::Data, from: &[u8]) -> Result<usize, Errno>;
}
