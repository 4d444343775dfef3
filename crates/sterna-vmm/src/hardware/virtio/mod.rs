//! Virtio devices that this process or another one serves. Each has a slot at an address that ACPI's tables
//! name.
//!
//! | module | contains |
//! | --- | --- |
//! | [`transport`] | the registers of virtio-mmio, common to all devices |
//! | [`worker`] | the thread of a device whose driver is ready |
//! | [`ring`], [`buffers`] | queues and guest memory, which are checked before use |
//! | [`space`], [`interrupt`] | notifications from a device to its driver |
//! | [`state`], [`capacity`] | the state that migrates; disks that grow |
//! | [`backend`] | the interface of a kind of device |
//! | [`block`], [`net`], [`console`], [`free_pages`] with [`hinting`], [`entropy`] | the kinds of devices |
//! | [`vhost_user`] | devices that another process serves |
//!
//! The transport is virtio-mmio instead of PCI, because it needs no buses, capabilities and MSI tables. Linux
//! also finds it through ACPI (`LNRO0005`).
//!
//! A driver that breaks a rule harms only its own guest. Its device stops, logs a line, and reports that it
//! needs a reset.

pub(crate) mod backend;
pub(crate) mod block;
mod buffers;
mod capacity;
pub(crate) mod console;
pub(crate) mod entropy;
pub(crate) mod free_pages;
mod hinting;
mod interrupt;
pub(crate) mod net;
mod ring;
mod space;
mod state;
#[cfg(test)]
mod testing;
mod transport;
mod vhost_user;
mod worker;

use std::sync::Arc;

use sterna::{FreePageHints, Hook, HostDescriptors};
use sterna_devices::vhost_user::VhostUserDevice;
use sterna_ram::DirtySource;
use sterna_ram::dirty::AtomicBitmapLog;
use sterna_standby::{EpochGate, PacketGate};

use super::console::Console;
use super::memory::VmRam;
use super::vm::KvmVm;
use crate::config::MachineConfig;
use crate::error::VmmError;
use crate::layout::{VIRTIO_BYTES, VIRTIO_MAX, virtio_address};
use backend::Backend;
pub(crate) use capacity::Said;
use hinting::{Asker, Hinting};
pub(crate) use state::TransportState;
pub(crate) use transport::{Identity, Transport};

/// All virtio devices of a machine, in the order of its configuration, disks first.
pub(crate) struct VirtioDevices {
    all: Vec<Arc<Transport>>,
    hooks: Vec<Arc<dyn Hook>>,
    announcers: Vec<Arc<net::Announcer>>,
    /// Host descriptors that network cards have open.
    taps: Vec<Arc<dyn HostDescriptors>>,
    keyboard: Option<Arc<console::Keyboard>>,
    asker: Option<Asker>,
    /// The gate of the guest's packets, if it has network cards.
    packets: Option<Arc<PacketGate>>,
}

/// Highest number of bytes in packets that wait for a checkpoint. At the limit, the guest waits.
const PACKETS_LIMIT: u64 = 16 << 20;

impl VirtioDevices {
    /// Builds the devices; those of other processes come last. Their drivers find them reset.
    /// [`Self::connect`] must follow.
    pub(crate) fn new(
        config: &MachineConfig,
        ram: &Arc<VmRam>,
        processes: &[Arc<VhostUserDevice>],
        to: &Console,
    ) -> Result<Self, VmmError> {
        let mut backends: Vec<(String, Box<dyn Backend>)> = Vec::new();
        let mut hooks = Vec::new();
        for (index, options) in config.disks.iter().enumerate() {
            let (device, hook) = block::open(index, options, config.incoming)?;
            hooks.extend(hook);
            backends.push((format!("disk {index}"), Box::new(device)));
        }
        let mut announcers = Vec::new();
        let mut taps: Vec<Arc<dyn HostDescriptors>> = Vec::new();
        let packets = (!config.nets.is_empty()).then(packet_gate).transpose()?;
        for ((index, options), gate) in config.nets.iter().enumerate().zip(packets.iter().cycle()) {
            let may_wait = config.incoming && config.takes_over;
            let card = net::open(index, options, &config.name, gate, may_wait)?;
            let held = Arc::new(card.taps(index, &options.tap));
            hooks.push(Arc::clone(&held) as Arc<dyn Hook>);
            taps.push(held);
            announcers.push((backends.len(), card.announcer()));
            backends.push((format!("network card {index}"), Box::new(card)));
        }
        let mut hinting = None;
        if config.free_page_reporting || config.free_page_hinting {
            let hints = config.free_page_hinting.then(Arc::<Hinting>::default);
            let reports = config.free_page_reporting;
            let device = free_pages::FreePages::new(ram.ram().clone(), reports, hints.clone());
            hinting = hints.map(|hints| (backends.len(), hints));
            backends.push(("free pages".to_owned(), Box::new(device)));
        }
        let mut keyboard = None;
        if config.virtio_console {
            let device = console::VirtioConsole::new(to.clone())?;
            keyboard = Some(device.keyboard());
            backends.push(("console".to_owned(), Box::new(device)));
        }
        if config.entropy {
            backends.push(("entropy".to_owned(), Box::new(entropy::Entropy::new()?)));
        }
        for (name, device) in vhost_user::seen(processes)? {
            backends.push((name, Box::new(device)));
        }
        if backends.len() > VIRTIO_MAX {
            let why = format!("{} virtio devices, at most {VIRTIO_MAX} have a place", backends.len());
            return Err(VmmError::Config { what: "virtio", why });
        }
        let transport = |(name, backend)| Transport::new(ram, name, backend).map(Arc::new);
        let all: Vec<_> = backends.into_iter().map(transport).collect::<Result<_, _>>()?;
        let placed = announcers.into_iter().enumerate();
        let announcers: Vec<_> =
            placed.map(|(index, (slot, announcer))| announcer(index, Arc::clone(&all[slot]))).collect();
        hooks.extend(announcers.iter().map(|announcer| Arc::clone(announcer) as Arc<dyn Hook>));
        let asker = hinting.map(|(slot, hinting)| Asker::new(&all[slot], hinting));
        Ok(Self { all, hooks, announcers, taps, keyboard, asker, packets })
    }

    /// Host descriptors that network cards have open.
    pub(crate) fn taps(&self) -> &[Arc<dyn HostDescriptors>] {
        &self.taps
    }

    /// A single network card that exchanges packets with sockets.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn of_card(
        ram: &Arc<VmRam>,
        sockets: Vec<std::os::unix::net::UnixDatagram>,
    ) -> Result<Self, VmmError> {
        let refuse = |error: std::io::Error| VmmError::Config { what: "net", why: error.to_string() };
        let gate = packet_gate()?;
        let card = Box::new(net::Card::of_sockets(sockets, &gate).map_err(refuse)?);
        let all = vec![Arc::new(Transport::new(ram, "network card 0".to_owned(), card)?)];
        let packets = Some(gate);
        Ok(Self {
            all,
            hooks: Vec::new(),
            announcers: Vec::new(),
            taps: Vec::new(),
            keyboard: None,
            asker: None,
            packets,
        })
    }

    /// Connects every device to its slot.
    pub(crate) fn connect(&self, vm: &KvmVm) -> Result<(), VmmError> {
        self.all.iter().enumerate().try_for_each(|(slot, device)| device.connect(vm, slot))
    }

    /// All devices, in the order of their slots.
    pub(crate) fn all(&self) -> &[Arc<Transport>] {
        &self.all
    }

    /// Like [`console::Keyboard::type_in`]. `None` without a console.
    pub(crate) fn type_in(&self, bytes: &[u8]) -> Option<usize> {
        self.keyboard.as_ref()?.type_in(bytes)
    }

    /// Hooks that hand resources over with the guest.
    pub(crate) fn hooks(&self) -> &[Arc<dyn Hook>] {
        &self.hooks
    }

    /// The gate for packets of the guest's network cards while the guest is protected.
    pub(crate) fn packet_gate(&self) -> Option<Arc<dyn EpochGate>> {
        self.packets.clone().map(|gate| gate as _)
    }

    /// The free page hints, if the guest has a driver for them now.
    pub(crate) fn free_page_hints(&self) -> Option<&dyn FreePageHints> {
        let asker = self.asker.as_ref().filter(|asker| asker.is_of_use())?;
        Some(asker)
    }

    /// Announcers of the guest's location, one per card.
    pub(crate) fn announcers(&self) -> &[Arc<net::Announcer>] {
        &self.announcers
    }

    /// The dirty source for the devices' writes.
    pub(crate) fn dirty_source(&self, vm: &KvmVm) -> Result<Option<Arc<dyn DirtySource>>, VmmError> {
        if self.all.is_empty() {
            return Ok(None);
        }
        Ok(Some(Arc::new(AtomicBitmapLog::new(vm.ram(), vm.memory())?)))
    }

    /// Starts the devices, before the guest runs.
    pub(crate) fn run(&self) {
        self.all.iter().for_each(|device| device.run());
    }

    /// Pauses the devices, after the guest was paused. On return no request is in flight, and no device
    /// writes guest memory.
    pub(crate) fn pause(&self) {
        self.all.iter().for_each(|device| device.pause());
    }

    /// Handles a driver's read. False if there is no device at the address.
    pub(crate) fn read(&self, address: u64, to: &mut [u8]) -> bool {
        self.find(address).is_some_and(|(device, offset)| {
            device.read(offset, to);
            true
        })
    }

    /// Handles a driver's write.
    pub(crate) fn write(&self, address: u64, from: &[u8]) {
        if let Some((device, offset)) = self.find(address) {
            device.write(offset, from);
        }
    }

    fn find(&self, address: u64) -> Option<(&Transport, u64)> {
        let at = address.checked_sub(virtio_address(0))?;
        let device = self.all.get(usize::try_from(at / VIRTIO_BYTES).ok()?)?;
        Some((device, at % VIRTIO_BYTES))
    }
}

fn packet_gate() -> Result<Arc<PacketGate>, VmmError> {
    let gate = PacketGate::new(PACKETS_LIMIT).map(Arc::new);
    gate.map_err(|error| VmmError::Config { what: "net", why: error.to_string() })
}
