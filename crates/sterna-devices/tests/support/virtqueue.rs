//! The guest's side of one split virtqueue, without a guest: descriptors made by hand in guest RAM.

#![allow(dead_code, reason = "each program of tests uses a part")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sterna_devices::vhost_user::{Ring, VhostUserDevice};
use sterna_ram::{GuestRam, RamBlock};

/// Longer than anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Descriptors of one request at most.
const PARTS_MAX: u64 = 4;
/// What the ring takes of the guest's memory.
pub const RING_BYTES: u64 = 3 << 12;

const DESCRIPTOR_NEXT: u16 = 1;
const DESCRIPTOR_WRITE: u16 = 2;

/// A piece of a request.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Guest-physical, which is the offset in block 0.
    pub address: u64,
    /// Bytes.
    pub len: u32,
    /// Whether the device writes it.
    pub written: bool,
}

/// What the guest's driver remembers of its queue. It moves with the guest: give it the other side's RAM.
#[derive(Debug, Clone)]
pub struct Virtqueue {
    base: u64,
    size: u16,
    made: u16,
    seen: u16,
    free: Vec<u16>,
}

impl Virtqueue {
    /// A queue for `slots` requests at once, in the zeroed memory at `base`. The guest sees block 0 at 0.
    pub fn new(base: u64, slots: u16) -> Self {
        let size = (slots * PARTS_MAX as u16).next_power_of_two();
        assert!(u64::from(size) * 16 <= 4096, "a page holds the descriptors");
        Self { base, size, made: 0, seen: 0, free: (0..slots).rev().collect() }
    }

    /// As the device is told of it.
    pub fn ring(&self) -> Ring {
        Ring {
            size: self.size,
            descriptors: self.base,
            available: self.base + 4096,
            used: self.base + 8192,
            base: 0,
        }
    }

    /// Requests that the device has not answered.
    pub fn in_flight(&self) -> u16 {
        self.made.wrapping_sub(self.seen)
    }

    /// Makes a request available; gives its slot, or none while all are in use.
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
        // The device must see the entry before it sees that there is one.
        fence(Ordering::SeqCst);
        self.made = self.made.wrapping_add(1);
        block.write(at + 2, &self.made.to_le_bytes()).expect("inside RAM");
        fence(Ordering::SeqCst);
        Some(slot)
    }

    /// The next request that the device has answered, if there is one: its slot and the bytes that were written.
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
    /// None comes for [`PATIENCE`].
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
            // Empty if another look was faster.
            let _ = call.read();
        }
    }
}

fn read_u16(block: &RamBlock, at: u64) -> u16 {
    let mut bytes = [0; 2];
    block.read(at, &mut bytes).expect("inside RAM");
    u16::from_le_bytes(bytes)
}
