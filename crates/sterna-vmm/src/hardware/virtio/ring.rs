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
mod tests;
