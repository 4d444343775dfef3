//! A card at work.

use std::os::fd::{AsFd, BorrowedFd};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_ANNOUNCE, VIRTIO_NET_CTRL_ANNOUNCE_ACK, VIRTIO_NET_ERR, VIRTIO_NET_OK,
};

use super::format::{ANNOUNCE, CONTROL, HEADER_BYTES, RECEIVE, SEND, STATUS_AT};
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
    tap: &'a Tap,
    space: &'a ConfigurationSpace,
    /// A packet may lie in several buffers.
    merges: bool,
    packet: Box<[u8]>,
    /// Of a packet that has found no buffers yet; 0 is none.
    waiting: usize,
    /// There may be more in the tap.
    has_more: bool,
}

impl<'a> CardSession<'a> {
    pub(super) fn new(tap: &'a Tap, space: &'a ConfigurationSpace, merges: bool) -> Self {
        Self { tap, space, merges, packet: vec![0; PACKET_BYTES].into(), waiting: 0, has_more: false }
    }

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

    fn control(&self, ring: &mut Ring<'a>) -> Result<(), Broken> {
        ring.answer_all(|chain| Ok(chain.writable.write(&[self.answer(chain)])))
    }

    /// To a command: its class and its number in two bytes.
    fn answer(&self, chain: &Chain<'a>) -> u8 {
        let mut command = [0; 2];
        chain.readable.read(&mut command);
        let acknowledged = [VIRTIO_NET_CTRL_ANNOUNCE as u8, VIRTIO_NET_CTRL_ANNOUNCE_ACK as u8];
        if command != acknowledged {
            return VIRTIO_NET_ERR as u8;
        }
        self.space.change(|bytes| bytes[STATUS_AT] &= !ANNOUNCE);
        VIRTIO_NET_OK as u8
    }
}

impl<'a> Session<'a> for CardSession<'a> {
    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        match queue {
            RECEIVE => self.receive(&mut rings[RECEIVE]),
            SEND => self.send(&mut rings[SEND]),
            CONTROL => self.control(&mut rings[CONTROL]),
            _ => Ok(()),
        }
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tap.as_fd())
    }

    fn has_more(&self) -> bool {
        self.has_more
    }

    fn woken(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        match rings.get_mut(RECEIVE) {
            Some(ring) => self.receive(ring),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use virtio_queue::QueueT;

    use super::*;
    use crate::hardware::virtio::testing::{BUFFERS, Driver};

    fn driver() -> Driver {
        let mut driver = Driver::new();
        driver.queue.set_event_idx(true);
        driver
    }

    #[test]
    fn packet_that_needs_more_buffers_than_there_are_waits_for_them() {
        let (network, tap) = UnixDatagram::pair().unwrap();
        let (tap, space) = (Tap::of(tap), ConfigurationSpace::new(vec![0; 8]));
        let mut driver = driver();
        let packet: Vec<u8> = (0..250).collect();
        let receive = |driver: &mut Driver| {
            network.send(&packet).unwrap();
            let mut session = CardSession::new(&tap, &space, true);
            session.receive(&mut driver.rings()[0]).unwrap();
            session.has_more
        };
        driver.add(&[(BUFFERS, 100, true)]);
        driver.add(&[(BUFFERS + 0x1000, 100, true)]);

        assert!(!receive(&mut driver) && driver.used().is_empty());
        assert_eq!(driver.kicked_after(), 2, "the driver kicks for the third buffer");
        driver.add(&[(BUFFERS + 0x2000, 100, true)]);
        assert!(!receive(&mut driver));

        assert_eq!(driver.used(), [(0, 100), (1, 100), (2, 50)]);
        assert_eq!(driver.get(BUFFERS + BUFFERS_AT as u64), 3u16.to_le_bytes());
        assert_eq!(driver.get::<50>(BUFFERS + 0x2000)[..], packet[200..]);
    }

    #[test]
    fn packet_goes_out_as_it_is_and_without_a_network_is_lost() {
        let (network, tap) = UnixDatagram::pair().unwrap();
        let (tap, space) = (Tap::of(tap), ConfigurationSpace::new(vec![0; 8]));
        let session = CardSession::new(&tap, &space, true);
        let mut driver = driver();
        driver.put(BUFFERS, b"twelve bytes");
        driver.put(BUFFERS + 0x1000, b"and a packet");
        driver.add(&[(BUFFERS, 12, false), (BUFFERS + 0x1000, 12, false)]);
        session.send(&mut driver.rings()[0]).unwrap();
        let mut bytes = [0; 100];
        let length = network.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..length], b"twelve bytesand a packet");
        drop(network);
        driver.add(&[(BUFFERS, 12, false)]);
        session.send(&mut driver.rings()[0]).unwrap();
        assert_eq!(driver.used().len(), 2);
    }

    #[test]
    fn guest_that_has_announced_itself_says_so_as_often_as_it_moves() {
        let (_network, tap) = UnixDatagram::pair().unwrap();
        let (tap, space) = (Tap::of(tap), ConfigurationSpace::new(vec![0; 8]));
        let session = CardSession::new(&tap, &space, true);
        let mut driver = driver();
        driver.put(BUFFERS, &[VIRTIO_NET_CTRL_ANNOUNCE as u8, VIRTIO_NET_CTRL_ANNOUNCE_ACK as u8]);
        for round in 1..=3 {
            space.change(|bytes| bytes[STATUS_AT] |= ANNOUNCE);
            driver.put(BUFFERS + 0x1000, &[77]);
            driver.add(&[(BUFFERS, 2, false), (BUFFERS + 0x1000, 1, true)]);
            session.control(&mut driver.rings()[0]).unwrap();
            let mut status = [77];
            space.read(STATUS_AT as u64, &mut status);
            assert_eq!((driver.get(BUFFERS + 0x1000), status), ([VIRTIO_NET_OK as u8], [0]));
            assert_eq!(driver.kicked_after(), round, "the driver kicks for the next command");
        }
        driver.put(BUFFERS, &[0, 0]);
        driver.add(&[(BUFFERS, 2, false), (BUFFERS + 0x1000, 1, true)]);
        session.control(&mut driver.rings()[0]).unwrap();
        assert_eq!(driver.get(BUFFERS + 0x1000), [VIRTIO_NET_ERR as u8]);
    }
}
