//! A device that writes guest memory: every tick it increments a number at a fixed guest address.
//!
//! It represents all devices that a VMM emulates. KVM does not see their writes; the bitmap of `vm-memory`
//! does.

use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Guest address of the number.
const ADDRESS: GuestAddress = GuestAddress(0x2000);

/// The device, which is stopped at first.
#[derive(Default)]
pub struct Ticker(Mutex<State>);

#[derive(Default)]
struct State {
    runs: bool,
    count: u64,
}

impl Ticker {
    /// Lets ticks write memory from now on.
    pub fn start(&self) {
        self.state().runs = true;
    }

    /// Stops the device. After the return no tick writes memory.
    pub fn stop(&self) {
        self.state().runs = false;
    }

    /// Handles a tick; called by the event loop.
    ///
    /// # Errors
    /// The memory does not contain the number that the last tick wrote, because a migration lost it.
    pub fn tick(&self, memory: &GuestMemoryMmap<AtomicBitmap>) -> Result<(), String> {
        let mut state = self.state();
        if !state.runs {
            return Ok(());
        }
        let found: u64 = memory.read_obj(ADDRESS).map_err(|error| error.to_string())?;
        if found != state.count {
            return Err(format!("the ticker wrote {} and found {found}", state.count));
        }
        state.count += 1;
        memory.write_obj(state.count, ADDRESS).map_err(|error| error.to_string())
    }

    /// The number of ticks, which is the whole state of the device.
    pub fn count(&self) -> u64 {
        self.state().count
    }

    /// Loads the state of another ticker.
    pub fn set_count(&self, count: u64) {
        self.state().count = count;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
