//! Free page reporting, of a balloon that never grows: VIRTIO 1.2, section 5.5.
//!
//! The guest says which of its memory it does not use. That is given back to the host, so that it is neither resident nor
//! sent: at the destination it is as fresh as here.

use std::io;

use sterna_ram::{GuestRam, PAGE_SIZE, RamError};
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use super::backend::{Backend, Session};
use super::ring::{Broken, Ring};
use super::space::ConfigurationSpace;

/// The feature, by its number in the standard.
const REPORTING: u32 = 5;
/// Queues: two of the balloon, and what is free.
const QUEUES: usize = 3;
const FREE: usize = 2;
const QUEUE_SIZE: u16 = 64;
/// Size wanted and size reached, and words that belong to other features.
const CONFIGURATION_BYTES: usize = 16;

pub(crate) struct FreePages(GuestRam);

impl FreePages {
    pub(super) fn new(ram: GuestRam) -> Self {
        Self(ram)
    }
}

impl Backend for FreePages {
    fn kind(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        1 << REPORTING
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; QUEUES]
    }

    fn configuration(&self) -> Vec<u8> {
        vec![0; CONFIGURATION_BYTES]
    }

    fn begin<'a>(
        &'a mut self,
        _features: u64,
        _space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>> {
        Ok(Box::new(FreePagesSession(&self.0)))
    }
}

struct FreePagesSession<'a>(&'a GuestRam);

impl<'a> Session<'a> for FreePagesSession<'a> {
    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        self.take(&mut rings[queue], queue == FREE)
    }
}

impl FreePagesSession<'_> {
    /// Returns everything; what is free is given back before.
    fn take(&self, ring: &mut Ring<'_>, is_free: bool) -> Result<(), Broken> {
        ring.answer_all(|chain| {
            if is_free {
                for (address, bytes) in chain.writable.places() {
                    self.give_back(address, bytes).map_err(io::Error::other)?;
                }
                // It reads as zero now, also where another content was sent before.
                chain.writable.were_written();
            }
            Ok(0)
        })
    }

    /// The whole pages of what lies at `address` on this host.
    fn give_back(&self, address: usize, bytes: usize) -> Result<(), RamError> {
        let start = address.next_multiple_of(PAGE_SIZE);
        let pages = (address + bytes).saturating_sub(start) / PAGE_SIZE;
        match self.0.page_at(start) {
            Some((block, first)) if pages > 0 => self.0.block(block).zero_pages(first, pages as u64),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Driver;
    use super::*;

    #[test]
    fn whole_pages_that_are_free_are_given_back_and_sent_as_zeros() {
        let mut driver = Driver::new();
        driver.put(0x8_0000, &[7; 0x8_0000]);
        let device = FreePages::new(driver.ram.clone());
        // Two pages and a half, from the middle of one on.
        driver.add(&[(0x9_0800, 0x2800, true)]);
        FreePagesSession(&device.0).take(&mut driver.rings()[0], true).unwrap();

        let bytes: [u8; 0x4000] = driver.get(0x9_0000);
        assert!(bytes[..0x1000].iter().chain(&bytes[0x3000..]).all(|byte| *byte == 7));
        assert!(bytes[0x1000..0x3000].iter().all(|byte| *byte == 0));
        assert_eq!(driver.used(), [(0, 0)]);
    }
}
