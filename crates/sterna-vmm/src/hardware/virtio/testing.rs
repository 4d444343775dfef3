//! A driver of one queue for tests, with its own RAM. It can follow the rules or break them.

use sterna_ram::{Backing, GuestRam, RamBlock};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::interrupt::Interrupt;
use super::ring::{Broken, Ring};
use crate::hardware::memory::{self, DeviceMemory};
use crate::layout::Range;

pub(super) const SIZE: u16 = 16;
pub(super) const RAM_BYTES: u64 = 1 << 20;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
/// Start of free memory, after the rings.
pub(super) const BUFFERS: u64 = 0x1_0000;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

/// A descriptor as stored in the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) length: u32,
    pub(super) flags: u16,
    pub(super) next: u16,
}

pub(super) struct Driver {
    pub(super) queue: Queue,
    pub(super) interrupt: Interrupt,
    /// Declared before RAM, so that it is dropped first.
    pub(super) memory: DeviceMemory,
    pub(super) ram: GuestRam,
    next_descriptor: u16,
    added: u16,
}

impl Driver {
    pub(super) fn new() -> Self {
        let ram = GuestRam::new(vec![RamBlock::new("ram", RAM_BYTES, Backing::Memfd).unwrap()]).unwrap();
        let ranges = [Range { block: 0, start: 0, len_bytes: RAM_BYTES }];
        // SAFETY: both are parts of one value, which drops RAM last.
        let memory = unsafe { memory::view(&ram, &ranges) }.unwrap();
        let mut queue = Queue::new(SIZE).unwrap();
        queue.set_size(SIZE);
        queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
        queue.set_ready(true);
        let interrupt = Interrupt::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
        Self { queue, interrupt, memory, ram, next_descriptor: 0, added: 0 }
    }

    /// The device's side of the queue.
    pub(super) fn rings(&mut self) -> Vec<Ring<'_>> {
        vec![Ring::new(0, &self.memory, &mut self.queue, &self.interrupt).unwrap()]
    }

    /// Writes a descriptor into the table.
    pub(super) fn describe(&self, index: u16, descriptor: Descriptor) {
        let Descriptor { address, length, flags, next } = descriptor;
        let at = DESCRIPTORS + 16 * u64::from(index);
        self.put(at, &address.to_le_bytes());
        self.put(at + 8, &length.to_le_bytes());
        self.put(at + 12, &flags.to_le_bytes());
        self.put(at + 14, &next.to_le_bytes());
    }

    /// Makes the chain that begins at `head` available.
    pub(super) fn offer(&mut self, head: u16) {
        self.put(AVAILABLE + 4 + 2 * u64::from(self.added % SIZE), &head.to_le_bytes());
        self.added = self.added.wrapping_add(1);
        self.put(AVAILABLE + 2, &self.added.to_le_bytes());
    }

    /// Adds a valid chain. Each part has an address, a length, and whether the device writes to it.
    pub(super) fn add(&mut self, parts: &[(u64, u32, bool)]) -> u16 {
        let head = self.next_descriptor;
        for (index, (address, length, is_written)) in parts.iter().enumerate() {
            let is_last = index + 1 == parts.len();
            let flags = if *is_written { WRITE } else { 0 } | if is_last { 0 } else { NEXT };
            let at = self.next_descriptor;
            self.next_descriptor = (at + 1) % SIZE;
            let next = self.next_descriptor;
            self.describe(at, Descriptor { address: *address, length: *length, flags, next });
        }
        self.offer(head);
        head
    }

    /// Number of chains after which the device wants the next kick (`avail_event`).
    pub(super) fn kicked_after(&self) -> u16 {
        u16::from_le_bytes(self.get(USED + 4 + 8 * u64::from(SIZE)))
    }

    /// Chains that the device has returned: heads, and bytes written.
    pub(super) fn used(&self) -> Vec<(u16, u32)> {
        let count = u16::from_le_bytes(self.get(USED + 2));
        let word = |at| u32::from_le_bytes(self.get(at));
        let one = |index: u16| {
            let at = USED + 4 + 8 * u64::from(index % SIZE);
            (word(at) as u16, word(at + 4))
        };
        (0..count).map(one).collect()
    }

    pub(super) fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub(super) fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    /// Why the device refuses the chain in the ring.
    pub(super) fn refusal(&mut self) -> String {
        match self.rings()[0].pop() {
            Ok(chain) => panic!("{} was taken", chain.map_or(0, |chain| chain.head)),
            Err(error @ (Broken::Chain { .. } | Broken::Ring { .. })) => error.to_string(),
            Err(other) => panic!("{other}"),
        }
    }
}
