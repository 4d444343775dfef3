//! Implements [`MigrationPort`] for the statebank, for use without a protocol.

use std::io;

use rustix::io::Errno;

use super::{Failure, StateBank};
use crate::statebank::FaultKind;
use crate::vfio::{MigState, MigrationFeatures, MigrationPort, PortError, PrecopyInfo};

impl MigrationPort for StateBank {
    fn name(&self) -> String {
        self.config.name.clone()
    }

    fn features(&self) -> MigrationFeatures {
        self.config.features()
    }

    fn state(&self) -> Result<MigState, PortError> {
        self.alive().map(|inner| inner.state).map_err(|failure| self.tell("reading the state", failure))
    }

    fn set_state(&self, to: MigState) -> Result<(), PortError> {
        self.set_state(to).map_err(|failure| self.tell("changing the state", failure))
    }

    fn reset(&self) -> Result<(), PortError> {
        self.reset().map_err(|failure| self.tell("reset", failure))
    }

    fn read_data(&self, to: &mut [u8]) -> Result<usize, PortError> {
        self.read_data(to).map_err(|failure| self.tell("reading", failure))
    }

    fn write_data(&self, from: &[u8]) -> Result<(), PortError> {
        self.write_data(from).map_err(|failure| self.tell("writing", failure))
    }

    fn precopy_info(&self) -> Result<Option<PrecopyInfo>, PortError> {
        let sizes = self.precopy_sizes().map_err(|failure| self.tell("reading sizes", failure))?;
        Ok(Some(PrecopyInfo { initial_bytes: sizes.0, dirty_bytes: sizes.1 }))
    }

    fn data_size(&self) -> Result<u64, PortError> {
        self.data_size().map_err(|failure| self.tell("reading sizes", failure))
    }

    fn expected_bytes_per_second(&self) -> Option<u64> {
        let rates = [self.config.read_rate, self.config.load_rate];
        rates.into_iter().filter(|rate| *rate > 0).min()
    }
}

impl StateBank {
    fn tell(&self, request: &'static str, failure: Failure) -> PortError {
        let refused = |source| PortError::Refused { request, source };
        match failure {
            Failure::Refused(errno) => refused(errno.into()),
            Failure::Load(error) => refused(io::Error::other(error)),
            Failure::Ram(error) => refused(io::Error::other(error)),
            Failure::Fault(FaultKind::Fail) => refused(Errno::IO.into()),
            Failure::Fault(FaultKind::Hang) => {
                let limit = self.config.hang_limit;
                self.hang(Some(limit));
                PortError::Silent { request, limit }
            }
            Failure::Dead | Failure::Fault(FaultKind::Die) => {
                PortError::Gone { request, source: io::Error::other("it has died") }
            }
        }
    }
}
