//! The system calls that the kernel's port needs, as a trait that tests can replace.

use rustix::io::Errno;

/// The system calls of a [`super::KernelPort`] on one VFIO device. Arguments are the uAPI's structures, byte
/// for byte, so that a record of a real device's calls can replace the device.
pub trait Calls: Send + Sync {
    /// The data descriptor of a session. It is closed when dropped.
    type Data: Send;

    /// VFIO_DEVICE_FEATURE with a `struct vfio_device_feature` and its data, which the answer overwrites. If
    /// the feature's data contains an address, it is replaced by the address of `pointed`. Returns the data
    /// descriptor of a new state.
    ///
    /// # Errors
    /// The kernel's error. EINVAL also for unsafe requests: an unknown feature, or sizes that do not match.
    fn feature(&self, argument: &mut [u8], pointed: &mut [u64]) -> Result<Option<Self::Data>, Errno>;

    /// Resets the device with VFIO_DEVICE_RESET.
    ///
    /// # Errors
    /// The error number of the kernel.
    fn reset(&self) -> Result<(), Errno>;

    /// VFIO_MIG_GET_PRECOPY_INFO with a `struct vfio_precopy_info`, which the answer overwrites.
    ///
    /// # Errors
    /// The error number of the kernel.
    fn precopy_info(&self, data: &Self::Data, argument: &mut [u8; 24]) -> Result<(), Errno>;

    /// Reads from the data descriptor with read(2).
    ///
    /// # Errors
    /// The error number of the kernel.
    fn read(&self, data: &Self::Data, to: &mut [u8]) -> Result<usize, Errno>;

    /// Writes to the data descriptor with write(2).
    ///
    /// # Errors
    /// The error number of the kernel.
    fn write(&self, data: &Self::Data, from: &[u8]) -> Result<usize, Errno>;
}
