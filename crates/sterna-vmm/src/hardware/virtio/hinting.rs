//! Free page hinting: the device's questions and the driver's answers (VIRTIO 1.2, section 5.5.6.5).
//!
//! The device asks with a command id in its configuration space. The driver answers with a buffer that
//! contains the id, then buffers of unused memory, then a buffer that contains STOP. It keeps that memory
//! until the id is DONE, and the device may change the memory until then. The source does not change it and
//! sets DONE at the end of the migration. At the destination the id is DONE from the beginning.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use sterna::{FreePageHints, FreePages};
use sterna_ram::GuestRam;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_DRIVER_OK;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_INT_CONFIG;

use super::ring::{Chain, Ring};
use super::space::ConfigurationSpace;
use super::transport::Transport;

/// Bit number of the hinting feature in the standard.
pub(super) const FEATURE: u32 = 3;
/// `free_page_hint_cmd_id` in the configuration space.
const ID: std::ops::Range<usize> = 8..12;
const STOP: u32 = 0;
const DONE: u32 = 1;
const FIRST: u32 = 2;

/// State that the device, its transport and the engine share.
#[derive(Default)]
pub(super) struct Hinting(Mutex<State>);

#[derive(Default)]
struct State {
    /// The command id in the configuration space.
    shown: u32,
    /// The last command id. An id is not reused while the driver may still answer it.
    last: u32,
    /// Whether the buffers received now answer the id in `shown`.
    is_answered: bool,
    /// Receiver of the hints.
    free: Option<FreePages>,
}

impl State {
    /// Starts a question with an unused id.
    fn ask(&mut self, free: FreePages) {
        self.last = self.last.wrapping_add(1).max(FIRST);
        (self.shown, self.is_answered, self.free) = (self.last, false, Some(free));
    }

    /// Ends the question: later answers are ignored.
    fn leave_off(&mut self, shown: u32) {
        (self.shown, self.free) = (shown, None);
    }

    fn show(&self, space: &mut [u8]) {
        space[ID].copy_from_slice(&self.shown.to_le_bytes());
    }
}

impl Hinting {
    /// Handles a buffer of the driver. The error says which rule the driver broke.
    pub(super) fn take(&self, ram: &GuestRam, chain: &Chain<'_>) -> Result<(), &'static str> {
        let mut state = self.0.lock();
        match (chain.readable.len(), chain.writable.is_empty()) {
            (4, true) => {
                let mut id = [0; 4];
                chain.readable.read(&mut id);
                let id = u32::from_le_bytes(id);
                if let Some(free) = state.free.as_ref().filter(|_| id == STOP && state.is_answered) {
                    free.complete();
                }
                // STOP or an earlier id: the buffers after it are no answer to the current question.
                state.is_answered = state.shown >= FIRST && id == state.shown;
            }
            (0, false) => {
                if let Some(free) = state.free.as_ref().filter(|_| state.is_answered) {
                    for (block, first, pages) in chain.writable.whole_pages(ram) {
                        free.hint(block, first, pages);
                    }
                }
            }
            (0, true) => return Err("it is empty"),
            (_, false) => return Err("it is both a command and memory"),
            (_, true) => return Err("a command id has 4 bytes"),
        }
        Ok(())
    }

    /// Called when the device begins to work. True if the driver must be notified of another id than the one
    /// it was shown last.
    pub(super) fn begin_work(&self, space: &ConfigurationSpace) -> bool {
        let (state, mut before) = (self.0.lock(), [0; 4]);
        space.read(ID.start as u64, &mut before);
        let is_other = before != state.shown.to_le_bytes();
        if is_other {
            space.change(|bytes| state.show(bytes));
        }
        is_other
    }

    /// Notifies the driver of a changed id. Any queue's interrupt serves.
    pub(super) fn tell(rings: &[Ring<'_>]) {
        rings.iter().take(1).for_each(|ring| ring.interrupt(VIRTIO_MMIO_INT_CONFIG));
    }

    /// Whether a driver may still wait for DONE.
    fn is_asking(&self) -> bool {
        let state = self.0.lock();
        state.last >= FIRST && state.shown != DONE
    }

    /// Handles a reset: the driver has forgotten the question.
    pub(super) fn reset(&self) {
        self.0.lock().is_answered = false;
    }

    /// The last command id. At the destination the driver then reads DONE, whatever the id is.
    pub(super) fn state(&self) -> Vec<u8> {
        self.0.lock().last.to_le_bytes().to_vec()
    }

    pub(super) fn set_state(&self, state: &[u8]) -> Result<(), String> {
        let last = state.try_into().map_err(|_| format!("{} bytes of the last command id", state.len()))?;
        let last = u32::from_le_bytes(last);
        let shown = if last < FIRST { STOP } else { DONE };
        *self.0.lock() = State { shown, last, ..State::default() };
        Ok(())
    }
}

/// The engine's interface to free page hinting.
pub(super) struct Asker {
    transport: Arc<Transport>,
    hinting: Arc<Hinting>,
}

impl Asker {
    pub(super) fn new(transport: &Arc<Transport>, hinting: Arc<Hinting>) -> Self {
        Self { transport: Arc::clone(transport), hinting }
    }

    /// Whether the guest has a driver that can answer, or had one that was asked.
    pub(super) fn is_of_use(&self) -> bool {
        let features = self.transport.driver_features();
        let status = self.transport.signals.status.load(Ordering::SeqCst);
        let is_heard = features & 1 << FEATURE != 0 && status & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        is_heard || self.hinting.is_asking()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.hinting.0.lock();
        change(&mut state);
        self.transport.change_configuration(|space| state.show(space));
    }
}

impl FreePageHints for Asker {
    fn begin(&self, free: FreePages) {
        self.change(|state| state.ask(free));
    }

    fn stop(&self) {
        self.change(|state| state.leave_off(STOP));
    }

    fn end(&self) {
        self.change(|state| state.leave_off(DONE));
    }
}

#[cfg(test)]
mod tests;
