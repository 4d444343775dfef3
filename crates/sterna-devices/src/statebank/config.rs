//! The configuration of a statebank, and its limits.

use std::time::Duration;

use super::content::BLOCK_BYTES;
use super::fault::Fault;
use crate::vfio::MigrationFeatures;

/// Lowest rate in bytes per second. A message of 1 MiB must be answered before its sender times out.
const LEAST_RATE: u64 = 1 << 20;
/// Largest state: 1 TiB.
const MOST_STATE: u64 = 1 << 40;

/// Settings of a statebank.
#[derive(Debug, Clone)]
pub struct StateBankConfig {
    /// The device's name in messages.
    pub name: String,
    /// Length of the state in bytes, without the stream's heads.
    pub state_bytes: u64,
    /// Rate of reading the state, in bytes per second; 0 for no limit.
    pub read_rate: u64,
    /// Rate of loading a state, in bytes per second; 0 for no limit.
    pub load_rate: u64,
    /// Percent of the blocks that can be read while the device runs. With 0 the device has no PRE_COPY
    /// states.
    pub precopy_percent: u8,
    /// Bytes of the state that the device changes per second while it runs.
    pub dirty_rate: u64,
    /// Pages of guest RAM that the device writes per second until it is stopped. The rate moves with the
    /// state, so that a device that waits for a state writes nothing.
    pub dma_rate: u64,
    /// Guest-physical range (first, bytes) that the device writes. `None` means all of guest RAM.
    pub dma_window: Option<(u64, u64)>,
    /// Seed of the state's content and of the written addresses. A loaded device takes its source's seed.
    pub seed: u64,
    /// Whether the device has the P2P states.
    pub p2p: bool,
    /// A fault that occurs once. `None` for none.
    pub fault: Option<Fault>,
    /// Time limit of a hang without a process or server, where no client times out.
    pub hang_limit: Duration,
    /// Whether the fault *die* ends the process.
    pub dies_with_process: bool,
}

impl Default for StateBankConfig {
    /// A state of 1 MiB without limits or faults, readable only after the stop.
    fn default() -> Self {
        Self {
            name: "statebank".into(),
            state_bytes: 1 << 20,
            read_rate: 0,
            load_rate: 0,
            precopy_percent: 0,
            dirty_rate: 0,
            dma_rate: 0,
            dma_window: None,
            seed: 1,
            p2p: true,
            fault: None,
            hang_limit: Duration::from_secs(10),
            dies_with_process: false,
        }
    }
}

impl StateBankConfig {
    /// The optional migration states that the settings imply.
    pub fn features(&self) -> MigrationFeatures {
        MigrationFeatures { p2p: self.p2p, pre_copy: self.precopy_percent > 0 }
    }

    /// Number of blocks in the state.
    pub fn blocks(&self) -> usize {
        usize::try_from(self.state_bytes.div_ceil(BLOCK_BYTES)).unwrap_or(usize::MAX)
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// A text that names the invalid setting and the reason.
    pub fn check(&self) -> Result<(), String> {
        if self.state_bytes == 0 || self.state_bytes > MOST_STATE {
            return Err(format!("a state of {} bytes: it must have 1 byte to 1 TiB", self.state_bytes));
        }
        if self.precopy_percent > 100 {
            return Err(format!(
                "{} percent of the state before the stop: at most 100",
                self.precopy_percent
            ));
        }
        for (what, rate) in [("read", self.read_rate), ("load", self.load_rate)] {
            if rate != 0 && rate < LEAST_RATE {
                let why = "at least 1 MiB/s, or 0 for no limit: clients give up on slower answers";
                return Err(format!("a {what} rate of {rate} bytes per second: {why}"));
            }
        }
        if let Some((first, bytes)) = self.dma_window
            && (!first.is_multiple_of(4096)
                || !bytes.is_multiple_of(4096)
                || first.checked_add(bytes).is_none())
        {
            return Err(format!("a DMA window of {bytes} bytes at {first:#x}: whole pages are needed"));
        }
        Ok(())
    }
}
