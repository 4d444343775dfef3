//! Reports and hints of unused guest memory: VIRTIO 1.2, section 5.5. They use a balloon that never grows.
//!
//! - Free page *reporting* happens at any time. The host takes the memory back, so that it is neither
//!   resident nor sent. At the destination it reads as zero, as it does here.
//! - Free page *hinting* happens when a migration asks ([`super::hinting`]). The memory is not sent.

use std::io;
use std::sync::Arc;

use sterna_ram::GuestRam;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use super::backend::{Backend, Session};
use super::hinting::{self, Hinting};
use super::ring::{Broken, Ring};
use super::space::ConfigurationSpace;

/// Bit number of the reporting feature in the standard.
const REPORTING: u32 = 5;
/// Number of queues that a balloon always has.
const BALLOON_QUEUES: usize = 2;
const QUEUE_SIZE: u16 = 64;
/// Requested size, actual size, the command id of hinting, and a word of another feature.
const CONFIGURATION_BYTES: usize = 16;

/// The balloon device, with at least one of the two features.
pub(crate) struct FreePages {
    ram: GuestRam,
    reports: bool,
    hinting: Option<Arc<Hinting>>,
}

impl FreePages {
    pub(super) fn new(ram: GuestRam, reports: bool, hinting: Option<Arc<Hinting>>) -> Self {
        Self { ram, reports, hinting }
    }
}

impl Backend for FreePages {
    fn kind(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        let hinting = u64::from(self.hinting.is_some()) << hinting::FEATURE;
        hinting | u64::from(self.reports) << REPORTING
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; BALLOON_QUEUES + self.features().count_ones() as usize]
    }

    fn configuration(&self) -> Vec<u8> {
        vec![0; CONFIGURATION_BYTES]
    }

    fn state(&self) -> Vec<u8> {
        self.hinting.as_ref().map(|hinting| hinting.state()).unwrap_or_default()
    }

    fn set_state(&mut self, state: &[u8]) -> Result<(), String> {
        match &self.hinting {
            Some(hinting) => hinting.set_state(state),
            None if state.is_empty() => Ok(()),
            None => Err(format!("the section is {} bytes too long", state.len())),
        }
    }

    fn reset(&mut self) {
        if let Some(hinting) = &self.hinting {
            hinting.reset();
        }
    }

    fn begin<'a>(
        &'a mut self,
        features: u64,
        space: &'a ConfigurationSpace,
    ) -> io::Result<Box<dyn Session<'a> + 'a>> {
        let must_tell = self.hinting.as_ref().is_some_and(|hinting| hinting.begin_work(space));
        Ok(Box::new(FreePagesSession { device: self, queues: Queues::of(features), must_tell }))
    }
}

/// Numbers of the queues that depend on features. The standard numbers all possible queues (3 is hinting, 4
/// is reporting) and says that some may not exist. Drivers number only the queues of the features that they
/// chose.
#[derive(Debug, PartialEq, Eq)]
struct Queues {
    hinting: Option<usize>,
    reporting: Option<usize>,
}

impl Queues {
    fn of(features: u64) -> Self {
        let [hints, reports] = [hinting::FEATURE, REPORTING].map(|feature| features & 1 << feature != 0);
        let first = BALLOON_QUEUES;
        Self { hinting: hints.then_some(first), reporting: reports.then_some(first + usize::from(hints)) }
    }
}

struct FreePagesSession<'a> {
    device: &'a FreePages,
    queues: Queues,
    must_tell: bool,
}

impl<'a> Session<'a> for FreePagesSession<'a> {
    fn begun(&mut self, rings: &mut [Ring<'a>]) -> Result<(), Broken> {
        if std::mem::take(&mut self.must_tell) {
            Hinting::tell(rings);
        }
        (0..rings.len()).try_for_each(|queue| self.kicked(rings, queue))
    }

    fn kicked(&mut self, rings: &mut [Ring<'a>], queue: usize) -> Result<(), Broken> {
        self.take(&mut rings[queue], queue)
    }
}

impl FreePagesSession<'_> {
    /// Returns all buffers in one step. Before that, reported memory is given back to the host, and hinted
    /// memory is excluded from the migration.
    fn take(&self, ring: &mut Ring<'_>, queue: usize) -> Result<(), Broken> {
        let FreePages { ram, hinting, .. } = self.device;
        let hinting = hinting.as_ref().filter(|_| self.queues.hinting == Some(queue));
        let is_reported = self.queues.reporting == Some(queue);
        ring.answer_all(|chain| {
            if let Some(hinting) = hinting {
                let refused = |why: &str| Broken::Chain { queue, head: chain.head, why: why.to_owned() };
                hinting.take(ram, chain).map_err(refused)?;
            } else if is_reported {
                for (block, first, pages) in chain.writable.whole_pages(ram) {
                    ram.block(block).zero_pages(first, pages).map_err(io::Error::other)?;
                }
                // The memory reads as zero now. It must be sent again if other content was sent before.
                chain.writable.were_written();
            }
            Ok(0)
        })
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
        let mut device = FreePages::new(driver.ram.clone(), true, None);
        // Two and a half pages, starting in the middle of a page.
        driver.add(&[(0x9_0800, 0x2800, true)]);
        let queues = Queues { hinting: None, reporting: Some(0) };
        let session = FreePagesSession { device: &device, queues, must_tell: false };
        session.take(&mut driver.rings()[0], 0).unwrap();

        let bytes: [u8; 0x4000] = driver.get(0x9_0000);
        assert!(bytes[..0x1000].iter().chain(&bytes[0x3000..]).all(|byte| *byte == 7));
        assert!(bytes[0x1000..0x3000].iter().all(|byte| *byte == 0));
        assert_eq!(driver.used(), [(0, 0)]);
        // Without hinting the device's state is empty, as in versions that had no hinting.
        assert!(
            device.state().is_empty() && device.set_state(&[]).is_ok() && device.set_state(&[0; 4]).is_err()
        );
    }

    #[test]
    fn queues_are_those_of_the_features_that_the_driver_has_chosen() {
        let (hinting, reporting) = (1 << hinting::FEATURE, 1 << REPORTING);
        let cases = [
            (0, None, None),
            (hinting, Some(2), None),
            (reporting, None, Some(2)),
            (hinting | reporting, Some(2), Some(3)),
        ];
        for (features, hinting, reporting) in cases {
            assert_eq!(Queues::of(features), Queues { hinting, reporting });
        }
        let queues = |reports, hints: bool| {
            let ram = Driver::new().ram;
            FreePages::new(ram, reports, hints.then(Arc::default)).queue_sizes().len()
        };
        assert_eq!([queues(true, false), queues(false, true), queues(true, true)], [3, 3, 4]);
    }
}
