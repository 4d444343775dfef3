//! Implements [`MigrationPort`] for the client.

use std::sync::atomic::Ordering;

use super::{Client, feature};
use crate::vfio::{DmaLogger, DmaRange, MigState, MigrationFeatures, MigrationPort, PortError, PrecopyInfo};
use crate::vfio_user::wire::{
    Command, DeviceState, DmaLogRange, FeatureRequest, HEADER_BYTES, MigData, PRECOPY_INFO, PrecopySizes,
    WireError, decode_size,
};

/// Whether the server reports what can be read while it runs.
pub(super) const UNKNOWN: u32 = 0;
const TELLS: u32 = 1;
const TELLS_NOT: u32 = 2;

impl MigrationPort for Client {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn features(&self) -> MigrationFeatures {
        self.features.unwrap_or_default()
    }

    fn state(&self) -> Result<MigState, PortError> {
        let question = FeatureRequest { feature: feature::MIG_DEVICE_STATE, method: feature::GET, data: &[] };
        let data = self.feature(&question, 8)?;
        DeviceState::decode("MIG_DEVICE_STATE", &data)
            .map(|state| state.0)
            .map_err(|error| PortError::Misbehaved { request: "MIG_DEVICE_STATE", source: error.into() })
    }

    fn set_state(&self, to: MigState) -> Result<(), PortError> {
        let data = DeviceState(to).encode();
        let (feature, method) = (feature::MIG_DEVICE_STATE, feature::SET);
        self.feature(&FeatureRequest { feature, method, data: &data }, 0).map(drop)
    }

    fn reset(&self) -> Result<(), PortError> {
        self.ask(Command::DeviceReset, &[], &[], &[])?.skip()
    }

    fn read_data(&self, to: &mut [u8]) -> Result<usize, PortError> {
        let most = to.len().min(self.data_bytes as usize);
        let wanted = MigData { size: most as u32 };
        let mut answer = self.ask(Command::MigDataRead, &wanted.encode(), &[], &[])?;
        let mut head = [0; MigData::BYTES];
        answer.read(&mut head)?;
        let came = MigData::decode(answer.payload(&head), wanted.size);
        let came = came.map_err(|error| answer.misbehaved(error))?.size as usize;
        let (message, at, left) = (Command::MigDataRead.name(), HEADER_BYTES + MigData::BYTES, answer.left());
        if left < came {
            let (field, needed, left) = ("data", came as u64, left as u64);
            return Err(answer.misbehaved(WireError::Truncated { message, at, field, needed, left }));
        }
        // libvfio-user's answers are as long as the request permits, however few bytes were read.
        if left > most {
            let (at, left) = (at + most, (left - most) as u64);
            return Err(answer.misbehaved(WireError::Trailing { message, at, left }));
        }
        answer.read(&mut to[..came])?;
        answer.skip()?;
        Ok(came)
    }

    fn write_data(&self, from: &[u8]) -> Result<(), PortError> {
        for part in from.chunks(self.data_bytes as usize) {
            let head = MigData { size: part.len() as u32 }.encode();
            self.ask(Command::MigDataWrite, &head, part, &[])?.skip()?;
        }
        Ok(())
    }

    fn precopy_info(&self) -> Result<Option<PrecopyInfo>, PortError> {
        if self.tells_precopy.load(Ordering::Relaxed) == TELLS_NOT {
            return Ok(None);
        }
        let question = FeatureRequest { feature: PRECOPY_INFO, method: feature::GET, data: &[] };
        let data = match self.feature(&question, 16) {
            Ok(data) => data,
            // After a first answer, a refusal is an error. A server that never answered may not know the
            // feature.
            Err(PortError::Refused { .. }) if self.tells_precopy.load(Ordering::Relaxed) == UNKNOWN => {
                self.tells_precopy.store(TELLS_NOT, Ordering::Relaxed);
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let sizes = PrecopySizes::decode("PRECOPY_INFO", &data)
            .map_err(|error| PortError::Misbehaved { request: "PRECOPY_INFO", source: error.into() })?;
        self.tells_precopy.store(TELLS, Ordering::Relaxed);
        Ok(Some(PrecopyInfo { initial_bytes: sizes.initial_bytes, dirty_bytes: sizes.dirty_bytes }))
    }

    fn data_size(&self) -> Result<u64, PortError> {
        let question = FeatureRequest { feature: feature::MIG_DATA_SIZE, method: feature::GET, data: &[] };
        match self.feature(&question, 8) {
            Ok(data) => decode_size("MIG_DATA_SIZE", &data)
                .map_err(|error| PortError::Misbehaved { request: "MIG_DATA_SIZE", source: error.into() }),
            // The feature is optional.
            Err(PortError::Refused { .. }) => Ok(0),
            Err(error) => Err(error),
        }
    }
}

impl DmaLogger for Client {
    fn log_name(&self) -> &'static str {
        "vfio-user-dma-log"
    }

    fn device_name(&self) -> String {
        self.name.clone()
    }

    fn longest_report(&self) -> u64 {
        Client::longest_report(self)
    }

    fn start_logging(&self, ranges: &[DmaRange]) -> Result<(), PortError> {
        let ranges: Vec<_> = ranges.iter().copied().map(DmaLogRange::from).collect();
        Client::start_logging(self, &ranges)
    }

    fn stop_logging(&self) -> Result<(), PortError> {
        Client::stop_logging(self)
    }

    fn report_logged(&self, range: DmaRange) -> Result<Vec<u64>, PortError> {
        Client::report_logged(self, range.into())
    }
}

impl From<DmaRange> for DmaLogRange {
    fn from(range: DmaRange) -> Self {
        Self { address: range.address, length: range.length }
    }
}
