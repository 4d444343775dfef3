//! Network cards: VIRTIO 1.2, section 5.1.

mod announce;
mod format;
mod session;
mod tap;

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_STATUS,
};

use super::backend::{Backend, Session};
use super::space::ConfigurationSpace;
use super::transport::Transport;
use crate::config::{MacAddress, NetOptions};
use crate::error::VmmError;
pub(crate) use announce::Announcer;
use format::LINK_UP;
use tap::Tap;

const QUEUE_SIZE: u16 = 256;

/// One card, joined to a tap.
pub(crate) struct Card {
    tap: Arc<Tap>,
    mac: MacAddress,
}

/// Opens card number `index` of the machine.
pub(super) fn open(index: usize, options: &NetOptions, machine: &str) -> Result<Card, VmmError> {
    let refuse = |why: String| VmmError::Config { what: "net", why: format!("tap {}: {why}", options.tap) };
    let tap = Tap::open(&options.tap).map_err(refuse)?;
    let mac = options.mac.unwrap_or_else(|| MacAddress::of_machine(machine, index));
    Ok(Card { tap: Arc::new(tap), mac })
}

impl Card {
    /// What tells the network where the guest is, once the card has its place.
    pub(super) fn announcer(&self) -> impl FnOnce(usize, Arc<Transport>) -> Arc<Announcer> + use<> {
        let (tap, mac) = (Arc::clone(&self.tap), self.mac);
        move |index, transport| Arc::new(Announcer::new(index, transport, tap, mac))
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
        always.iter().chain(&offloads).fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE, QUEUE_SIZE, 64]
    }

    fn configuration(&self) -> Vec<u8> {
        [&self.mac.0[..], &[LINK_UP, 0]].concat()
    }

    fn begin<'a>(
        &'a mut self,
        features: u64,
        space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>> {
        self.tap.set_offloads(features)?;
        let merges = features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
        Ok(Box::new(session::CardSession::new(&self.tap, space, merges)))
    }
}
