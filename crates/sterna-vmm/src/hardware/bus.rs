//! Dispatches the guest's accesses to ports and to memory that is not RAM.
//!
//! Ports and memory without a device read as all ones, as on a PC. Writes to them are ignored.

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

/// Sleep-enable bit of ACPI's sleep control register.
const SLEEP_ENABLE: u8 = 1 << 5;
/// The only event of the panic port that this machine supports. Reads return it.
const PANICKED: u8 = 1;

/// Raises the serial console's interrupt immediately. No interrupt is therefore pending elsewhere when a vCPU
/// has stopped.
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

    /// Whether a vCPU that has written to the serial port must wait. It waits while the console's gate is
    /// full.
    pub(crate) fn is_console_full(&self) -> bool {
        self.console.is_full()
    }

    /// Whether a write to this port is console output.
    pub(crate) fn is_said(&self, port: u16) -> bool {
        self.range(port).is_none() && serial_offset(port) == Some(0)
    }

    /// Types `bytes` into the console and returns how many its buffer took. The virtio console gets them if
    /// it has a driver, otherwise the serial port.
    pub(crate) fn type_in(&self, bytes: &[u8]) -> usize {
        if let Some(taken) = self.virtio.type_in(bytes) {
            return taken;
        }
        // An error means a full buffer, or an interrupt that the kernel refused. The driver then finds the
        // bytes at its next check.
        self.serial().enqueue_raw_bytes(bytes).unwrap_or(0)
    }

    /// The parts from which a serial device with a loaded state is built.
    pub(crate) fn serial_parts(&self) -> (SerialInterrupt, Console) {
        (SerialInterrupt(Arc::clone(&self.vm)), self.console.clone())
    }

    /// Handles a read of memory that is not RAM.
    pub(crate) fn memory_read(&self, address: u64, data: &mut [u8]) {
        if !self.virtio.read(address, data) {
            data.fill(0xff);
        }
    }

    /// Handles a write to memory that is not RAM.
    pub(crate) fn memory_write(&self, address: u64, data: &[u8]) {
        self.virtio.write(address, data);
    }

    /// Handles one `in`.
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

    /// Handles one `out`. Some if the write ended the guest.
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
