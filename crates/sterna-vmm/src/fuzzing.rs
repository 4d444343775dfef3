//! Virtio devices without KVM, for the fuzz target of their queues: a target takes the driver's part, and what would interrupt
//! the guest goes nowhere.

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

/// One device with RAM of its own.
pub struct Bench {
    devices: VirtioDevices,
    ram: Arc<VmRam>,
}

impl Bench {
    /// The first device of a configuration that has one, over RAM that lies at these addresses (first byte, length).
    ///
    /// # Errors
    /// As of a machine.
    pub fn new(config: &mut MachineConfig, ram: &[(u64, u64)]) -> Result<Self, VmmError> {
        let ram = make_ram(ram)?;
        let console = Console::new(std::mem::replace(&mut config.serial, Box::new(io::sink())));
        Ok(Self { devices: VirtioDevices::new(config, &ram, &[], &console)?, ram })
    }

    /// A network card with a pair of queues for each socket, which takes and gives its packets.
    ///
    /// # Errors
    /// As of a machine.
    pub fn card(sockets: Vec<UnixDatagram>, ram: &[(u64, u64)]) -> Result<Self, VmmError> {
        let ram = make_ram(ram)?;
        Ok(Self { devices: VirtioDevices::of_card(&ram, sockets)?, ram })
    }

    /// The driver reads a register.
    pub fn read(&self, offset: u64, to: &mut [u8]) {
        self.devices.read(virtio_address(0) + offset, to);
    }

    /// The driver writes a register.
    pub fn write(&self, offset: u64, from: &[u8]) {
        self.devices.write(virtio_address(0) + offset, from);
    }

    /// The guest is about to run.
    pub fn run(&self) {
        self.devices.run();
    }

    /// The guest stands still: on return nothing is in flight.
    pub fn pause(&self) {
        self.devices.pause();
    }

    /// The state of a device whose guest stands still.
    pub fn save(&self) -> Vec<u8> {
        virtio::save(self.transport())
    }

    /// Loads a state; the guest stands still.
    ///
    /// # Errors
    /// It is none.
    pub fn load(&self, body: &[u8]) -> Result<(), StateError> {
        let mut fields = Fields::parse(body)?;
        virtio::load(self.transport(), &mut fields)?;
        fields.finish()
    }

    /// Types into a console. Gives how many bytes were taken.
    pub fn type_in(&self, bytes: &[u8]) -> usize {
        self.devices.type_in(bytes).unwrap_or(0)
    }

    /// Asks for memory that the guest does not use, and says that this is over; if the driver can be asked.
    pub fn ask_for_free_pages(&self, free: FreePages, until: impl FnOnce()) {
        if let Some(hints) = self.devices.free_page_hints() {
            hints.begin(free);
            until();
            hints.stop();
            hints.end();
        }
    }

    /// Guest memory as the guest reads it. False: not all of it is RAM.
    pub fn read_memory(&self, at: u64, to: &mut [u8]) -> bool {
        self.ram.memory().read_slice(to, GuestAddress(at)).is_ok()
    }

    /// The guest writes its memory. False: not all of it is RAM.
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
