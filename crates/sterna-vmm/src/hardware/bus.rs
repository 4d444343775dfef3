//! Who answers when the guest reads or writes a port, or memory that is not RAM.
//!
//! Ports nobody answers read as all ones, as on a PC; so does memory outside RAM. Writes there are lost.

use std::io;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};

use super::console::Console;
use super::virtio::VirtioDevices;
use super::vm::KvmVm;
use crate::end_reason::EndReason;
use crate::layout::{
    EXIT_PORT, KEYBOARD_PORT, KEYBOARD_RESET, PANIC_PORT, SERIAL_IRQ, SERIAL_PORT, SLEEP_PORT,
    SLEEP_STATUS_PORT, SLEEP_TYPE_OFF,
};
use crate::ports::PortRange;

/// Bit of ACPI's sleep control register.
const SLEEP_ENABLE: u8 = 1 << 5;
/// The only event of the panic port that this machine knows: reads say so.
const PANICKED: u8 = 1;

/// Raises the serial console's interrupt, at once: no event is on its way when a vCPU has stopped.
pub(crate) struct SerialInterrupt(Arc<KvmVm>);

impl Trigger for SerialInterrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        let pulse = |active| {
            self.0
                .fd()
                .set_irq_line(SERIAL_IRQ, active)
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))
        };
        pulse(true)?;
        pulse(false)
    }
}

pub(crate) type SerialDevice = Serial<SerialInterrupt, NoEvents, Console>;

pub(crate) struct Bus {
    vm: Arc<KvmVm>,
    console: Console,
    serial: Mutex<SerialDevice>,
    virtio: Arc<VirtioDevices>,
    ports: Vec<PortRange>,
}

impl Bus {
    pub(crate) fn new(
        vm: Arc<KvmVm>,
        console: Console,
        virtio: Arc<VirtioDevices>,
        ports: Vec<PortRange>,
    ) -> Self {
        let serial = Mutex::new(Serial::new(SerialInterrupt(Arc::clone(&vm)), console.clone()));
        Self { vm, console, serial, virtio, ports }
    }

    pub(crate) fn serial(&self) -> MutexGuard<'_, SerialDevice> {
        self.serial.lock()
    }

    /// Gives the console's first bytes of `bytes` to the guest, as many as its buffer takes. How many these were. The console is
    /// the virtio one if that has a driver.
    pub(crate) fn type_in(&self, bytes: &[u8]) -> usize {
        if let Some(taken) = self.virtio.type_in(bytes) {
            return taken;
        }
        // An error is a full buffer, or an interrupt that the kernel refuses: then the driver finds the bytes when it looks.
        self.serial().enqueue_raw_bytes(bytes).unwrap_or(0)
    }

    /// The parts of which a serial device with another state is made.
    pub(crate) fn serial_parts(&self) -> (SerialInterrupt, Console) {
        (SerialInterrupt(Arc::clone(&self.vm)), self.console.clone())
    }

    /// A read of memory that is not RAM.
    pub(crate) fn memory_read(&self, address: u64, data: &mut [u8]) {
        if !self.virtio.read(address, data) {
            data.fill(0xff);
        }
    }

    /// A write to memory that is not RAM.
    pub(crate) fn memory_write(&self, address: u64, data: &[u8]) {
        self.virtio.write(address, data);
    }

    /// One `in`.
    pub(crate) fn port_read(&self, port: u16, data: &mut [u8]) {
        if let Some((range, offset)) = self.range(port) {
            return range.device.read(offset, data);
        }
        data.fill(0xff);
        if let Some(offset) = serial_offset(port) {
            data[0] = self.serial().read(offset);
        } else if matches!(port, KEYBOARD_PORT | SLEEP_PORT | SLEEP_STATUS_PORT) {
            data[0] = 0;
        } else if port == PANIC_PORT {
            data[0] = PANICKED;
        }
    }

    /// One `out`. Some: the guest has ended with it.
    pub(crate) fn port_write(&self, port: u16, data: &[u8]) -> Option<EndReason> {
        if let Some((range, offset)) = self.range(port) {
            range.device.write(offset, data);
        } else if let Some(offset) = serial_offset(port) {
            if let Err(error) = self.serial().write(offset, data[0]) {
                tracing::warn!(?error, "serial console lost a byte or an interrupt");
            }
        } else {
            return match port {
                EXIT_PORT => Some(EndReason::Exited(data[0])),
                KEYBOARD_PORT if data[0] == KEYBOARD_RESET => Some(EndReason::Reset),
                SLEEP_PORT if data[0] == SLEEP_ENABLE | SLEEP_TYPE_OFF << 2 => Some(EndReason::PoweredOff),
                PANIC_PORT if data[0] & PANICKED != 0 => Some(EndReason::Panicked),
                _ => None,
            };
        }
        None
    }

    fn range(&self, port: u16) -> Option<(&PortRange, u16)> {
        self.ports.iter().find_map(|range| {
            let offset = port.checked_sub(range.first)?;
            (offset < range.count).then_some((range, offset))
        })
    }
}

fn serial_offset(port: u16) -> Option<u8> {
    port.checked_sub(SERIAL_PORT).filter(|offset| *offset < 8).map(|offset| offset as u8)
}
