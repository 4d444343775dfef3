//! Tells the network that the guest has moved: by the host at once, and by the guest itself if its driver can.

use std::sync::Arc;
use std::time::Duration;

use sterna::{Hook, VmError};
use virtio_bindings::virtio_net::VIRTIO_NET_F_GUEST_ANNOUNCE;

use super::format::{ANNOUNCE, HEADER_BYTES, STATUS_AT};
use super::tap::Tap;
use crate::config::MacAddress;
use crate::hardware::virtio::transport::Transport;

/// As QEMU does unless it is told otherwise: `announce-initial`, `announce-max`, `announce-rounds`, `announce-step`.
const INITIAL: Duration = Duration::from_millis(50);
const MAX: Duration = Duration::from_millis(550);
const ROUNDS: u32 = 5;
const STEP: Duration = Duration::from_millis(100);
/// The shortest packet of an Ethernet, without its checksum.
const SHORTEST: usize = 60;
const BROADCAST: [u8; 6] = [0xff; 6];
const ETHERTYPE_RARP: [u8; 2] = [0x80, 0x35];

pub(super) struct Announcer {
    index: usize,
    transport: Arc<Transport>,
    tap: Arc<Tap>,
    mac: MacAddress,
}

impl Announcer {
    pub(super) fn new(index: usize, transport: Arc<Transport>, tap: Arc<Tap>, mac: MacAddress) -> Self {
        Self { index, transport, tap, mac }
    }
}

impl Hook for Announcer {
    fn name(&self) -> String {
        format!("network {}", self.index)
    }

    /// Returns after the first round; a thread does the others.
    fn announce(&self) -> Result<(), VmError> {
        if self.transport.driver_features() & 1 << VIRTIO_NET_F_GUEST_ANNOUNCE != 0 {
            self.transport.change_configuration(|bytes| bytes[STATUS_AT] |= ANNOUNCE);
        }
        let failed = |error: std::io::Error| VmError::new(self.name(), error);
        let packet = request(self.mac);
        self.tap.send_bytes(&packet).map_err(failed)?;
        let tap = Arc::downgrade(&self.tap);
        let repeat = move || {
            let mut pause = INITIAL;
            for _ in 1..ROUNDS {
                std::thread::sleep(pause);
                pause = (pause + STEP).min(MAX);
                // The machine may be gone.
                let Some(tap) = tap.upgrade() else { return };
                if let Err(error) = tap.send_bytes(&packet) {
                    tracing::warn!(%error, "the guest's new place is not announced again");
                }
            }
        };
        std::thread::Builder::new().name("announce".to_owned()).spawn(repeat).map_err(failed)?;
        Ok(())
    }
}

/// A reverse ARP request for its own address: it changes no table but those of switches (RFC 903).
fn request(mac: MacAddress) -> Vec<u8> {
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend(BROADCAST);
    packet.extend(mac.0);
    packet.extend(ETHERTYPE_RARP);
    // Ethernet, IPv4, lengths of their addresses, request for an address.
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
