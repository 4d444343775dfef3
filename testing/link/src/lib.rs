//! A network link between two hosts that a test creates. The hosts are two network namespaces, and
//! a program forwards packets between their TUN devices.
//!
//! The link has a rate, a queue, a delay, jitter and loss for each direction, and each direction
//! can be cut. It works on packets, not on connections. A TCP proxy would acknowledge bytes by
//! itself, and so hide round trips, retransmissions and back-off from the two ends. `netem` would
//! do the same work, but the kernels of CI machines lack it.
//!
//! A thread enters one of the hosts with [`Host::run`] or [`Host::enter`]. Sockets that it creates
//! there, and threads that it starts, are on that host too. Namespaces and devices end with the
//! [`Link`] and with the process.

mod forward;
mod host;
mod shaper;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

pub use host::Host;
pub use shaper::Shape;

use forward::Way;

/// Addresses of the network that is reserved for documentation, so that no real host has them.
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
/// The size of an Ethernet packet.
const PACKET_BYTES: u16 = 1500;

/// One of the two directions of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the near host to the far one.
    There,
    /// From the far host to the near one.
    Back,
}

/// Two hosts and the link between them. A drop ends the link.
pub struct Link {
    hosts: [Host; 2],
    ways: [Way; 2],
}

impl Link {
    /// Creates a link with the same `shape` in both directions. `seed` determines the random draws
    /// (jitter, loss).
    ///
    /// # Errors
    /// This process may not create network namespaces or TUN devices. A test that needs the link
    /// then reports itself as skipped with this reason.
    pub fn new(shape: Shape, seed: u64) -> Result<Self, String> {
        let [near, far] = ADDRESSES.map(|address| Host::new(address, PACKET_BYTES));
        let ((near, near_device), (far, far_device)) = (near?, far?);
        let (near_device, far_device) = (Arc::new(near_device), Arc::new(far_device));
        let there = Way::new(Arc::clone(&near_device), Arc::clone(&far_device), shape, seed);
        let back = Way::new(far_device, near_device, shape, seed.wrapping_add(1));
        Ok(Self { hosts: [near, far], ways: [there?, back?] })
    }

    /// The host at the near end, where tests run the source.
    pub fn near(&self) -> &Host {
        &self.hosts[0]
    }

    /// The host at the far end, where tests run the destination.
    pub fn far(&self) -> &Host {
        &self.hosts[1]
    }

    /// Changes the shape of one direction, beginning with the next packet.
    pub fn set(&self, direction: Direction, shape: Shape) {
        self.way(direction).set(shape);
    }

    /// Changes the shape of both directions, beginning with the next packet.
    pub fn set_both(&self, shape: Shape) {
        self.ways.iter().for_each(|way| way.set(shape));
    }

    /// Number of bytes in the packets that one direction has delivered.
    pub fn delivered_bytes(&self, direction: Direction) -> u64 {
        self.way(direction).delivered_bytes()
    }

    /// How long a packet that is handed over now waits before one direction sends it.
    pub fn queue(&self, direction: Direction) -> Duration {
        self.way(direction).queue()
    }

    fn way(&self, direction: Direction) -> &Way {
        &self.ways[direction as usize]
    }
}
