//! Virtio devices without KVM, for the fuzz target of their queues. The target acts as the guest's driver.
//! Interrupts to the guest are discarded.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use sterna::FreePages;
use sterna_ram::{Backing, GuestRam, RamBlock};
use vm_memory::{Bytes, GuestAddress};

use crate::config::MachineConfig;
use crate::devices::codec::{Fields, StateError};
use crate::devices::virtio;
use crate::error::VmmError;
use crate::hardware::console::Console;
use crate::hardware::memory::VmRam;
use crate::hardware::virtio::{Transport, VirtioDevices};
use crate::layout::{Range, virtio_address};

/// One virtio device with its own RAM.
pub struct Bench {
    devices: VirtioDevices,
    ram: Arc<VmRam>,
}

impl Bench {
    /// The first device of a configuration that has one. RAM lies at these guest-physical ranges (first byte,
    /// length).
    ///
    /// # Errors
    /// The same as for a machine.
    pub fn new(config: &mut MachineConfig, ram: &[(u64, u64)]) -> Result<Self, VmmError> {
        let ram = make_ram(ram)?;
        let console = Console::at_gate(std::mem::replace(&mut config.serial, Box::new(io::sink())), None);
        Ok(Self { devices: VirtioDevices::new(config, &ram, &[], &console)?, ram })
    }

    /// A network card with one queue pair per socket. Each socket receives and supplies the pair's packets.
    ///
    /// # Errors
    /// The same as for a machine.
    pub fn card(sockets: Vec<UnixDatagram>, ram: &[(u64, u64)]) -> Result<Self, VmmError> {
        let ram = make_ram(ram)?;
        Ok(Self { devices: VirtioDevices::of_card(&ram, sockets)?, ram })
    }

    /// Reads a register as the driver does.
    pub fn read(&self, offset: u64, to: &mut [u8]) {
        self.devices.read(virtio_address(0) + offset, to);
    }

    /// Writes a register as the driver does.
    pub fn write(&self, offset: u64, from: &[u8]) {
        self.devices.write(virtio_address(0) + offset, from);
    }

    /// Starts the device's workers, before the guest runs.
    pub fn run(&self) {
        self.devices.run();
    }

    /// Pauses the device. On return no request is in flight.
    pub fn pause(&self) {
        self.devices.pause();
    }

    /// The device's state. The device must be paused.
    pub fn save(&self) -> Vec<u8> {
        virtio::save(self.transport())
    }

    /// Loads a state. The device must be paused.
    ///
    /// # Errors
    /// [`StateError`] if `body` is no valid state of this device.
    pub fn load(&self, body: &[u8]) -> Result<(), StateError> {
        let mut fields = Fields::parse(body)?;
        virtio::load(self.transport(), &mut fields)?;
        fields.finish()
    }

    /// Types `bytes` into a console. Returns the number of bytes taken.
    pub fn type_in(&self, bytes: &[u8]) -> usize {
        self.devices.type_in(bytes).unwrap_or(0)
    }

    /// Asks the driver for unused memory, runs `until`, then ends the request. Does nothing if the driver
    /// does not support it.
    pub fn ask_for_free_pages(&self, free: FreePages, until: impl FnOnce()) {
        if let Some(hints) = self.devices.free_page_hints() {
            hints.begin(free);
            until();
            hints.stop();
            hints.end();
        }
    }

    /// Reads guest memory. False if part of the range is not RAM.
    pub fn read_memory(&self, at: u64, to: &mut [u8]) -> bool {
        self.ram.memory().read_slice(to, GuestAddress(at)).is_ok()
    }

    /// Writes guest memory. False if part of the range is not RAM.
    pub fn write_memory(&self, at: u64, from: &[u8]) -> bool {
        self.ram.memory().write_slice(from, GuestAddress(at)).is_ok()
    }

    fn transport(&self) -> &Transport {
        &self.devices.all()[0]
    }
}

fn make_ram(places: &[(u64, u64)]) -> Result<Arc<VmRam>, VmmError> {
    let ranges = places.iter().enumerate().map(|(block, (start, bytes))| Range {
        block,
        start: *start,
        len_bytes: *bytes,
    });
    let ranges: Vec<_> = ranges.collect();
    let blocks = ranges.iter().map(|range| {
        let block = RamBlock::new(format!("ram{}", range.block), range.len_bytes, Backing::Memfd)?;
        Ok::<_, VmmError>(block.at_guest_address(range.start))
    });
    let ram = GuestRam::new(blocks.collect::<Result<_, _>>()?)?;
    VmRam::new(ram, ranges).map(Arc::new)
}
