//! A card at work.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, VIRTIO_NET_CTRL_MQ,
    VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_ERR, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_OK,
};

use super::format::{ANNOUNCE, HEADER_BYTES, RECEIVE, SEND, STATUS_AT};
use super::tap::Tap;
use crate::hardware::virtio::backend::Session;
use crate::hardware::virtio::ring::{Broken, Chain, Ring};
use crate::hardware::virtio::space::ConfigurationSpace;

/// The longest packet with its header.
const PACKET_BYTES: usize = 65_536 + HEADER_BYTES;
/// Packets that are received before other queues have their turn.
const AT_ONCE: usize = 256;
/// In the header: in how many buffers a packet lies.
const BUFFERS_AT: usize = 10;

pub(super) struct CardSession<'a> {
    taps: &'a [Arc<Tap>],
    space: &'a ConfigurationSpace,
    /// How many pairs the driver uses.
    active: &'a AtomicU16,
    pairs: Vec<Pair<'a>>,
    /// The queue of commands.
    control: usize,
}

/// A pair of queues at work.
struct Pair<'a> {
    tap: &'a Tap,
    /// A packet may lie in several buffers.
    merges: bool,
    packet: Box<[u8]>,
    /// Of a packet that has found no buffers yet; 0 is none.
    waiting: usize,
    /// There may be more in the tap.
    has_more: bool,
}

impl<'a> CardSession<'a> {
    pub(super) fn new(
        taps: &'a [Arc<Tap>],
        active: &'a AtomicU16,
        space: &'a ConfigurationSpace,
        features: u64,
    ) -> Self {
        // A driver that does not know of several pairs finds the queue of commands after the first.
        let pairs = if features & 1 << VIRTIO_NET_F_MQ != 0 { taps.len() } else { 1 };
        let merges = features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
        let pair = |tap: &'a Arc<Tap>| Pair {
            tap,
            merges,
            packet: vec![0; PACKET_BYTES].into(),
            waiting: 0,
            has_more: false,
        };
        Self { taps, space, active, pairs: taps[..pairs].iter().map(pair).collect(), control: 2 * pairs }
    }

    /// Lets packets come to the pairs that are active, and to no other.
    pub(super) fn activate(&self) -> io::Result<()> {
        let active = usize::from(self.active.load(Ordering::SeqCst));
        self.taps.iter().enumerate().try_for_each(|(index, tap)| tap.attach(index < active))
    }

    fn control(&self, ring: &mut Ring<'a>) -> Result<(), Broken> {
        ring.answer_all(|chain| Ok(chain.writable.write(&[self.answer(chain)])))
    }

    /// To a command: its class and its number in two bytes, and what belongs to it.
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

    /// False: there are not so many, or the host refuses.
    fn use_pairs(&self, pairs: u16) -> bool {
        if pairs == 0 || usize::from(pairs) > self.pairs.len() || self.pairs.len() == 1 {
            return false;
        }
        let before = self.active.swap(pairs, Ordering::SeqCst);
        let Err(error) = self.activate() else { return true };
        tracing::warn!(%error, pairs, "the tap does not take so many queues");
        self.active.store(before, Ordering::SeqCst);
        false
    }
}

impl<'a> Pair<'a> {
    /// Gives the guest what has come, as far as it has buffers.
    fn receive(&mut self, ring: &mut Ring<'a>) -> Result<(), Broken> {
        self.has_more = false;
        ring.ignore_kicks()?;
        for _ in 0..AT_ONCE {
            if self.waiting == 0 {
                match self.tap.receive(&mut self.packet)? {
                    Some(length) => self.waiting = length,
                    // The tap wakes this thread; buffers are looked at then.
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

    /// False: there are too few buffers for the packet. Then the driver kicks when it adds some.
    fn deliver(&mut self, ring: &mut Ring<'a>) -> Result<bool, Broken> {
        let length = self.waiting;
        let mut chains: Vec<Chain<'a>> = Vec::new();
        let mut room = 0;
        while room < length && (chains.is_empty() || self.merges) {
            let Some(chain) = ring.pop()? else {
                // Before the chains are put back: the driver is to kick for what comes after all that there is.
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
            // It never fits: the driver did not want such packets.
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
        ring.answer_all(|chain| {
            // SAFETY: guest memory, which the worker's VM keeps mapped.
            let is_sent = unsafe { self.tap.send(&chain.readable.vectors()) }?;
            if !is_sent {
                tracing::trace!("a packet of the guest is lost: the tap did not take it");
            }
            Ok(0)
        })
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
        self.pairs.iter().map(|pair| pair.tap.as_fd()).collect()
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
        Ok(())
    }
}

#[cfg(test)]
mod tests;
