//! A virtqueue as a device uses it: what the driver made available, checked before anything of it is used, and its
//! return.

use std::io;

use sterna_devices::vhost_user::{self, VhostUserError};
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_INT_VRING;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryBackend;

use super::buffers::Buffers;
use super::interrupt::Interrupt;
use crate::hardware::memory::DeviceMemory;

/// Why a device cannot go on until its driver has reset it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("queue {queue}: its rings lie outside of RAM, or are not what their size says")]
    Place { queue: usize },
    #[error("queue {queue}: {source}")]
    Ring { queue: usize, source: virtio_queue::Error },
    #[error("queue {queue}, descriptor chain {head}: {why}")]
    Chain { queue: usize, head: u16, why: String },
    #[error("the host: {0}")]
    Host(#[from] io::Error),
    #[error(transparent)]
    Process(#[from] VhostUserError),
}

/// Pieces of a chain, at most: as many as a system call takes.
const MOST_PIECES: usize = 1024;

/// A queue that works.
pub(crate) struct Ring<'a> {
    index: usize,
    memory: &'a DeviceMemory,
    queue: &'a mut Queue,
    interrupt: &'a Interrupt,
}

/// One of the driver's buffers, or several that belong together.
pub(crate) struct Chain<'a> {
    /// By which it is returned.
    pub(crate) head: u16,
    /// What the driver says.
    pub(crate) readable: Buffers<'a>,
    /// Where the device answers.
    pub(crate) writable: Buffers<'a>,
}

impl<'a> Ring<'a> {
    /// Queue number `index`, which its driver has made ready.
    pub(crate) fn new(
        index: usize,
        memory: &'a DeviceMemory,
        queue: &'a mut Queue,
        interrupt: &'a Interrupt,
    ) -> Result<Self, Broken> {
        match queue.is_valid(memory) {
            true => Ok(Self { index, memory, queue, interrupt }),
            false => Err(Broken::Place { queue: index }),
        }
    }

    /// Where it is, for another process.
    pub(crate) fn place(&self) -> vhost_user::Ring {
        vhost_user::Ring {
            size: self.queue.size(),
            descriptors: self.queue.desc_table(),
            available: self.queue.avail_ring(),
            used: self.queue.used_ring(),
            base: self.queue.next_avail(),
        }
    }

    /// Interrupts the driver, whether it wants that or not.
    pub(crate) fn interrupt(&self, cause: u32) {
        self.interrupt.raise(cause);
    }

    /// The next chain, if there is one.
    pub(crate) fn pop(&mut self) -> Result<Option<Chain<'a>>, Broken> {
        let index = self.index;
        let available = self.queue.iter(self.memory).map(|mut chains| chains.next());
        let chain = available.map_err(|source| Broken::Ring { queue: index, source })?;
        chain.map(|chain| self.checked(chain)).transpose()
    }

    /// The last so many chains that were taken stand in the ring again, in their order.
    pub(crate) fn put_back(&mut self, chains: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(chains));
    }

    /// Returns a chain; so many bytes were written into it.
    pub(crate) fn push(&mut self, head: u16, written: u32) -> Result<(), Broken> {
        self.queue.add_used(self.memory, head, written).map_err(|source| self.failed(source))
    }

    /// Returns every chain; `answer` gives how many bytes it has written into it.
    pub(crate) fn answer_all(
        &mut self,
        mut answer: impl FnMut(&Chain<'a>) -> Result<usize, Broken>,
    ) -> Result<(), Broken> {
        loop {
            self.ignore_kicks()?;
            while let Some(chain) = self.pop()? {
                let written = answer(&chain)?;
                self.push(chain.head, written as u32)?;
            }
            self.notify()?;
            if !self.expect_kicks()? {
                return Ok(());
            }
        }
    }

    /// Interrupts the driver, if it wants to know of what was returned.
    pub(crate) fn notify(&mut self) -> Result<(), Broken> {
        if self.queue.needs_notification(self.memory).map_err(|source| self.failed(source))? {
            self.interrupt.raise(VIRTIO_MMIO_INT_VRING);
        }
        Ok(())
    }

    /// The driver need not kick for what it adds, since the device looks by itself.
    pub(crate) fn ignore_kicks(&mut self) -> Result<(), Broken> {
        self.queue.disable_notification(self.memory).map_err(|source| self.failed(source))
    }

    /// The driver kicks for what it adds from now on. Says whether it has added something meanwhile.
    pub(crate) fn expect_kicks(&mut self) -> Result<bool, Broken> {
        self.queue.enable_notification(self.memory).map_err(|source| self.failed(source))
    }

    /// The driver broke a rule with this chain.
    pub(crate) fn refuse(&self, head: u16, why: impl Into<String>) -> Broken {
        Broken::Chain { queue: self.index, head, why: why.into() }
    }

    fn failed(&self, source: virtio_queue::Error) -> Broken {
        Broken::Ring { queue: self.index, source }
    }

    fn checked(&self, chain: DescriptorChain<&'a DeviceMemory>) -> Result<Chain<'a>, Broken> {
        let head = chain.head_index();
        let mut checked = Chain { head, readable: Buffers::default(), writable: Buffers::default() };
        // A chain that leaves its table, or comes back to a part of itself, is cut there.
        let mut is_cut = true;
        for (number, descriptor) in chain.enumerate() {
            if number == MOST_PIECES {
                return Err(self.refuse(head, format!("it has more than {MOST_PIECES} pieces")));
            }
            is_cut = descriptor.has_next();
            let part = match descriptor.is_write_only() {
                true => &mut checked.writable,
                false if !checked.writable.is_empty() => {
                    return Err(self.refuse(head, "what the device reads comes after what it writes"));
                }
                false => &mut checked.readable,
            };
            let (address, length) = (descriptor.addr(), descriptor.len() as usize);
            for slice in GuestMemoryBackend::get_slices(self.memory, address, length) {
                let why = || format!("{length} bytes from {:#x} on are not in RAM", address.0);
                part.push(slice.map_err(|_| self.refuse(head, why()))?);
            }
        }
        match is_cut {
            true => Err(self.refuse(head, "it does not end, or leaves its table")),
            false => Ok(checked),
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::bitmap::Bitmap;
    use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

    use super::super::testing::{BUFFERS, Descriptor, Driver, INDIRECT, NEXT, RAM_BYTES, SIZE, WRITE};

    #[test]
    fn chain_is_taken_and_returned_and_the_driver_is_told() {
        let mut driver = Driver::new();
        driver.put(BUFFERS, b"question");
        let head = driver.add(&[(BUFFERS, 8, false), (BUFFERS + 100, 4, true), (BUFFERS + 200, 10, true)]);
        let mut rings = driver.rings();
        let chain = rings[0].pop().unwrap().unwrap();
        let mut question = [0; 20];
        assert_eq!((chain.readable.read(&mut question), &question[..8]), (8, &b"question"[..]));
        assert_eq!(chain.writable.write(b"an answer"), 9);
        rings[0].push(chain.head, 9).unwrap();
        rings[0].notify().unwrap();
        assert!(rings[0].pop().unwrap().is_none());
        drop(rings);

        assert_eq!(driver.used(), [(head, 9)]);
        assert_eq!((driver.get(BUFFERS + 100), driver.get(BUFFERS + 200)), (*b"an a", *b"nswer"));
        assert_eq!(driver.interrupt.causes(), 1);
    }

    #[test]
    fn what_a_device_writes_is_found() {
        let mut driver = Driver::new();
        driver.add(&[(BUFFERS + 0x5000, 4, true)]);
        let is_dirty = |driver: &Driver, at: u64| {
            let region = driver.memory.find_region(GuestAddress(0)).unwrap();
            region.bitmap().dirty_at(at as usize)
        };
        assert!(!is_dirty(&driver, BUFFERS + 0x5000));
        let mut rings = driver.rings();
        let chain = rings[0].pop().unwrap().unwrap();
        chain.writable.were_written();
        drop((chain, rings));

        assert!(is_dirty(&driver, BUFFERS + 0x5000) && !is_dirty(&driver, BUFFERS + 0x6000));
    }

    #[test]
    fn chain_that_breaks_a_rule_is_refused() {
        let buffer = Descriptor { address: BUFFERS, length: 8, flags: 0, next: 0 };
        let cases: [(&str, &[Descriptor]); 8] = [
            ("does not end", &[Descriptor { flags: NEXT, ..buffer }]),
            ("leaves its table", &[Descriptor { flags: NEXT, next: SIZE, ..buffer }]),
            ("not in RAM", &[Descriptor { address: RAM_BYTES - 4, ..buffer }]),
            ("not in RAM", &[Descriptor { address: u64::MAX - 4, ..buffer }]),
            ("not in RAM", &[Descriptor { length: u32::MAX, ..buffer }]),
            ("comes after", &[Descriptor { flags: WRITE | NEXT, next: 1, ..buffer }, buffer]),
            // A table in a table, and one that is no whole number of descriptors.
            ("does not end", &[Descriptor { flags: INDIRECT, length: 8, ..buffer }]),
            (
                "does not end",
                &[Descriptor { flags: INDIRECT | NEXT, address: RAM_BYTES, length: 16, next: 1 }],
            ),
        ];
        for (says, table) in cases {
            let mut driver = Driver::new();
            (0..).zip(table).for_each(|(index, descriptor)| driver.describe(index, *descriptor));
            driver.offer(0);
            let why = driver.refusal();
            assert!(why.contains(says), "{table:?}: {why}");
        }
        // A table of more pieces than any system call takes.
        let mut driver = Driver::new();
        for piece in 0..2000u64 {
            let words = [&BUFFERS.to_le_bytes()[..], &1u32.to_le_bytes(), &NEXT.to_le_bytes()].concat();
            driver.put(BUFFERS + 0x1000 + 16 * piece, &words);
            driver.put(BUFFERS + 0x1000 + 16 * piece + 14, &(piece as u16 + 1).to_le_bytes());
        }
        let table = Descriptor { address: BUFFERS + 0x1000, length: 16 * 2000, flags: INDIRECT, next: 0 };
        driver.describe(0, table);
        driver.offer(0);
        assert!(driver.refusal().contains("more than 1024 pieces"));
        let mut driver = Driver::new();
        driver.offer(SIZE);
        assert!(driver.refusal().contains("does not end"));
        // More than fit into the ring.
        let mut driver = Driver::new();
        (0..=SIZE).for_each(|_| driver.offer(0));
        assert!(driver.refusal().contains("queue 0"));
    }
}
