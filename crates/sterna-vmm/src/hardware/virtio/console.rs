//! A console with one port: VIRTIO 1.2, section 5.3. It shares its output sink with the serial port.

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
/// Highest number of typed bytes that wait for the guest.
const MOST_TYPED: usize = 4096;
/// Highest number of bytes written per request of the guest.
const MOST_WRITTEN: usize = 64 << 10;

/// Typed bytes that the guest has not read yet.
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
    /// Takes the first of `bytes`, as many as there is room for. `None` if the console has no driver.
    pub(crate) fn type_in(&self, bytes: &[u8]) -> Option<usize> {
        let mut typed = self.typed.lock();
        if !typed.has_driver {
            return None;
        }
        let taken = bytes.len().min(MOST_TYPED - typed.bytes.len());
        typed.bytes.extend(&bytes[..taken]);
        // The write fails only if the counter is full; then the event is already readable.
        let _ = self.event.write(1);
        Some(taken)
    }
}

pub(crate) struct VirtioConsole {
    to: Console,
    keyboard: Arc<Keyboard>,
    /// Readable when the console takes bytes again after it was full.
    room: Arc<EventFd>,
}

impl VirtioConsole {
    pub(super) fn new(to: Console) -> Result<Self, VmmError> {
        let event = || {
            let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
            event.map_err(|error| VmmError::Config { what: "console", why: error.to_string() })
        };
        let (event, room) = (event()?, Arc::new(event()?));
        let tells = Arc::clone(&room);
        to.when_room(move || {
            // The write cannot fail, because the counter is far from its maximum.
            let _ = tells.write(1);
        });
        Ok(Self { to, keyboard: Arc::new(Keyboard { typed: Mutex::default(), event }), room })
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

    /// The typed bytes that the guest has not read migrate with it.
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
        Ok(Box::new(ConsoleSession {
            to: &mut self.to,
            keyboard: &self.keyboard,
            room: &self.room,
            is_held_up: false,
        }))
    }
}

struct ConsoleSession<'a> {
    to: &'a mut Console,
    keyboard: &'a Keyboard,
    room: &'a EventFd,
    /// Whether the guest's output stays in its queue because the console is full.
    is_held_up: bool,
}

impl<'a> ConsoleSession<'a> {
    /// Writes the guest's output while the console has room.
    fn write_out(&mut self, ring: &mut Ring<'a>) -> Result<(), Broken> {
        loop {
            ring.ignore_kicks()?;
            while let Some(chain) = ring.pop()? {
                self.is_held_up = self.to.is_full();
                if self.is_held_up {
                    // The console wakes this thread, which then continues with the queue.
                    ring.put_back(1);
                    return ring.notify();
                }
                // Linux writes at most a page. As with the serial port, bytes that the host does not take are
                // lost.
                let mut bytes = vec![0; chain.readable.len().min(MOST_WRITTEN)];
                chain.readable.read(&mut bytes);
                let _ = self.to.write_all(&bytes).and_then(|()| self.to.flush());
                ring.push(chain.head, 0)?;
            }
            ring.notify()?;
            if !ring.expect_kicks()? {
                return Ok(());
            }
        }
    }
}

impl<'a> Session<'a> for ConsoleSession<'a> {
    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        if queue == TYPED {
            return self.woken(rings);
        }
        self.write_out(&mut rings[WRITTEN])
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        // SAFETY: the descriptor is open as long as `self.keyboard`, which the result borrows.
        let typed = unsafe { BorrowedFd::borrow_raw(self.keyboard.event.as_raw_fd()) };
        // SAFETY: the same holds for `self.room`.
        let room = unsafe { BorrowedFd::borrow_raw(self.room.as_raw_fd()) };
        vec![typed, room]
    }

    fn woken(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        // An error means that an earlier call has read the event.
        let _ = self.room.read();
        if self.is_held_up
            && let Some(ring) = rings.get_mut(WRITTEN)
        {
            self.write_out(ring)?;
        }
        // A driver may be ready without queues.
        let Some(ring) = rings.get_mut(TYPED) else { return Ok(()) };
        // An error means that an earlier call has read the event.
        let _ = self.keyboard.event.read();
        let mut typed = self.keyboard.typed.lock();
        while !typed.bytes.is_empty() {
            let Some(chain) = ring.pop()? else {
                // The driver kicks when it adds buffers, unless it has added some already.
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
    use sterna_standby::{ByteGate, EpochGate};

    use super::super::testing::{BUFFERS, Driver};
    use super::*;

    struct Putting(Arc<ByteGate>);

    impl Write for Putting {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.put(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn guests_bytes_stay_in_the_queue_while_the_console_is_full() {
        let gate = Arc::new(ByteGate::new(16, |_| {}).unwrap());
        gate.close(Box::new(|_| true));
        let to = Console::at_gate(Box::new(Putting(Arc::clone(&gate))), Some(Arc::clone(&gate)));
        let (mut typed, mut written) = (Driver::new(), Driver::new());
        for _ in 0..3 {
            written.add(&[(BUFFERS, 16, false)]);
        }
        let mut device = VirtioConsole::new(to).unwrap();
        let (room, space) = (Arc::clone(&device.room), ConfigurationSpace::new(Vec::new()));
        let mut session = device.begin(0, &space).unwrap();
        let mut rings = [typed.rings().remove(0), written.rings().remove(0)];

        session.kicked(&mut rings, WRITTEN).unwrap();

        assert_eq!(gate.statistics().waiting_bytes, 16, "the second chain would be too much");
        gate.end_epoch(1);
        gate.release(1);
        assert!(gate.wait_until_empty(std::time::Duration::from_secs(60)));
        let is_told = || {
            (0..1000).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(1));
                room.read().is_ok()
            })
        };
        assert!(is_told(), "the device's thread is woken");
        session.woken(&mut rings).unwrap();
        assert_eq!(gate.statistics().waiting_bytes, 16);
        drop((session, rings));
        assert_eq!(written.used().len(), 2);
    }

    #[test]
    fn bytes_wait_for_a_driver_that_has_no_queue() {
        let mut driver = Driver::new();
        driver.add(&[(BUFFERS, 16, true)]);
        let mut device = VirtioConsole::new(Console::at_gate(Box::new(io::sink()), None)).unwrap();
        let (keyboard, space) = (device.keyboard(), ConfigurationSpace::new(Vec::new()));
        let mut session = device.begin(0, &space).unwrap();
        assert_eq!(keyboard.type_in(b"typed"), Some(5));

        session.woken(&mut []).unwrap();

        session.woken(&mut driver.rings()).unwrap();
        drop(session);
        assert_eq!(driver.used(), [(0, 5)]);
    }
}
