//! A device that writes guest memory: every tick it counts one up at a fixed guest address.
//!
//! It stands for all devices that the VMM emulates. KVM does not see what they write; the bitmap of `vm-memory` does.

use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Where it counts.
const ADDRESS: GuestAddress = GuestAddress(0x2000);

/// The device.
#[derive(Default)]
pub struct Ticker(Mutex<State>);

#[derive(Default)]
struct State {
    runs: bool,
    count: u64,
}

impl Ticker {
    /// From now on ticks write memory.
    pub fn start(&self) {
        self.state().runs = true;
    }

    /// On return no tick writes memory, and none will.
    pub fn stop(&self) {
        self.state().runs = false;
    }

    /// A tick: called by the event loop.
    ///
    /// # Errors
    /// The memory does not hold what the last tick wrote: a migration lost it.
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

    /// How often it ticked; its whole state.
    pub fn count(&self) -> u64 {
        self.state().count
    }

    /// Takes over another ticker's state.
    pub fn set_count(&self, count: u64) {
        self.state().count = count;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
