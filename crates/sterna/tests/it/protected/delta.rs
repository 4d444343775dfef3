//! Checkpoints that bring differences (`xbzrle`).

use sterna::ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna::replica::PrimaryStatistics;
use sterna::{Migration, SettingsError, StartError};

use super::*;
use crate::plain::Plain;

/// Pages of the two blocks.
const PAGES: [u64; 2] = [600, 40];

fn memory() -> GuestRam {
    let block = |(name, pages): (&str, u64)| {
        RamBlock::new(name, pages * PAGE_SIZE as u64, Backing::Memfd).expect("memory")
    };
    GuestRam::new([("m0", PAGES[0]), ("m1", PAGES[1])].map(block).to_vec()).expect("memory")
}

/// A guest that does what the test says, and takes a checkpoint when it says so.
struct Led {
    here: Arc<Plain>,
    there: Arc<Plain>,
    primary: Primary,
    standby: Standby,
    /// Checkpoints so far.
    number: u64,
}

impl Led {
    fn new(capabilities: Capabilities, cache_pages: u64, buffer_bytes: u64) -> Self {
        let (here, there) = (Plain::new(memory()), Plain::new(memory()));
        for (block, pages) in PAGES.into_iter().enumerate() {
            // Some are zero.
            for page in (0..pages).filter(|page| page % 3 > 0) {
                here.ram.block(block).write(page * PAGE_SIZE as u64, &noise(page)).unwrap();
            }
        }
        let params = Parameters { xbzrle_cache_bytes: cache_pages * PAGE_SIZE as u64, ..PLAIN.settings().0 };
        let arbiter = Arc::<Arbiter>::default();
        let claims = Arc::clone(&arbiter);
        let rules = ContactRules {
            secret: Secret::from_bytes([3; 32]),
            is_required: true,
            claims: Arc::new(move |_| claims.of("standby")),
            fence: Arc::new(|_| panic!("a guest of this process stops by itself")),
        };
        let options = StandbyOptions { insecure: true, ..StandbyOptions::default() };
        let survivor = Arc::new(VmSurvivor::new(Arc::clone(&there) as _).expect("the place is free"));
        let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
        // A receiver takes differences whether it was told of them or not.
        let theirs = Capabilities { xbzrle: false, ..capabilities };
        let standby =
            Standby::protect(&at, &options, params.clone(), theirs, Arc::new(()), survivor, Some(rules))
                .expect("listening");
        let options = PrimaryOptions {
            checkpoint_delay: 10 * PATIENCE,
            terms: TERMS,
            buffer_bytes,
            ..PrimaryOptions::default()
        };
        let guardians = Guardians {
            protection: Protection { id: [7; 16], generation: 1 },
            secret: Secret::from_bytes([3; 32]),
            claims: arbiter.of("primary"),
            gate: Arc::new(NoOutput),
        };
        let vm: Arc<dyn SourceVm> = Arc::clone(&here) as _;
        let (at, observer) = (standby.address(), Arc::new(()));
        let primary = Primary::protect(vm, &at, &options, guardians, params, capabilities, observer)
            .expect("protected");
        let mut led = Self { here, there, primary, standby, number: 0 };
        led.checkpoint();
        led
    }

    /// The guest writes this.
    fn write(&self, block: usize, page: u64, at: usize, bytes: &[u8]) {
        self.here.ram.block(block).write(page * PAGE_SIZE as u64 + at as u64, bytes).unwrap();
        self.here.log.mark(block, page);
    }

    /// Takes one, and waits until it is held.
    fn checkpoint(&mut self) {
        self.number += 1;
        self.primary.checkpoint_now();
        wait_for("the checkpoint", || {
            let state = self.primary.state();
            assert_eq!(state.outcome, None, "{state:?}");
            self.primary.statistics().held >= self.number
        });
    }

    /// All that is held is in RAM in a moment: waits for it.
    fn assert_same(&self) {
        let same = |block: usize| bytes_of(&self.here.ram, block) == bytes_of(&self.there.ram, block);
        wait_for(&format!("the memory of checkpoint {}", self.number), || same(0) && same(1));
    }

    fn statistics(&self) -> PrimaryStatistics {
        self.primary.statistics()
    }

    fn hand_over(self) {
        self.primary.hand_over().expect("protected");
        assert_eq!(self.primary.wait(), primary::Outcome::HandedOver, "{:?}", self.primary.state());
        let ended = self.standby.contact().expect("a contact").wait(PATIENCE).expect("an end");
        assert!(matches!(ended, standby::Outcome::Running(_)), "{ended:?}");
        for block in 0..2 {
            assert!(bytes_of(&self.here.ram, block) == bytes_of(&self.there.ram, block), "block {block}");
        }
    }
}

fn bytes_of(ram: &GuestRam, block: usize) -> Vec<u8> {
    let mut bytes = vec![0; PAGES[block] as usize * PAGE_SIZE];
    ram.block(block).read(0, &mut bytes).unwrap();
    bytes
}

fn noise(seed: u64) -> [u8; PAGE_SIZE] {
    let mut random = fastrand::Rng::with_seed(seed);
    std::array::from_fn(|_| random.u8(..))
}

fn delta() -> Capabilities {
    Capabilities { xbzrle: true, ..Capabilities::default() }
}

#[test]
fn standby_has_the_primarys_memory_at_each_checkpoint_whatever_pages_became() {
    // (pages that the cache holds, bytes of the buffer)
    for (cache_pages, buffer_bytes) in [(1 << 14, 64 << 20), (1 << 14, 4096), (64, 64 << 20), (1, 64 << 20)] {
        let mut led = Led::new(delta(), cache_pages, buffer_bytes);
        let mut random = fastrand::Rng::with_seed(16);
        for _ in 0..30 {
            for _ in 0..120 {
                let block = random.usize(..2);
                // Some are written in nearly every epoch, others once in a while.
                let most = [20, PAGES[block]][random.usize(..2)];
                let page = random.u64(..most);
                let at = random.usize(..PAGE_SIZE - 8);
                match random.u8(..8) {
                    0 => led.write(block, page, 0, &noise(random.u64(..))),
                    1 => led.write(block, page, 0, &[0; PAGE_SIZE]),
                    // Reported, and as before.
                    2 => led.here.log.mark(block, page),
                    3 => led.write(block, page, PAGE_SIZE - 1, &[random.u8(..)]),
                    _ => led.write(block, page, at, &random.u64(..).to_ne_bytes()),
                }
            }
            led.checkpoint();
            led.assert_same();
        }
        let came = led.statistics();
        assert_eq!(came.unbuffered > 0, buffer_bytes == 4096);
        let counts = came.xbzrle;
        assert!(counts.cache_misses > 0, "{counts:?}");
        if cache_pages > 1 {
            assert!(counts.pages > 0 && counts.same > 0 && counts.overflows > 0, "{counts:?}");
        }
        led.hand_over();
    }
}

/// Bytes that ten checkpoints take, of a guest that changes 8 bytes of each of 512 pages: by the page of 4096 bytes.
fn bytes_per_dirty_page(capabilities: Capabilities) -> f64 {
    const DIRTY: u64 = 512;
    const CHECKPOINTS: u64 = 10;
    let mut led = Led::new(capabilities, 1 << 14, 64 << 20);
    let change = |led: &Led, number: u64| {
        (0..DIRTY).for_each(|page| {
            led.write(0, page, (page as usize * 8) % PAGE_SIZE, &(number << 8 | 1).to_ne_bytes())
        });
    };
    // What the standby holds of a page is known from the first checkpoint on that brings it.
    change(&led, 0);
    led.checkpoint();
    let before = led.standby.statistics().received_bytes;
    for number in 1..=CHECKPOINTS {
        change(&led, number);
        led.checkpoint();
    }
    let took = led.standby.statistics().received_bytes - before;
    led.assert_same();
    led.hand_over();
    took as f64 / (CHECKPOINTS * DIRTY * PAGE_SIZE as u64) as f64
}

#[test]
fn sparse_writer_sends_differences_and_not_pages() {
    let (with, without) = (bytes_per_dirty_page(delta()), bytes_per_dirty_page(Capabilities::default()));
    assert!(with <= 0.3, "{with}");
    assert!((1.0..=1.05).contains(&without), "{without}");
}

#[test]
fn differences_are_refused_where_nobody_sends_them() {
    let vm = || Plain::new(memory()) as Arc<dyn SourceVm>;
    let at: Address = "tcp:127.0.0.1:1".parse().unwrap();
    let begun = Migration::start(vm(), &at, parameters(), delta(), Arc::new(()));
    let refused = begun.err().map(|error| error.to_string());
    assert_eq!(refused, Some(StartError::from(SettingsError::DeltaNeedsStandby).to_string()));

    let way = Way { lanes: 2, delta: true, ..PLAIN };
    let pair = try_protect((writer(), writer()), &way, TERMS, Arc::new(NoOutput));
    let refused = pair.err().map(|error| error.to_string());
    assert_eq!(refused, Some(StartError::from(SettingsError::DeltaIsOneChannel).to_string()));
}
