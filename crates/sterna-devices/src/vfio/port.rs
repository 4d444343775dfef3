//! What a way of speaking to a device must offer, so that [`super::VfioDevice`] can drive it.

use super::error::PortError;
use super::state::{MigState, MigrationFeatures};

/// How much can be read while the device runs, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrecopyInfo {
    /// Never read so far.
    pub initial_bytes: u64,
    /// Changed since it was read.
    pub dirty_bytes: u64,
}

/// A device's other side: the kernel's VFIO by ioctls, a vfio-user server by messages, a model in this process.
///
/// One that speaks to another process gives up on every call after a time, with [`PortError::Silent`]. One that is a
/// driver in the kernel cannot: nobody comes back from a system call before the driver does, so a call takes as long as
/// that, and a driver that never answers is never told of.
pub trait MigrationPort: Send + Sync {
    /// The device's name in messages: what an operator would look for.
    fn name(&self) -> String;

    /// Which states it has.
    fn features(&self) -> MigrationFeatures;

    /// The state that it is in.
    ///
    /// # Errors
    /// As every call's: the other side did not answer, or what it answered cannot be.
    fn state(&self) -> Result<MigState, PortError>;

    /// Goes to `to` along the shortest way (which the other side finds itself) and returns when it is there. When
    /// a device has stopped, its writes to guest RAM are all visible to its dirty source. After an error it is
    /// where it was, somewhere on the way, or in ERROR: ask.
    ///
    /// # Errors
    /// As every call's, and a device that refuses.
    fn set_state(&self, to: MigState) -> Result<(), PortError>;

    /// Back to the first state of a fresh device, which is RUNNING; what it held is lost. The only way out of ERROR.
    ///
    /// # Errors
    /// As every call's.
    fn reset(&self) -> Result<(), PortError>;

    /// Reads on in a save session. 0: in a PRE_COPY state nothing can be read now; in STOP_COPY all was read.
    ///
    /// # Errors
    /// As every call's.
    fn read_data(&self, to: &mut [u8]) -> Result<usize, PortError>;

    /// In RESUMING: writes all of `from`.
    ///
    /// # Errors
    /// As every call's.
    fn write_data(&self, from: &[u8]) -> Result<(), PortError>;

    /// In a PRE_COPY state: what can be read there; `None` if the device does not say.
    ///
    /// # Errors
    /// As every call's.
    fn precopy_info(&self) -> Result<Option<PrecopyInfo>, PortError>;

    /// About how many bytes would still be read if the device stopped now; 0 if it does not say.
    ///
    /// # Errors
    /// As every call's.
    fn data_size(&self) -> Result<u64, PortError>;

    /// Bytes per second at which its state moves, if that is known before anything was measured.
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
