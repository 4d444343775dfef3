//! Announces the guest's new location to the network. The host does so immediately, and the guest too if its
//! driver can.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna::{Hook, VmError};
use virtio_bindings::virtio_net::VIRTIO_NET_F_GUEST_ANNOUNCE;

use super::format::{ANNOUNCE, HEADER_BYTES, STATUS_AT};
use super::outlet::Outlet;
use crate::config::{AnnounceOptions, MacAddress};
use crate::hardware::virtio::transport::Transport;

/// Shortest Ethernet packet in bytes, without its checksum.
const SHORTEST: usize = 60;
const BROADCAST: [u8; 6] = [0xff; 6];
const ETHERTYPE_RARP: [u8; 2] = [0x80, 0x35];

/// Announces the location of one network card.
pub(crate) struct Announcer {
    index: usize,
    transport: Arc<Transport>,
    outlet: Arc<Outlet>,
    mac: MacAddress,
    /// Options for the announcement after a migration.
    options: Mutex<AnnounceOptions>,
    /// Announcements in progress, by id. A thread ends when its token is removed.
    running: Mutex<HashMap<String, Arc<()>>>,
}

impl Announcer {
    pub(super) fn new(index: usize, transport: Arc<Transport>, outlet: Arc<Outlet>, mac: MacAddress) -> Self {
        Self { index, transport, outlet, mac, options: Mutex::default(), running: Mutex::default() }
    }

    pub(crate) fn set_options(&self, options: AnnounceOptions) {
        *self.options.lock() = options;
    }

    /// Sends the first announcement, and starts a thread for the others. An announcement in progress with the
    /// same id ends.
    pub(crate) fn announce_as(&self, options: AnnounceOptions, id: &str) -> io::Result<()> {
        let mut running = self.running.lock();
        running.remove(id);
        running.retain(|_, token| Arc::weak_count(token) > 0);
        if options.rounds == 0 {
            return Ok(());
        }
        if self.transport.driver_features() & 1 << VIRTIO_NET_F_GUEST_ANNOUNCE != 0 {
            self.transport.change_configuration(|bytes| bytes[STATUS_AT] |= ANNOUNCE);
        }
        let packet = request(self.mac);
        self.outlet.send_bytes(&packet)?;
        let token = Arc::new(());
        let (outlet, goes_on) = (Arc::downgrade(&self.outlet), Arc::downgrade(&token));
        let repeat = move || {
            let mut pause = options.initial.min(options.max);
            for _ in 1..options.rounds {
                std::thread::sleep(pause);
                pause = (pause + options.step).min(options.max);
                // The machine was dropped, or another announcement replaced this one.
                let Some((outlet, _)) = outlet.upgrade().zip(goes_on.upgrade()) else { return };
                if let Err(error) = outlet.send_bytes(&packet) {
                    tracing::warn!(%error, "the guest's new location is not announced again");
                }
            }
        };
        std::thread::Builder::new().name("announce".to_owned()).spawn(repeat)?;
        running.insert(id.to_owned(), token);
        Ok(())
    }
}

impl Hook for Announcer {
    fn name(&self) -> String {
        format!("network {}", self.index)
    }

    /// Nothing to seize: packets go to the host that announced itself last.
    fn seize(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn announce(&self) -> Result<(), VmError> {
        let options = *self.options.lock();
        self.announce_as(options, "").map_err(|error| VmError::new(self.name(), error))
    }
}

/// A reverse ARP request for the card's own address. It changes only the tables of switches (RFC 903).
fn request(mac: MacAddress) -> Vec<u8> {
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend(BROADCAST);
    packet.extend(mac.0);
    packet.extend(ETHERTYPE_RARP);
    // Ethernet, IPv4, lengths of both address types, operation "request".
    packet.extend([0, 1, 8, 0, 6, 4, 0, 3]);
    packet.extend([&mac.0[..], &[0; 4], &mac.0, &[0; 4]].concat());
    packet.resize(HEADER_BYTES + SHORTEST, 0);
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_asks_for_the_card_that_sends_it() {
        let mac = [0x52, 0x54, 0, 1, 2, 3];
        let packet = request(MacAddress(mac));
        let frame = &packet[HEADER_BYTES..];
        assert_eq!(
            (frame.len(), &frame[..6], &frame[6..12], &frame[12..14]),
            (60, &[0xff; 6][..], &mac[..], &[0x80, 0x35][..])
        );
        assert_eq!(
            (&frame[14..22], &frame[22..28], &frame[32..38]),
            (&[0, 1, 8, 0, 6, 4, 0, 3][..], &mac[..], &mac[..])
        );
        assert!(packet[..HEADER_BYTES].iter().chain(&frame[42..]).all(|byte| *byte == 0));
    }
}
