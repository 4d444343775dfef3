//! Tests of a network card's packets and commands.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

use sterna_standby::{EpochGate, PacketGate};

use virtio_queue::QueueT;

use super::*;
use crate::hardware::virtio::net::tap::Tap;
use crate::hardware::virtio::testing::{BUFFERS, Driver};

const MERGES: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;
static ONE: AtomicU16 = AtomicU16::new(1);

fn taps<const N: usize>(sockets: [UnixDatagram; N]) -> Vec<Arc<Outlet>> {
    behind(&PacketGate::new(1).unwrap(), sockets)
}

fn behind<const N: usize>(gate: &PacketGate, sockets: [UnixDatagram; N]) -> Vec<Arc<Outlet>> {
    sockets.map(|socket| Arc::new(Outlet::new(Tap::of(socket).unwrap(), gate).unwrap())).into()
}

fn driver() -> Driver {
    let mut driver = Driver::new();
    driver.queue.set_event_idx(true);
    driver
}

#[test]
fn packet_that_needs_more_buffers_than_there_are_waits_for_them() {
    let (network, tap) = UnixDatagram::pair().unwrap();
    let (taps, space) = (taps([tap]), ConfigurationSpace::new(vec![0; 8]));
    let mut driver = driver();
    let packet: Vec<u8> = (0..250).collect();
    let receive = |driver: &mut Driver| {
        network.send(&packet).unwrap();
        let mut session = CardSession::new(&taps, &ONE, &space, MERGES);
        session.pairs[0].receive(&mut driver.rings()[0]).unwrap();
        session.has_more()
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
    let (taps, space) = (taps([tap]), ConfigurationSpace::new(vec![0; 8]));
    let session = CardSession::new(&taps, &ONE, &space, MERGES);
    let mut driver = driver();
    driver.put(BUFFERS, b"twelve bytes");
    driver.put(BUFFERS + 0x1000, b"and a packet");
    driver.add(&[(BUFFERS, 12, false), (BUFFERS + 0x1000, 12, false)]);
    session.pairs[0].send(&mut driver.rings()[0]).unwrap();
    let mut bytes = [0; 100];
    let length = network.recv(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"twelve bytesand a packet");
    drop(network);
    driver.add(&[(BUFFERS, 12, false)]);
    session.pairs[0].send(&mut driver.rings()[0]).unwrap();
    assert_eq!(driver.used().len(), 2);
}

#[test]
fn guest_that_has_announced_itself_says_so_as_often_as_it_moves() {
    let (_network, tap) = UnixDatagram::pair().unwrap();
    let (taps, space) = (taps([tap]), ConfigurationSpace::new(vec![0; 8]));
    let session = CardSession::new(&taps, &ONE, &space, MERGES);
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

#[test]
fn driver_has_as_many_pairs_as_it_asks_for() {
    let pairs: [_; 3] = std::array::from_fn(|_| UnixDatagram::pair().unwrap());
    let [networks, ends] =
        [0, 1].map(|end| pairs.each_ref().map(|(a, b)| if end == 0 { a } else { b }.try_clone().unwrap()));
    let (taps, space, active) = (taps(ends), ConfigurationSpace::new(vec![0; 10]), AtomicU16::new(3));
    let features = MERGES | 1 << VIRTIO_NET_F_MQ;
    let mut session = CardSession::new(&taps, &active, &space, features);
    assert_eq!((session.control, session.wakes().len()), (6, 6));
    assert_eq!(CardSession::new(&taps, &active, &space, MERGES).control, 2);
    let mut driver = driver();
    let ask = |driver: &mut Driver, pairs: u16, length| {
        let [low, high] = pairs.to_le_bytes();
        driver.put(BUFFERS, &[VIRTIO_NET_CTRL_MQ as u8, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET as u8, low, high]);
        driver.add(&[(BUFFERS, length, false), (BUFFERS + 0x1000, 1, true)]);
        session.control(&mut driver.rings()[0]).unwrap();
        (driver.get::<1>(BUFFERS + 0x1000)[0], active.load(Ordering::SeqCst))
    };
    let (ok, error) = (VIRTIO_NET_OK as u8, VIRTIO_NET_ERR as u8);
    assert_eq!(ask(&mut driver, 3, 4), (ok, 3));
    for (wrong, length) in [(0, 4), (4, 4), (u16::MAX, 4), (2, 3)] {
        assert_eq!(ask(&mut driver, wrong, length), (error, 3), "{wrong} in {length} bytes");
    }
    // Sockets are never detached: packets stay in the sockets of unused pairs.
    active.store(2, Ordering::SeqCst);
    for network in &networks {
        network.send(&[1; 20]).unwrap();
    }
    let mut queues: [_; 7] = std::array::from_fn(|_| Driver::new());
    for queue in &mut queues {
        queue.add(&[(BUFFERS, 100, true)]);
    }
    let mut rings: Vec<_> = queues.iter_mut().flat_map(Driver::rings).collect();
    session.woken(&mut rings).unwrap();
    drop(rings);
    assert_eq!(queues.map(|queue| queue.used().len()), [1, 0, 1, 0, 0, 0, 0]);
}

#[test]
fn packets_of_a_protected_guest_wait_for_their_checkpoint_and_a_full_gate_holds_the_queue_up() {
    let (network, tap) = UnixDatagram::pair().unwrap();
    network.set_nonblocking(true).unwrap();
    let gate = PacketGate::new(1).unwrap();
    let asked = Arc::<AtomicU16>::default();
    let asks = Arc::clone(&asked);
    gate.ask_when_full(Arc::new(move || {
        asks.fetch_add(1, Ordering::SeqCst);
    }));
    let (taps, space) = (behind(&gate, [tap]), ConfigurationSpace::new(vec![0; 8]));
    let mut session = CardSession::new(&taps, &ONE, &space, MERGES);
    let (mut receives, mut sends) = (driver(), driver());
    let mut bytes = [0; 100];
    for packet in 0..3u8 {
        sends.put(BUFFERS + u64::from(packet) * 0x1000, &[packet; 20]);
        sends.add(&[(BUFFERS + u64::from(packet) * 0x1000, 20, false)]);
    }
    gate.close(Box::new(|_| true));
    let mut rings: Vec<_> = [&mut receives, &mut sends].into_iter().flat_map(Driver::rings).collect();
    for _ in 0..2 {
        // The gate has room for one packet, and the others stay in the queue. The gate asks once per epoch.
        session.pairs[0].send(&mut rings[1]).unwrap();
        assert!(session.pairs[0].is_held_up.get() && network.recv(&mut bytes).is_err());
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    gate.end_epoch(1);
    gate.release(1);
    let mut wait = libc::pollfd { fd: taps[0].room().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the kernel reads and writes one `pollfd`.
    assert_eq!(unsafe { libc::poll(&raw mut wait, 1, 60_000) }, 1, "room");
    // The event may be signalled while the packet is still being sent.
    network.set_nonblocking(false).unwrap();
    let length = network.recv(&mut bytes).unwrap();
    assert_eq!(bytes[..length], [0; 20]);
    network.set_nonblocking(true).unwrap();
    // The next packet belongs to epoch 2.
    session.woken(&mut rings).unwrap();
    assert!(session.pairs[0].is_held_up.get() && network.recv(&mut bytes).is_err());
    assert_eq!(asked.load(Ordering::SeqCst), 2);
    drop((rings, session));
    assert_eq!(sends.used().len(), 2);

    // The claim is lost: the waiting packets are never sent.
    gate.drop_output();
    drop((taps, gate));
    assert!(network.recv(&mut bytes).is_err());
}
