//! The kernel's log of a device's DMA, as a [`DmaLogger`].

use sterna_ram::PAGE_SIZE;

use super::argument::Argument;
use super::{Calls, KernelPort, refused};
use crate::vfio::{DmaLogger, DmaRange, MigrationPort, PortError, feature};

const PAGE_BYTES: u64 = PAGE_SIZE as u64;
/// Longest range of a report in bytes. Its bitmap has at most 2 MiB.
const LONGEST: u64 = 64 << 30;

impl<C: Calls> DmaLogger for KernelPort<C> {
    fn log_name(&self) -> &'static str {
        "vfio-dma-log"
    }

    fn device_name(&self) -> String {
        self.name()
    }

    fn longest_report(&self) -> u64 {
        LONGEST
    }

    fn start_logging(&self, ranges: &[DmaRange]) -> Result<(), PortError> {
        let request = "DMA_LOGGING_START";
        if !self.logs_dma {
            let lack =
                "the device does not log its writes; count all memory that it can reach as written".into();
            return Err(PortError::Unsupported { request, lack });
        }
        let Ok(count) = u32::try_from(ranges.len()) else {
            return Err(refused(request, rustix::io::Errno::TOOBIG));
        };
        let mut pairs: Vec<u64> = ranges.iter().flat_map(|range| [range.address, range.length]).collect();
        let mut argument = Argument::start_logging(PAGE_BYTES, count);
        let asked = self.calls.feature(&mut argument.bytes, &mut pairs);
        asked.map(drop).map_err(|errno| refused(request, errno))
    }

    fn stop_logging(&self) -> Result<(), PortError> {
        let mut argument = Argument::new(feature::SET, feature::DMA_LOGGING_STOP, &[]);
        let asked = self.calls.feature(&mut argument.bytes, &mut []);
        asked.map(drop).map_err(|errno| refused("DMA_LOGGING_STOP", errno))
    }

    fn report_logged(&self, range: DmaRange) -> Result<Vec<u64>, PortError> {
        let words = (range.length.min(LONGEST) / PAGE_BYTES).div_ceil(64);
        // Zeroed here, because the kernel only sets bits.
        let mut bitmap = vec![0; words as usize];
        let data = [range.address, range.length, PAGE_BYTES, 0];
        let mut argument = Argument::new(feature::GET, feature::DMA_LOGGING_REPORT, &data);
        let asked = self.calls.feature(&mut argument.bytes, &mut bitmap);
        asked.map(|_| bitmap).map_err(|errno| refused("DMA_LOGGING_REPORT", errno))
    }
}
