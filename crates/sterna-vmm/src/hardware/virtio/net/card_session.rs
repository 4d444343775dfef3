//! A network card at work: moves packets between queues and tap, and answers commands.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, VIRTIO_NET_CTRL_MQ,
    VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_ERR, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_OK,
};

use super::format::{ANNOUNCE, HEADER_BYTES, PACKET_BYTES, RECEIVE, SEND, STATUS_AT};
use super::outlet::Outlet;
use crate::hardware::virtio::backend::Session;
use crate::hardware::virtio::ring::{Broken, Chain, Ring};
use crate::hardware::virtio::space::ConfigurationSpace;

/// Number of packets received before other queues are served.
const AT_ONCE: usize = 256;
/// Offset in the packet header of the number of buffers that the packet fills.
const BUFFERS_AT: usize = 10;

pub(super) struct CardSession<'a> {
    outlets: &'a [Arc<Outlet>],
    space: &'a ConfigurationSpace,
    /// Number of pairs that the driver uses.
    active: &'a AtomicU16,
    pairs: Vec<Pair<'a>>,
    /// Number of the control queue.
    control: usize,
}

/// A working pair of queues.
struct Pair<'a> {
    outlet: &'a Outlet,
    /// Whether a packet may be spread over several buffers.
    merges: bool,
    packet: Box<[u8]>,
    /// Length of a received packet that waits for buffers; 0 for none.
    waiting: usize,
    /// Whether the tap may have more packets.
    has_more: bool,
    /// Whether the guest's packets stay in their queue because the gate is full.
    is_held_up: Cell<bool>,
}

impl<'a> CardSession<'a> {
    pub(super) fn new(
        outlets: &'a [Arc<Outlet>],
        active: &'a AtomicU16,
        space: &'a ConfigurationSpace,
        features: u64,
    ) -> Self {
        // A driver without the multi-queue feature expects the control queue after the first pair.
        let pairs = if features & 1 << VIRTIO_NET_F_MQ != 0 { outlets.len() } else { 1 };
        let merges = features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
        let pair = |outlet: &'a Arc<Outlet>| Pair {
            outlet,
            merges,
            packet: vec![0; PACKET_BYTES].into(),
            waiting: 0,
            has_more: false,
            is_held_up: Cell::new(false),
        };
        let pairs_at_work = outlets[..pairs].iter().map(pair).collect();
        Self { outlets, space, active, pairs: pairs_at_work, control: 2 * pairs }
    }

    /// Attaches the tap's queues of the active pairs, and detaches the others. Packets then arrive only at
    /// active pairs.
    pub(super) fn activate(&self) -> io::Result<()> {
        let active = usize::from(self.active.load(Ordering::SeqCst));
        self.outlets.iter().enumerate().try_for_each(|(index, outlet)| outlet.tap().attach(index < active))
    }

    fn control(&self, ring: &mut Ring<'a>) -> Result<(), Broken> {
        ring.answer_all(|chain| Ok(chain.writable.write(&[self.answer(chain)])))
    }

    /// Performs a command and returns its status. The command has its class and number in two bytes, then its
    /// data.
    fn answer(&self, chain: &Chain<'a>) -> u8 {
        let mut command = [0; 4];
        let length = chain.readable.read(&mut command);
        let [class, number, low, high] = command;
        let is_done = match (u32::from(class), u32::from(number)) {
            (VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK) => {
                self.space.change(|bytes| bytes[STATUS_AT] &= !ANNOUNCE);
                true
            }
            (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET) if length == command.len() => {
                self.use_pairs(u16::from_le_bytes([low, high]))
            }
            _ => false,
        };
        (if is_done { VIRTIO_NET_OK } else { VIRTIO_NET_ERR }) as u8
    }

    /// Sets the number of active pairs. False if the number is out of range, or the host refuses.
    fn use_pairs(&self, pairs: u16) -> bool {
        if pairs == 0 || usize::from(pairs) > self.pairs.len() || self.pairs.len() == 1 {
            return false;
        }
        let before = self.active.swap(pairs, Ordering::SeqCst);
        let Err(error) = self.activate() else { return true };
        tracing::warn!(%error, pairs, "the tap does not support this number of queues");
        self.active.store(before, Ordering::SeqCst);
        false
    }
}

impl<'a> Pair<'a> {
    /// Moves received packets to the guest, as far as it has buffers.
    fn receive(&mut self, ring: &mut Ring<'a>) -> Result<(), Broken> {
        self.has_more = false;
        ring.ignore_kicks()?;
        for _ in 0..AT_ONCE {
            if self.waiting == 0 {
                match self.outlet.tap().receive(&mut self.packet)? {
                    Some(length) => self.waiting = length,
                    // The tap wakes this thread, which then checks the buffers.
                    None => return ring.notify(),
                }
            }
            if !self.deliver(ring)? {
                return ring.notify();
            }
        }
        self.has_more = true;
        ring.notify()
    }

    /// Moves the waiting packet to the guest. False if there are too few buffers; the driver then kicks when
    /// it adds some.
    fn deliver(&mut self, ring: &mut Ring<'a>) -> Result<bool, Broken> {
        let length = self.waiting;
        let mut chains: Vec<Chain<'a>> = Vec::new();
        let mut room = 0;
        while room < length && (chains.is_empty() || self.merges) {
            let Some(chain) = ring.pop()? else {
                // Kicks are enabled before the chains are put back, so that the driver kicks for buffers
                // after all present ones.
                if ring.expect_kicks()? {
                    continue;
                }
                ring.put_back(chains.len() as u16);
                return Ok(false);
            };
            if chain.writable.len() < HEADER_BYTES {
                return Err(ring.refuse(chain.head, "it has no room for a packet's header"));
            }
            room += chain.writable.len();
            chains.push(chain);
        }
        self.waiting = 0;
        if room < length {
            // The packet never fits, because the driver's buffers exclude such packets. It is dropped.
            ring.put_back(chains.len() as u16);
            return Ok(true);
        }
        self.packet[BUFFERS_AT..HEADER_BYTES].copy_from_slice(&(chains.len() as u16).to_le_bytes());
        let mut left = &self.packet[..length];
        for chain in chains {
            let written = chain.writable.write(left);
            left = &left[written..];
            ring.push(chain.head, written as u32)?;
        }
        Ok(true)
    }

    fn send(&self, ring: &mut Ring<'a>) -> Result<(), Broken> {
        loop {
            ring.ignore_kicks()?;
            while let Some(chain) = ring.pop()? {
                self.is_held_up.set(!self.outlet.has_room());
                if self.is_held_up.get() {
                    // The gate wakes this thread, which then continues with the queue.
                    ring.put_back(1);
                    return ring.notify();
                }
                if !self.outlet.send(&chain.readable)? {
                    tracing::trace!("a packet of the guest is lost, because the tap did not accept it");
                }
                ring.push(chain.head, 0)?;
            }
            ring.notify()?;
            if !ring.expect_kicks()? {
                return Ok(());
            }
        }
    }
}

impl<'a> Session<'a> for CardSession<'a> {
    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        let ring = &mut rings[queue];
        if queue == self.control {
            return self.control(ring);
        }
        match self.pairs.get_mut(queue / 2) {
            Some(pair) if queue % 2 == RECEIVE => pair.receive(ring),
            Some(pair) if queue % 2 == SEND => pair.send(ring),
            _ => Ok(()),
        }
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        self.pairs.iter().flat_map(|pair| [pair.outlet.as_fd(), pair.outlet.room()]).collect()
    }

    fn has_more(&self) -> bool {
        let active = usize::from(self.active.load(Ordering::SeqCst));
        self.pairs.iter().take(active).any(|pair| pair.has_more)
    }

    fn woken(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        let active = usize::from(self.active.load(Ordering::SeqCst));
        for (index, pair) in self.pairs.iter_mut().enumerate().take(active) {
            if let Some(ring) = rings.get_mut(2 * index + RECEIVE) {
                pair.receive(ring)?;
            }
        }
        for (index, pair) in self.pairs.iter().enumerate().filter(|(_, pair)| pair.is_held_up.get()) {
            pair.outlet.note_room();
            if let Some(ring) = rings.get_mut(2 * index + SEND) {
                pair.send(ring)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
