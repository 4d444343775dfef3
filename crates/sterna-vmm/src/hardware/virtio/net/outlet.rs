//! The path on which a card's packets leave. It leads through the gate of a protected guest to a queue of the
//! tap.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use sterna_standby::{PacketGate, PacketLane};

use vmm_sys_util::eventfd::EventFd;

use super::format::PACKET_BYTES;
use super::tap::Tap;
use crate::hardware::virtio::buffers::Buffers;

/// One outgoing queue of a card.
pub(super) struct Outlet {
    tap: Arc<Tap>,
    lane: PacketLane,
    /// Readable when the gate has room after it was full.
    room: Arc<EventFd>,
}

impl Outlet {
    pub(super) fn new(tap: Tap, gate: &PacketGate) -> io::Result<Self> {
        let (tap, room) = (Arc::new(tap), Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?));
        let (sends, tells) = (Arc::clone(&tap), Arc::clone(&room));
        let send = move |packet: &[u8]| {
            if !sends.send_bytes(packet).unwrap_or(false) {
                tracing::trace!("a released packet is lost, because the tap did not accept it");
            }
        };
        let lane = gate.lane(send, move || {
            // The write cannot fail, because the counter is far from its maximum.
            let _ = tells.write(1);
        });
        Ok(Self { tap, lane, room })
    }

    pub(super) fn tap(&self) -> &Tap {
        &self.tap
    }

    /// Whether a packet can be sent. If not, [`Outlet::room`] becomes readable when it can.
    pub(super) fn has_room(&self) -> bool {
        self.lane.is_open() || self.lane.has_room()
    }

    /// An event that becomes readable when there is room again.
    pub(super) fn room(&self) -> BorrowedFd<'_> {
        // SAFETY: `self` keeps the event open, and is borrowed for as long as the result.
        unsafe { BorrowedFd::borrow_raw(self.room.as_raw_fd()) }
    }

    /// Clears the event of [`Outlet::room`].
    pub(super) fn note_room(&self) {
        // An error means that an earlier call has read the event.
        let _ = self.room.read();
    }

    /// Sends a packet of the guest, with its header. False if the network takes no packet now; the packet is
    /// lost.
    pub(super) fn send(&self, packet: &Buffers<'_>) -> io::Result<bool> {
        if self.lane.is_open() {
            // SAFETY: the vectors are guest memory, which the worker's VM keeps mapped.
            return unsafe { self.tap.send(&packet.vectors()) };
        }
        let length = packet.len();
        if length > PACKET_BYTES {
            return Ok(false);
        }
        let mut bytes = vec![0; length];
        packet.read(&mut bytes);
        self.lane.put(&bytes);
        Ok(true)
    }

    /// Sends a packet of this program. It waits in the gate like the guest's, because only the side that has
    /// the guest may announce its location.
    pub(super) fn send_bytes(&self, packet: &[u8]) -> io::Result<bool> {
        if self.lane.is_open() {
            return self.tap.send_bytes(packet);
        }
        self.lane.put(packet);
        Ok(true)
    }
}

impl AsFd for Outlet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tap.as_fd()
    }
}
