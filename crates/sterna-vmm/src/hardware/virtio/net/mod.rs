//! Virtio network cards: VIRTIO 1.2, section 5.1.

mod announce;
mod card_session;
mod format;
mod held;
mod outlet;
mod tap;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use sterna_standby::PacketGate;

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_STATUS,
};

use super::backend::{Backend, Session};
use super::space::ConfigurationSpace;
use super::transport::Transport;
use crate::config::{MacAddress, NetOptions};
use crate::error::VmmError;
pub(crate) use announce::Announcer;
use format::LINK_UP;
use held::HeldTap;
use outlet::Outlet;
use tap::Tap;

const QUEUE_SIZE: u16 = 256;

/// A network card that is connected to a tap.
pub(crate) struct Card {
    /// The card's queues of the tap, one per pair.
    outlets: Vec<Arc<Outlet>>,
    /// Number of pairs that the driver uses.
    active: AtomicU16,
    mac: MacAddress,
}

/// Opens card number `index` of the machine. The guest's packets are sent through `gate`. With `may_wait`
/// another process may use the tap now; that process must hand it over later.
pub(super) fn open(
    index: usize,
    options: &NetOptions,
    machine: &str,
    gate: &PacketGate,
    may_wait: bool,
) -> Result<Card, VmmError> {
    let refuse = |why: String| VmmError::Config { what: "net", why: format!("tap {}: {why}", options.tap) };
    if !(1..=NetOptions::QUEUES_MAX).contains(&options.queues) {
        let most = NetOptions::QUEUES_MAX;
        return Err(refuse(format!("{} pairs of queues, 1 to {most} are possible", options.queues)));
    }
    let open = |_| {
        let tap = Tap::open(&options.tap, options.queues > 1, may_wait)?;
        Outlet::new(tap, gate).map(Arc::new).map_err(|error| error.to_string())
    };
    let outlets = (0..options.queues).map(open).collect::<Result<_, _>>().map_err(refuse)?;
    let mac = options.mac.unwrap_or_else(|| MacAddress::of_machine(machine, index));
    Ok(Card { outlets, active: AtomicU16::new(1), mac })
}

impl Card {
    /// A card with one pair of queues per socket. It exchanges its packets with the sockets.
    #[cfg(feature = "fuzzing")]
    pub(super) fn of_sockets(
        sockets: Vec<std::os::unix::net::UnixDatagram>,
        gate: &PacketGate,
    ) -> io::Result<Self> {
        let outlets = sockets.into_iter().map(|socket| Outlet::new(Tap::of(socket)?, gate).map(Arc::new));
        let mac = MacAddress::of_machine("fuzzing", 0);
        Ok(Self { outlets: outlets.collect::<Result<_, _>>()?, active: AtomicU16::new(1), mac })
    }

    /// The host descriptors of the card.
    pub(super) fn taps(&self, index: usize, name: &str) -> HeldTap {
        HeldTap::new(index, name, self.outlets.clone())
    }

    /// Creates the announcer of the card, after the card has its slot.
    pub(super) fn announcer(&self) -> impl FnOnce(usize, Arc<Transport>) -> Arc<Announcer> + use<> {
        let (outlet, mac) = (Arc::clone(&self.outlets[0]), self.mac);
        move |index, transport| Arc::new(Announcer::new(index, transport, outlet, mac))
    }
}

impl Backend for Card {
    fn kind(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        let always = [
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_STATUS,
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_CTRL_VQ,
            VIRTIO_NET_F_GUEST_ANNOUNCE,
        ];
        let offloads = [
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_HOST_TSO6,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
        ];
        let several = (self.outlets.len() > 1).then_some(&VIRTIO_NET_F_MQ);
        always.iter().chain(&offloads).chain(several).fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        let mut sizes = vec![QUEUE_SIZE; 2 * self.outlets.len()];
        sizes.push(64);
        sizes
    }

    fn configuration(&self) -> Vec<u8> {
        let pairs = (self.outlets.len() as u16).to_le_bytes();
        let pairs = if self.outlets.len() > 1 { &pairs[..] } else { &[] };
        [&self.mac.0[..], &[LINK_UP, 0], pairs].concat()
    }

    fn state(&self) -> Vec<u8> {
        let active = self.active.load(Ordering::SeqCst).to_le_bytes();
        if self.outlets.len() > 1 { active.to_vec() } else { Vec::new() }
    }

    fn set_state(&mut self, state: &[u8]) -> Result<(), String> {
        let most = self.outlets.len() as u16;
        let active = match <[u8; 2]>::try_from(state) {
            Ok(active) if most > 1 => u16::from_le_bytes(active),
            Err(_) if state.is_empty() && most == 1 => 1,
            _ => return Err(format!("{} bytes for {most} pairs of queues", state.len())),
        };
        if !(1..=most).contains(&active) {
            return Err(format!("{active} active pairs of queues, of {most}"));
        }
        self.active.store(active, Ordering::SeqCst);
        Ok(())
    }

    fn reset(&mut self) {
        self.active.store(1, Ordering::SeqCst);
    }

    fn begin<'a>(
        &'a mut self,
        features: u64,
        space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>> {
        self.outlets[0].tap().set_offloads(features)?;
        let session = card_session::CardSession::new(&self.outlets, &self.active, space, features);
        session.activate()?;
        Ok(Box::new(session))
    }
}
