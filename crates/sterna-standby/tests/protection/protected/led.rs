//! A guest whose writes and checkpoints are controlled by the test.

use sterna::ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna_standby::PrimaryStatistics;

use super::link::Link;
use super::*;
use crate::plain::Plain;

/// Number of pages of the two blocks.
pub const PAGES: [u64; 2] = [600, 40];

pub fn memory() -> GuestRam {
    let block = |(name, pages): (&str, u64)| {
        RamBlock::new(name, pages * PAGE_SIZE as u64, Backing::Memfd).expect("memory")
    };
    GuestRam::new([("m0", PAGES[0]), ("m1", PAGES[1])].map(block).to_vec()).expect("memory")
}

pub struct Led {
    pub here: Arc<Plain>,
    pub there: Arc<Plain>,
    pub primary: Primary,
    pub standby: Standby,
    pub arbiter: Arc<Arbiter>,
    /// Number of checkpoints so far.
    number: u64,
    link: Link,
}

impl Led {
    /// A guest that is protected on the default terms. Some of its pages are zero.
    pub fn new(way: &Way, cache_pages: u64) -> Self {
        Self::new_on(way, cache_pages, TERMS)
    }

    /// Like [`new`](Self::new), on other terms.
    pub fn new_on(way: &Way, cache_pages: u64, terms: Terms) -> Self {
        let here = Plain::new(memory());
        for (block, pages) in PAGES.into_iter().enumerate() {
            for page in (0..pages).filter(|page| page % 3 > 0) {
                here.ram.block(block).write(page * PAGE_SIZE as u64, &noise(page)).unwrap();
            }
        }
        Self::protect_on(here, way, cache_pages, 1, terms)
    }

    /// Protects the guest by a new standby. Returns when the first checkpoint is held.
    pub fn protect(here: Arc<Plain>, way: &Way, cache_pages: u64, generation: u64) -> Self {
        Self::protect_on(here, way, cache_pages, generation, TERMS)
    }

    /// Like [`protect`](Self::protect), on other terms.
    pub fn protect_on(here: Arc<Plain>, way: &Way, cache_pages: u64, generation: u64, terms: Terms) -> Self {
        let there = Plain::new(memory());
        let (params, capabilities) = way.settings();
        let params = Parameters { xbzrle_cache_bytes: cache_pages * PAGE_SIZE as u64, ..params };
        let arbiter = Arc::<Arbiter>::default();
        let survivor = VmSurvivor::new(Arc::clone(&there) as _).expect("the place is free");
        // A receiver accepts differences independently of its setting.
        let theirs = Capabilities { xbzrle: false, ..capabilities };
        let standby = stand_by(survivor, params.clone(), theirs, &arbiter);
        let link = Link::new(&standby.address());
        let options = PrimaryOptions { checkpoint_delay: 10 * PATIENCE, ..way.options(terms) };
        let guardians = guardians(&arbiter, generation, Arc::new(NoOutput));
        let vm: Arc<dyn SourceVm> = Arc::clone(&here) as _;
        let (at, observer) = (link.address(), Arc::new(()));
        let primary = Primary::protect(vm, &at, &options, guardians, params, capabilities, observer)
            .expect("protected");
        // The first checkpoint is taken without a request.
        let led = Self { here, there, primary, standby, arbiter, number: 1, link };
        led.wait_until_held();
        led
    }

    /// Writes these bytes as the guest.
    pub fn write(&self, block: usize, page: u64, at: usize, bytes: &[u8]) {
        self.here.ram.block(block).write(page * PAGE_SIZE as u64 + at as u64, bytes).unwrap();
        self.here.log.mark(block, page);
    }

    /// Takes a checkpoint, and waits until it is held.
    pub fn checkpoint(&mut self) {
        self.take();
        self.wait_until_held();
    }

    /// Takes a checkpoint, which may still be in flight afterwards.
    pub fn take(&mut self) {
        self.number += 1;
        self.primary.checkpoint_now();
        wait_for("the checkpoint", || {
            let state = self.primary.state();
            assert_eq!(state.outcome, None, "{state:?}");
            self.statistics().taken >= self.number
        });
    }

    /// Waits until all taken checkpoints are held.
    pub fn wait_until_held(&self) {
        wait_for("the standby", || {
            let state = self.primary.state();
            assert_eq!(state.outcome, None, "{state:?}");
            self.statistics().held >= self.number
        });
    }

    pub fn hold_back(&self, is_held_back: bool) {
        self.link.hold_back(is_held_back);
    }

    /// Changes one of these bytes in transit, once. Their number is a multiple of [`CHUNK`](super::link::CHUNK).
    pub fn change(&self, bytes: &[u8]) {
        *self.link.knobs.changes.lock() = bytes.to_vec();
    }

    /// Whether the byte was changed.
    pub fn has_changed(&self) -> bool {
        self.link.knobs.changes.lock().is_empty()
    }

    /// Cuts the network between the two.
    pub fn cut(&self) {
        self.link.cut();
    }

    /// Waits until the held checkpoints are in RAM, and asserts that the memory is equal.
    pub fn assert_same(&self) {
        let same = |block: usize| bytes_of(&self.here.ram, block) == bytes_of(&self.there.ram, block);
        wait_for(&format!("the memory of checkpoint {}", self.number), || same(0) && same(1));
    }

    pub fn statistics(&self) -> PrimaryStatistics {
        self.primary.statistics()
    }

    pub fn hand_over(self) {
        self.primary.hand_over().expect("protected");
        assert_eq!(self.primary.wait(), primary::Outcome::HandedOver, "{:?}", self.primary.state());
        let ended = self.standby.contact().expect("a contact").wait(PATIENCE).expect("an end");
        assert!(matches!(ended, standby::Outcome::Running(_)), "{ended:?}");
        for block in 0..2 {
            assert!(bytes_of(&self.here.ram, block) == bytes_of(&self.there.ram, block), "block {block}");
        }
    }
}

pub fn bytes_of(ram: &GuestRam, block: usize) -> Vec<u8> {
    let mut bytes = vec![0; PAGES[block] as usize * PAGE_SIZE];
    ram.block(block).read(0, &mut bytes).unwrap();
    bytes
}

pub fn noise(seed: u64) -> [u8; PAGE_SIZE] {
    let mut random = fastrand::Rng::with_seed(seed);
    std::array::from_fn(|_| random.u8(..))
}
