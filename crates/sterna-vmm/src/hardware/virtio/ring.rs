//! The device's side of a virtqueue. It checks every chain that the driver made available before use, and
//! returns it.

use std::io;

use sterna_devices::vhost_user::{self, VhostUserError};
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_INT_VRING;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryBackend;

use super::buffers::Buffers;
use super::interrupt::Interrupt;
use crate::hardware::memory::DeviceMemory;

/// Why a device cannot continue until its driver resets it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("queue {queue}: its rings are outside of RAM, or do not have the size that the driver set")]
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

/// Highest number of pieces in a chain: as many as a system call accepts.
const MOST_PIECES: usize = 1024;

/// A queue in use.
pub(crate) struct Ring<'a> {
    index: usize,
    memory: &'a DeviceMemory,
    queue: &'a mut Queue,
    interrupt: &'a Interrupt,
}

/// A descriptor chain: one buffer of the driver, or several that belong together.
pub(crate) struct Chain<'a> {
    /// Number of the first descriptor, which identifies the chain when it is returned.
    pub(crate) head: u16,
    /// Buffers that the driver wrote for the device.
    pub(crate) readable: Buffers<'a>,
    /// Buffers that the device writes to.
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

    /// Addresses and size of the queue, for another process.
    pub(crate) fn place(&self) -> vhost_user::Ring {
        vhost_user::Ring {
            size: self.queue.size(),
            descriptors: self.queue.desc_table(),
            available: self.queue.avail_ring(),
            used: self.queue.used_ring(),
            base: self.queue.next_avail(),
        }
    }

    /// Interrupts the driver, even if it suppresses notifications.
    pub(crate) fn interrupt(&self, cause: u32) {
        self.interrupt.raise(cause);
    }

    /// Takes the next chain, if there is one.
    pub(crate) fn pop(&mut self) -> Result<Option<Chain<'a>>, Broken> {
        let index = self.index;
        let available = self.queue.iter(self.memory).map(|mut chains| chains.next());
        let chain = available.map_err(|source| Broken::Ring { queue: index, source })?;
        chain.map(|chain| self.checked(chain)).transpose()
    }

    /// Puts the last `chains` chains that were taken back into the ring, in their order.
    pub(crate) fn put_back(&mut self, chains: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(chains));
    }

    /// Returns a chain into which `written` bytes were written.
    pub(crate) fn push(&mut self, head: u16, written: u32) -> Result<(), Broken> {
        self.queue.add_used(self.memory, head, written).map_err(|source| self.failed(source))
    }

    /// Returns every chain. `answer` returns the number of bytes that it wrote.
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

    /// Interrupts the driver for returned chains, unless it suppresses notifications.
    pub(crate) fn notify(&mut self) -> Result<(), Broken> {
        if self.queue.needs_notification(self.memory).map_err(|source| self.failed(source))? {
            self.interrupt.raise(VIRTIO_MMIO_INT_VRING);
        }
        Ok(())
    }

    /// Tells the driver that no kicks are needed. The device checks the queue by itself.
    pub(crate) fn ignore_kicks(&mut self) -> Result<(), Broken> {
        self.queue.disable_notification(self.memory).map_err(|source| self.failed(source))
    }

    /// Enables kicks. True if the driver has added a chain meanwhile.
    pub(crate) fn expect_kicks(&mut self) -> Result<bool, Broken> {
        self.queue.enable_notification(self.memory).map_err(|source| self.failed(source))
    }

    /// The error for a chain with which the driver broke a rule.
    pub(crate) fn refuse(&self, head: u16, why: impl Into<String>) -> Broken {
        Broken::Chain { queue: self.index, head, why: why.into() }
    }

    fn failed(&self, source: virtio_queue::Error) -> Broken {
        Broken::Ring { queue: self.index, source }
    }

    fn checked(&self, chain: DescriptorChain<&'a DeviceMemory>) -> Result<Chain<'a>, Broken> {
        let head = chain.head_index();
        let mut checked = Chain { head, readable: Buffers::default(), writable: Buffers::default() };
        // A chain that leaves its table, or has a loop, is cut off there.
        let mut is_cut = true;
        for (number, descriptor) in chain.enumerate() {
            if number == MOST_PIECES {
                return Err(self.refuse(head, format!("it has more than {MOST_PIECES} pieces")));
            }
            is_cut = descriptor.has_next();
            let part = match descriptor.is_write_only() {
                true => &mut checked.writable,
                false if !checked.writable.is_empty() => {
                    return Err(
                        self.refuse(head, "a buffer that the device reads follows a buffer that it writes")
                    );
                }
                false => &mut checked.readable,
            };
            let (address, length) = (descriptor.addr(), descriptor.len() as usize);
            for slice in GuestMemoryBackend::get_slices(self.memory, address, length) {
                let why = || format!("{length} bytes at {:#x} are not in RAM", address.0);
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
mod tests;
