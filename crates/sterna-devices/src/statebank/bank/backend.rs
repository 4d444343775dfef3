//! Implements a vfio-user server's [`Backend`] for the statebank.

use rustix::io::Errno;

use super::{Failure, StateBank};
use crate::statebank::{FaultKind, STATUS_REGION, Status};
use crate::vfio::{MigState, MigrationFeatures};
use crate::vfio_user::wire::{DeviceInfo, DmaLogRange, PrecopySizes, REGION_READABLE, RegionInfo};
use crate::vfio_user::{Backend, BackendError, DmaRegion};

/// Exit status of a process that dies from a fault.
const DIED: i32 = 86;
/// Device flag: the device can be reset.
const CAN_RESET: u32 = vfio_bindings::bindings::vfio::VFIO_DEVICE_FLAGS_RESET;

impl Backend for StateBank {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { flags: CAN_RESET, regions: STATUS_REGION + 1, irqs: 0 }
    }

    fn region_info(&self, index: u32) -> Result<RegionInfo, BackendError> {
        if index != STATUS_REGION {
            return Err(Errno::INVAL.into());
        }
        Ok(RegionInfo { flags: REGION_READABLE, index, size: Status::BYTES as u64 })
    }

    fn region_read(&self, region: u32, offset: u64, to: &mut [u8]) -> Result<(), BackendError> {
        let bytes = self.status().encode();
        let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..));
        let part = rest.and_then(|rest| rest.get(..to.len())).filter(|_| region == STATUS_REGION);
        to.copy_from_slice(part.ok_or(Errno::INVAL)?);
        Ok(())
    }

    fn region_write(&self, _: u32, _: u64, _: &[u8]) -> Result<(), BackendError> {
        Err(Errno::PERM.into())
    }

    fn dma_map(&self, region: DmaRegion) -> Result<(), BackendError> {
        Ok(self.dma.map(&region)?)
    }

    fn dma_unmap(&self, address: u64, size: u64) -> Result<(), BackendError> {
        Ok(self.dma.unmap(address, size)?)
    }

    fn dma_unmap_all(&self) {
        self.dma.unmap_all();
    }

    fn reset(&self) -> Result<(), BackendError> {
        self.reset().map_err(|failure| self.tell_client(failure))
    }

    fn features(&self) -> MigrationFeatures {
        self.config.features()
    }

    fn state(&self) -> MigState {
        self.state()
    }

    fn set_state(&self, to: MigState) -> Result<(), BackendError> {
        self.set_state(to).map_err(|failure| self.tell_client(failure))
    }

    fn read_data(&self, to: &mut [u8]) -> Result<usize, BackendError> {
        self.read_data(to).map_err(|failure| self.tell_client(failure))
    }

    fn write_data(&self, from: &[u8]) -> Result<(), BackendError> {
        self.write_data(from).map_err(|failure| self.tell_client(failure))
    }

    fn data_size(&self) -> Result<u64, BackendError> {
        self.data_size().map_err(|failure| self.tell_client(failure))
    }

    fn precopy_sizes(&self) -> Result<PrecopySizes, BackendError> {
        let sizes = self.precopy_sizes().map_err(|failure| self.tell_client(failure))?;
        Ok(PrecopySizes { initial_bytes: sizes.0, dirty_bytes: sizes.1 })
    }

    fn start_logging(&self, page_size: u64, ranges: &[DmaLogRange]) -> Result<(), BackendError> {
        Ok(self.dma.start_log(page_size, ranges)?)
    }

    fn stop_logging(&self) {
        self.dma.stop_log();
    }

    fn report_logged(
        &self,
        range: DmaLogRange,
        page_size: u64,
        bitmap: &mut [u64],
    ) -> Result<(), BackendError> {
        Ok(self.dma.report(range, page_size, bitmap)?)
    }
}

impl StateBank {
    /// Converts a failure for the client, which gets only an error number. The reason is logged.
    fn tell_client(&self, failure: Failure) -> BackendError {
        match failure {
            Failure::Refused(errno) => errno.into(),
            Failure::Load(error) => {
                tracing::error!(%error, "the loaded state differs from the saved state");
                Errno::BADMSG.into()
            }
            Failure::Ram(error) => {
                tracing::error!(%error, "guest RAM differs from what was written");
                Errno::BADMSG.into()
            }
            Failure::Fault(FaultKind::Fail) => Errno::IO.into(),
            Failure::Fault(FaultKind::Hang) => {
                self.hang(None);
                BackendError::HangUp
            }
            Failure::Fault(FaultKind::Die) if self.config.dies_with_process => std::process::exit(DIED),
            Failure::Dead | Failure::Fault(FaultKind::Die) => BackendError::HangUp,
        }
    }
}
