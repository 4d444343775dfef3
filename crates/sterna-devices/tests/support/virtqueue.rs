//! The guest's side of one split virtqueue, without a guest. It writes the descriptors into guest RAM itself.

#![allow(dead_code, reason = "each program of tests uses a part")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sterna_devices::vhost_user::{Ring, VhostUserDevice};
use sterna_ram::{GuestRam, RamBlock};

/// Longer than every wait here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Highest number of descriptors per request.
const PARTS_MAX: u64 = 4;
/// Bytes of guest memory that the ring needs.
pub const RING_BYTES: u64 = 3 << 12;

const DESCRIPTOR_NEXT: u16 = 1;
const DESCRIPTOR_WRITE: u16 = 2;

/// A piece of a request's memory.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Guest-physical address, which equals the offset in block 0.
    pub address: u64,
    /// Length of the piece in bytes.
    pub len: u32,
    /// Whether the device writes it.
    pub written: bool,
}

/// The state of the guest's driver for its queue. It migrates with the guest: continue with the other side's
/// RAM.
#[derive(Debug, Clone)]
pub struct Virtqueue {
    base: u64,
    size: u16,
    made: u16,
    seen: u16,
    free: Vec<u16>,
}

impl Virtqueue {
    /// A queue for `slots` requests in flight, in the zeroed memory at `base`. The guest sees block 0 at 0.
    pub fn new(base: u64, slots: u16) -> Self {
        let size = (slots * PARTS_MAX as u16).next_power_of_two();
        assert!(u64::from(size) * 16 <= 4096, "a page holds the descriptors");
        Self { base, size, made: 0, seen: 0, free: (0..slots).rev().collect() }
    }

    /// The ring's description for the device.
    pub fn ring(&self) -> Ring {
        Ring {
            size: self.size,
            descriptors: self.base,
            available: self.base + 4096,
            used: self.base + 8192,
            base: 0,
        }
    }

    /// Number of requests that the device has not answered.
    pub fn in_flight(&self) -> u16 {
        self.made.wrapping_sub(self.seen)
    }

    /// Makes a request available. Returns its slot, or `None` while all slots are in use.
    pub fn submit(&mut self, ram: &GuestRam, parts: &[Part]) -> Option<u16> {
        let block = ram.block(0);
        let slot = self.free.pop()?;
        let head = slot * PARTS_MAX as u16;
        for (index, part) in parts.iter().enumerate() {
            let is_last = index + 1 == parts.len();
            let flags =
                if is_last { 0 } else { DESCRIPTOR_NEXT } | if part.written { DESCRIPTOR_WRITE } else { 0 };
            let this = head + index as u16;
            let mut bytes = part.address.to_le_bytes().to_vec();
            bytes.extend(part.len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend((this + 1).to_le_bytes());
            block.write(self.base + u64::from(this) * 16, &bytes).expect("inside RAM");
        }
        let at = self.ring().available;
        let entry = at + 4 + 2 * u64::from(self.made % self.size);
        block.write(entry, &head.to_le_bytes()).expect("inside RAM");
        // The device must see the entry before the new index.
        fence(Ordering::SeqCst);
        self.made = self.made.wrapping_add(1);
        block.write(at + 2, &self.made.to_le_bytes()).expect("inside RAM");
        fence(Ordering::SeqCst);
        Some(slot)
    }

    /// Takes the next answered request, if any: its slot and the number of written bytes.
    pub fn take(&mut self, ram: &GuestRam) -> Option<(u16, u32)> {
        let block = ram.block(0);
        let at = self.ring().used;
        if read_u16(block, at + 2) == self.seen {
            return None;
        }
        fence(Ordering::SeqCst);
        let mut entry = [0; 8];
        block.read(at + 4 + 8 * u64::from(self.seen % self.size), &mut entry).expect("inside RAM");
        self.seen = self.seen.wrapping_add(1);
        let head = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
        let slot = (head / PARTS_MAX as u32) as u16;
        self.free.push(slot);
        Some((slot, u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]])))
    }

    /// Kicks the device and waits for an answer.
    ///
    /// # Panics
    /// If no answer arrives within [`PATIENCE`].
    pub fn wait(&mut self, ram: &GuestRam, device: &VhostUserDevice, queue: usize) -> (u16, u32) {
        let (kick, call) = (device.kick(queue).expect("a queue"), device.call(queue).expect("a queue"));
        kick.write(1).expect("a kick");
        let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        loop {
            if let Some(answer) = self.take(ram) {
                return answer;
            }
            // SAFETY: the eventfd lives as long as the device, which is borrowed here.
            let file = unsafe { BorrowedFd::borrow_raw(call.as_raw_fd()) };
            let ready = poll(&mut [PollFd::from_borrowed_fd(file, PollFlags::IN)], Some(&limit));
            assert_ne!(ready, Ok(0), "the device answers no request");
            // An error means that another reader has taken the event.
            let _ = call.read();
        }
    }
}

fn read_u16(block: &RamBlock, at: u64) -> u16 {
    let mut bytes = [0; 2];
    block.read(at, &mut bytes).expect("inside RAM");
    u16::from_le_bytes(bytes)
}
