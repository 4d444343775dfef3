//! A console with one port: VIRTIO 1.2, section 5.3. It shares the place of the serial port's bytes.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;
use vmm_sys_util::eventfd::EventFd;

use super::backend::{Backend, Session};
use super::ring::{Broken, Ring};
use super::space::ConfigurationSpace;
use crate::error::VmmError;
use crate::hardware::console::Console;

const TYPED: usize = 0;
const WRITTEN: usize = 1;
/// Typed bytes that wait for the guest, at most.
const MOST_TYPED: usize = 4096;
/// Of one request of the guest, at most.
const MOST_WRITTEN: usize = 64 << 10;

/// What is typed and the guest has not read yet.
pub(crate) struct Keyboard {
    typed: Mutex<Typed>,
    event: EventFd,
}

#[derive(Default)]
struct Typed {
    bytes: VecDeque<u8>,
    has_driver: bool,
}

impl Keyboard {
    /// Takes the first of `bytes`, as many as there is room for; none as long as the console has no driver.
    pub(crate) fn type_in(&self, bytes: &[u8]) -> Option<usize> {
        let mut typed = self.typed.lock();
        if !typed.has_driver {
            return None;
        }
        let taken = bytes.len().min(MOST_TYPED - typed.bytes.len());
        typed.bytes.extend(&bytes[..taken]);
        // Full: it is readable already.
        let _ = self.event.write(1);
        Some(taken)
    }
}

pub(crate) struct VirtioConsole {
    to: Console,
    keyboard: Arc<Keyboard>,
}

impl VirtioConsole {
    pub(super) fn new(to: Console) -> Result<Self, VmmError> {
        let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let event = event.map_err(|error| VmmError::Config { what: "console", why: error.to_string() })?;
        Ok(Self { to, keyboard: Arc::new(Keyboard { typed: Mutex::default(), event }) })
    }

    pub(super) fn keyboard(&self) -> Arc<Keyboard> {
        Arc::clone(&self.keyboard)
    }
}

impl Backend for VirtioConsole {
    fn kind(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![64, 64]
    }

    fn configuration(&self) -> Vec<u8> {
        Vec::new()
    }

    /// What was typed goes along.
    fn state(&self) -> Vec<u8> {
        self.keyboard.typed.lock().bytes.iter().copied().collect()
    }

    fn set_state(&mut self, state: &[u8]) -> Result<(), String> {
        if state.len() > MOST_TYPED {
            return Err(format!("{} typed bytes, at most {MOST_TYPED} wait", state.len()));
        }
        self.keyboard.typed.lock().bytes = state.iter().copied().collect();
        Ok(())
    }

    fn reset(&mut self) {
        *self.keyboard.typed.lock() = Typed::default();
    }

    fn begin<'a>(
        &'a mut self,
        _features: u64,
        _space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>> {
        self.keyboard.typed.lock().has_driver = true;
        Ok(Box::new(ConsoleSession { to: &mut self.to, keyboard: &self.keyboard }))
    }
}

struct ConsoleSession<'a> {
    to: &'a mut Console,
    keyboard: &'a Keyboard,
}

impl<'a> Session<'a> for ConsoleSession<'a> {
    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        if queue == TYPED {
            return self.woken(rings);
        }
        rings[WRITTEN].answer_all(|chain| {
            // Linux writes a page at most. As with the serial port, what nobody takes is lost.
            let mut bytes = vec![0; chain.readable.len().min(MOST_WRITTEN)];
            chain.readable.read(&mut bytes);
            let _ = self.to.write_all(&bytes).and_then(|()| self.to.flush());
            Ok(0)
        })
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        // SAFETY: the descriptor is open as long as `self.keyboard`, which the result borrows.
        vec![unsafe { BorrowedFd::borrow_raw(self.keyboard.event.as_raw_fd()) }]
    }

    fn woken(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        // A driver may be ready without queues.
        let Some(ring) = rings.get_mut(TYPED) else { return Ok(()) };
        // Nothing there: a look before was faster.
        let _ = self.keyboard.event.read();
        let mut typed = self.keyboard.typed.lock();
        while !typed.bytes.is_empty() {
            let Some(chain) = ring.pop()? else {
                // The driver kicks when there is room again, unless there is by now.
                if ring.expect_kicks()? {
                    continue;
                }
                break;
            };
            let length = chain.writable.len().min(typed.bytes.len());
            let bytes: Vec<u8> = typed.bytes.drain(..length).collect();
            let written = chain.writable.write(&bytes);
            ring.push(chain.head, written as u32)?;
        }
        drop(typed);
        ring.notify()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{BUFFERS, Driver};
    use super::*;

    #[test]
    fn bytes_wait_for_a_driver_that_has_no_queue() {
        let mut driver = Driver::new();
        driver.add(&[(BUFFERS, 16, true)]);
        let mut device = VirtioConsole::new(Console::new(Box::new(io::sink()))).unwrap();
        let (keyboard, space) = (device.keyboard(), ConfigurationSpace::new(Vec::new()));
        let mut session = device.begin(0, &space).unwrap();
        assert_eq!(keyboard.type_in(b"typed"), Some(5));

        session.woken(&mut []).unwrap();

        session.woken(&mut driver.rings()).unwrap();
        drop(session);
        assert_eq!(driver.used(), [(0, 5)]);
    }
}
