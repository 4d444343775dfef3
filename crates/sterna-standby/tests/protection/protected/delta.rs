//! Checkpoints with differences (`xbzrle`).

use sterna::ram::PAGE_SIZE;
use sterna::{Migration, SettingsError, StartError};

use super::led::{Led, PAGES, memory, noise};
use super::*;
use crate::plain::Plain;

fn delta() -> Capabilities {
    Capabilities { xbzrle: true, ..Capabilities::default() }
}

#[test]
fn standby_has_the_primarys_memory_at_each_checkpoint_whatever_pages_became() {
    let all = Way { delta: true, ..PLAIN };
    let unstaged = Way { buffer_bytes: 4096, ..all };
    // The copy mode, and the number of pages that fit the cache.
    let ways = [
        (all, 1 << 14),
        (unstaged, 1 << 14),
        (all, 64),
        (all, 1),
        (Way { lanes: 1, ..all }, 1 << 14),
        (Way { lanes: 3, ..all }, 1 << 14),
        (Way { lanes: 2, compression: Compression::Zstd, ..all }, 64),
        (Way { lanes: 2, zero_pages: sterna::ZeroPageDetection::Legacy, ..all }, 1 << 14),
        (Way { lanes: 2, zero_pages: sterna::ZeroPageDetection::None, ..all }, 1),
        (Way { lanes: 2, ..unstaged }, 1 << 14),
    ];
    for (way, cache_pages) in ways {
        let mut led = Led::new(&way, cache_pages);
        let mut random = fastrand::Rng::with_seed(16);
        for _ in 0..30 {
            for _ in 0..120 {
                let block = random.usize(..2);
                // Some pages are written in nearly every epoch, others rarely.
                let most = [20, PAGES[block]][random.usize(..2)];
                let page = random.u64(..most);
                let at = random.usize(..PAGE_SIZE - 8);
                match random.u8(..8) {
                    0 => led.write(block, page, 0, &noise(random.u64(..))),
                    1 => led.write(block, page, 0, &[0; PAGE_SIZE]),
                    // The page is reported as dirty, but its content is unchanged.
                    2 => led.here.log.mark(block, page),
                    3 => led.write(block, page, PAGE_SIZE - 1, &[random.u8(..)]),
                    _ => led.write(block, page, at, &random.u64(..).to_ne_bytes()),
                }
            }
            led.checkpoint();
            led.assert_same();
        }
        let came = led.statistics();
        assert_eq!(came.unbuffered > 0, way.buffer_bytes == 4096);
        let counts = came.xbzrle;
        assert!(counts.cache_misses > 0, "{counts:?}");
        if way.lanes > 0 && way.buffer_bytes == 4096 {
            // A page that is not copied may change before it is sent. Therefore no lane may send it as a difference.
            assert_eq!((counts.pages, counts.same), (0, 0), "{counts:?}");
        } else if cache_pages > 1 {
            assert!(counts.pages > 0 && counts.same > 0 && counts.overflows > 0, "{counts:?}");
        }
        led.hand_over();
    }
}

/// Bytes per dirty page over ten checkpoints. The guest changes 8 bytes in each of 512 pages of 4096 bytes.
fn bytes_per_dirty_page(way: &Way) -> f64 {
    const DIRTY: u64 = 512;
    const CHECKPOINTS: u64 = 10;
    let mut led = Led::new(way, 1 << 14);
    let change = |led: &Led, number: u64| {
        (0..DIRTY).for_each(|page| {
            led.write(0, page, (page as usize * 8) % PAGE_SIZE, &(number << 8 | 1).to_ne_bytes())
        });
    };
    // The primary knows the standby's copy of a page after the first checkpoint that contains the page.
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
    let with = bytes_per_dirty_page(&Way { delta: true, ..PLAIN });
    let over_lanes = bytes_per_dirty_page(&Way { delta: true, lanes: 2, ..PLAIN });
    let without = bytes_per_dirty_page(&PLAIN);
    assert!(with <= 0.3 && over_lanes <= 0.3, "{with}, {over_lanes}");
    assert!((1.0..=1.05).contains(&without), "{without}");
}

#[test]
fn differences_are_refused_where_nobody_sends_them() {
    let vm = || Plain::new(memory()) as Arc<dyn SourceVm>;
    let at: Address = "tcp:127.0.0.1:1".parse().unwrap();
    let begun = Migration::start(vm(), &at, parameters(), delta(), Arc::new(()));
    let refused = begun.err().map(|error| error.to_string());
    assert_eq!(refused, Some(StartError::from(SettingsError::DeltaNeedsStandby).to_string()));
}
