//! A device whose process pauses at one request until a test wakes it. It then continues normally.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use sterna_devices::statebank::{StateBank, StateBankConfig};
use sterna_devices::vfio::{MigState, MigrationFeatures, PortError};
use sterna_devices::vfio_user::wire::{DeviceInfo, DmaLogRange, PrecopySizes, RegionInfo};
use sterna_devices::vfio_user::{Backend, BackendError, Client, ClientOptions, DmaRegion, serve};

use super::support::TIMEOUT;

/// The request at which the device pauses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stall {
    State,
    Read,
    StartLogging,
}

/// A client of such a device. Dropping it ends the server.
pub struct Asleep {
    pub client: Arc<Client>,
    pub bank: Arc<StateBank>,
    wake: Sender<()>,
}

impl Asleep {
    pub fn wake(&self) {
        self.wake.send(()).unwrap();
    }
}

struct Slow {
    bank: Arc<StateBank>,
    stall: Stall,
    /// Number of requests of this kind that are answered before the pause.
    pass: AtomicU32,
    woken: Mutex<Receiver<()>>,
}

/// A device that pauses at the request after `pass` others of its kind.
pub fn slow(stall: Stall, pass: u32, config: StateBankConfig) -> Asleep {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (wake, woken) = channel();
    let bank = StateBank::new(config).unwrap();
    let slow = Slow { bank: Arc::clone(&bank), stall, pass: AtomicU32::new(pass), woken: Mutex::new(woken) };
    thread::spawn(move || serve(theirs, &slow));
    let client = Client::over(ours, "slow".into(), &ClientOptions { timeout: TIMEOUT }).unwrap();
    Asleep { client: Arc::new(client), bank, wake }
}

/// Repeats `ask` until it is answered. A server that was woken first executes its earlier requests.
pub fn patiently<T>(ask: impl Fn() -> Result<T, PortError>) -> T {
    loop {
        match ask() {
            Err(PortError::Silent { .. }) => {}
            other => return other.unwrap(),
        }
    }
}

impl Slow {
    fn pass(&self, at: Stall) {
        if at != self.stall {
            return;
        }
        let before = self.pass.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        // Later requests never pause, because the wake-up message is sent only once.
        if before.is_err() && self.pass.swap(u32::MAX, Ordering::Relaxed) == 0 {
            let _ = self.woken.lock().unwrap().recv();
        }
    }
}

impl Backend for Slow {
    fn info(&self) -> DeviceInfo {
        self.bank.info()
    }
    fn region_info(&self, index: u32) -> Result<RegionInfo, BackendError> {
        self.bank.region_info(index)
    }
    fn region_read(&self, region: u32, offset: u64, to: &mut [u8]) -> Result<(), BackendError> {
        self.bank.region_read(region, offset, to)
    }
    fn region_write(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), BackendError> {
        self.bank.region_write(region, offset, from)
    }
    fn dma_map(&self, region: DmaRegion) -> Result<(), BackendError> {
        self.bank.dma_map(region)
    }
    fn dma_unmap(&self, address: u64, size: u64) -> Result<(), BackendError> {
        self.bank.dma_unmap(address, size)
    }
    fn dma_unmap_all(&self) {
        self.bank.dma_unmap_all();
    }
    fn reset(&self) -> Result<(), BackendError> {
        Backend::reset(&*self.bank)
    }
    fn features(&self) -> MigrationFeatures {
        Backend::features(&*self.bank)
    }
    fn state(&self) -> MigState {
        self.pass(Stall::State);
        Backend::state(&*self.bank)
    }
    fn set_state(&self, to: MigState) -> Result<(), BackendError> {
        Backend::set_state(&*self.bank, to)
    }
    fn read_data(&self, to: &mut [u8]) -> Result<usize, BackendError> {
        self.pass(Stall::Read);
        Backend::read_data(&*self.bank, to)
    }
    fn write_data(&self, from: &[u8]) -> Result<(), BackendError> {
        Backend::write_data(&*self.bank, from)
    }
    fn data_size(&self) -> Result<u64, BackendError> {
        Backend::data_size(&*self.bank)
    }
    fn precopy_sizes(&self) -> Result<PrecopySizes, BackendError> {
        Backend::precopy_sizes(&*self.bank)
    }
    fn start_logging(&self, page_size: u64, ranges: &[DmaLogRange]) -> Result<(), BackendError> {
        self.pass(Stall::StartLogging);
        self.bank.start_logging(page_size, ranges)
    }
    fn stop_logging(&self) {
        self.bank.stop_logging();
    }
    fn report_logged(
        &self,
        range: DmaLogRange,
        page_size: u64,
        bitmap: &mut [u64],
    ) -> Result<(), BackendError> {
        self.bank.report_logged(range, page_size, bitmap)
    }
}
