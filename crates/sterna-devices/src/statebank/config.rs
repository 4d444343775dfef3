//! What a statebank is made of.

use std::time::Duration;

use super::content::BLOCK_BYTES;
use super::fault::Fault;
use crate::vfio::MigrationFeatures;

/// The slowest rate: a message of 1 MiB must be answered before its sender gives up.
const LEAST_RATE: u64 = 1 << 20;
/// The largest state: 1 TiB.
const MOST_STATE: u64 = 1 << 40;

/// What a statebank is made of.
#[derive(Debug, Clone)]
pub struct StateBankConfig {
    /// In messages.
    pub name: String,
    /// Bytes of its state, headers not counted.
    pub state_bytes: u64,
    /// Bytes per second at which its state can be read; 0: as fast as it goes.
    pub read_rate: u64,
    /// Bytes per second at which a state can be loaded; 0: as fast as it goes.
    pub load_rate: u64,
    /// Percent of its blocks that can be read while it runs; 0: it has no PRE_COPY states.
    pub precopy_percent: u8,
    /// Bytes of its state that it changes per second while it runs.
    pub dirty_rate: u64,
    /// Pages of guest RAM that it writes per second until it is stopped. Moves with its state, so that a device which
    /// waits for one writes nothing.
    pub dma_rate: u64,
    /// Where in guest-physical memory it writes, (first, bytes); everywhere if not said.
    pub dma_window: Option<(u64, u64)>,
    /// Decides what its state holds, and where it writes. A loaded one has its source's.
    pub seed: u64,
    /// Whether it has the P2P states.
    pub p2p: bool,
    /// What goes wrong, once.
    pub fault: Option<Fault>,
    /// How long a call may hang where no client gives up on it (without a process or server).
    pub hang_limit: Duration,
    /// Whether a fault that says *die* ends the process.
    pub dies_with_process: bool,
}

impl Default for StateBankConfig {
    /// 1 MiB, without limits or faults, all of it to be read when stopped.
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
    /// Its migration states.
    pub fn features(&self) -> MigrationFeatures {
        MigrationFeatures { p2p: self.p2p, pre_copy: self.precopy_percent > 0 }
    }

    /// How many blocks its state has.
    pub fn blocks(&self) -> usize {
        usize::try_from(self.state_bytes.div_ceil(BLOCK_BYTES)).unwrap_or(usize::MAX)
    }

    /// Refuses what cannot be.
    ///
    /// # Errors
    /// Says what is wrong with which setting.
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
