//! Devices with large state. They detect a state that arrives incomplete, reordered or torn. Every call
//! passes the [`Stage`].

use std::sync::Arc;

use sterna::{Device, DeviceStream, RemainingState, VmError};
use sterna_devices::statebank::{StateBank, StateBankConfig, Verdict};
use sterna_devices::vfio::{MigState, VfioDevice};

use crate::stage::Stage;
use crate::stop::Stop;

/// A device of one side. It stays with the guest for the next migration.
pub struct Bank {
    number: u32,
    bank: Arc<StateBank>,
    stream: VfioDevice<Arc<StateBank>>,
}

impl Bank {
    /// Makes one bank for each of `configs`. With `has_guest` the side has the guest, otherwise it waits for
    /// a guest.
    pub fn all(configs: &[StateBankConfig], has_guest: bool) -> Result<Vec<Arc<Self>>, String> {
        let make = |(number, config): (usize, &StateBankConfig)| {
            // A waiting destination starts with another state, so that a lost transfer is detected.
            let seed = if has_guest { config.seed } else { !config.seed };
            let dirty_rate = if has_guest { config.dirty_rate } else { 0 };
            let bank = StateBank::new(StateBankConfig { seed, dirty_rate, ..config.clone() })?;
            let stream = VfioDevice::new(Arc::clone(&bank)).map_err(|error| error.to_string())?;
            Ok(Arc::new(Self { number: number as u32, bank, stream }))
        };
        configs.iter().enumerate().map(make).collect()
    }

    /// Whether the device is running. It must be running exactly where the guest runs.
    pub fn runs(&self) -> bool {
        self.bank.status().state == MigState::Running
    }

    /// The device's check of the state that it loaded.
    pub fn arrived(&self) -> Verdict {
        self.bank.status().loaded
    }
}

/// A bank as a device of a VM, with the stops that its calls pass.
pub struct StagedBank {
    pub bank: Arc<Bank>,
    pub stage: Arc<Stage>,
}

impl Device for StagedBank {
    fn name(&self) -> String {
        "soak-bank".into()
    }
    fn instance(&self) -> u32 {
        self.bank.number
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }
    fn load(&self, _version: u32, _body: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(Arc::new(StagedStream { bank: Arc::clone(&self.bank), stage: Arc::clone(&self.stage) }))
    }
}

struct StagedStream {
    bank: Arc<Bank>,
    stage: Arc<Stage>,
}

impl DeviceStream for StagedStream {
    fn begin_save(&self) -> Result<(), VmError> {
        self.bank.stream.begin_save()
    }
    fn remaining(&self) -> Result<RemainingState, VmError> {
        self.bank.stream.remaining()
    }
    fn read(&self, to: &mut [u8]) -> Result<usize, VmError> {
        if self.bank.bank.status().state == MigState::StopCopy {
            self.stage.at(Stop::ReadingStream);
        }
        self.bank.stream.read(to)
    }
    fn quiesce(&self) -> Result<(), VmError> {
        self.stage.at(Stop::Quiescing);
        self.bank.stream.quiesce()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.bank.stream.stop()
    }
    fn configuration(&self) -> Result<Vec<u8>, VmError> {
        self.bank.stream.configuration()
    }
    fn end_save(&self) -> Result<(), VmError> {
        self.bank.stream.end_save()
    }
    fn begin_load(&self) -> Result<(), VmError> {
        self.bank.stream.begin_load()
    }
    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        self.bank.stream.write(bytes)
    }
    fn finish_load(&self, configuration: &[u8]) -> Result<(), VmError> {
        self.stage.at(Stop::LoadingStream);
        self.bank.stream.finish_load(configuration)
    }
    fn end_load(&self) -> Result<(), VmError> {
        self.bank.stream.end_load()
    }
    fn run(&self) -> Result<(), VmError> {
        self.bank.stream.run()
    }
    fn expected_bytes_per_second(&self) -> Option<u64> {
        self.bank.stream.expected_bytes_per_second()
    }
}
