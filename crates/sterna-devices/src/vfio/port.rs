//! The interface through which [`super::VfioDevice`] drives a device, independent of the transport.

use super::error::PortError;
use super::state::{MigState, MigrationFeatures};

/// Bytes that can be read while the device runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrecopyInfo {
    /// Bytes that were never read.
    pub initial_bytes: u64,
    /// Bytes that changed after they were read.
    pub dirty_bytes: u64,
}

/// A device's other side, to which migration requests are sent. It is the kernel's VFIO by ioctls, a
/// vfio-user server by messages, or a model in this process.
///
/// A port to another process abandons each call after a time limit with [`PortError::Silent`]. A port to a
/// driver in the kernel cannot do so: a system call returns only after the driver does. A driver that never
/// answers is therefore never reported.
pub trait MigrationPort: Send + Sync {
    /// The device's name in messages, by which an operator can find it.
    fn name(&self) -> String;

    /// The optional migration states that the device has.
    fn features(&self) -> MigrationFeatures;

    /// Reads the device's present state.
    ///
    /// # Errors
    /// The other side did not answer, or its answer is invalid. Every call can fail in this way.
    fn state(&self) -> Result<MigState, PortError>;

    /// Changes the device's state to `to` along the shortest path, which the other side finds. Returns after
    /// the change. When a device has stopped, its dirty source reports all its writes to guest RAM. After an
    /// error the device is in its old state, in a state on the path, or in ERROR; read the state.
    ///
    /// # Errors
    /// Those of every call, and a refusal by the device.
    fn set_state(&self, to: MigState) -> Result<(), PortError>;

    /// Resets the device to RUNNING, the first state of a fresh device. Its present state is lost. Only a
    /// reset leaves ERROR.
    ///
    /// # Errors
    /// Those of every call.
    fn reset(&self) -> Result<(), PortError>;

    /// Reads the next bytes of a save session. 0 means: in a PRE_COPY state no data is available now; in
    /// STOP_COPY all data was read.
    ///
    /// # Errors
    /// Those of every call.
    fn read_data(&self, to: &mut [u8]) -> Result<usize, PortError>;

    /// In RESUMING: writes all of `from`.
    ///
    /// # Errors
    /// Those of every call.
    fn write_data(&self, from: &[u8]) -> Result<(), PortError>;

    /// In a PRE_COPY state: the bytes that can be read now. `None` if the device does not report them.
    ///
    /// # Errors
    /// Those of every call.
    fn precopy_info(&self) -> Result<Option<PrecopyInfo>, PortError>;

    /// Approximate number of bytes to read if the device stopped now. 0 if the device does not report it.
    ///
    /// # Errors
    /// Those of every call.
    fn data_size(&self) -> Result<u64, PortError>;

    /// Expected rate of the device's state in bytes per second, if known before a measurement.
    fn expected_bytes_per_second(&self) -> Option<u64> {
        None
    }
}

impl<P: MigrationPort + ?Sized> MigrationPort for std::sync::Arc<P> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn features(&self) -> MigrationFeatures {
        (**self).features()
    }

    fn state(&self) -> Result<MigState, PortError> {
        (**self).state()
    }

    fn set_state(&self, to: MigState) -> Result<(), PortError> {
        (**self).set_state(to)
    }

    fn reset(&self) -> Result<(), PortError> {
        (**self).reset()
    }

    fn read_data(&self, to: &mut [u8]) -> Result<usize, PortError> {
        (**self).read_data(to)
    }

    fn write_data(&self, from: &[u8]) -> Result<(), PortError> {
        (**self).write_data(from)
    }

    fn precopy_info(&self) -> Result<Option<PrecopyInfo>, PortError> {
        (**self).precopy_info()
    }

    fn data_size(&self) -> Result<u64, PortError> {
        (**self).data_size()
    }

    fn expected_bytes_per_second(&self) -> Option<u64> {
        (**self).expected_bytes_per_second()
    }
}
