//! Tests of concurrent taking and setting of bits, under every schedule and memory order that loom explores.
//!
//! Run them with `cargo test --release --manifest-path testing/loom/Cargo.toml`.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use sterna_loom::{PageBitmap, drain_words};

/// Explores every schedule with up to three preemptions; with more, the number of schedules grows too large.
fn model(test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(test);
}

/// A taker and a setter on two words: each bit is taken once or still set.
#[test]
fn take_run_against_a_setter_loses_nothing() {
    model(|| {
        let map = Arc::new(PageBitmap::new(66));
        map.set_range(62, 3); // 62, 63 | 64
        let setter = {
            let map = Arc::clone(&map);
            loom::thread::spawn(move || u64::from(!map.set(63)) + map.set_range(65, 1))
        };
        let mine = map.take_run(0, 66, 66).map_or(0, |run| run.count);
        let newly = setter.join().unwrap();
        assert_eq!(3 + newly, mine + map.count());
    });
}

/// Two takers: no bit is taken twice.
#[test]
fn take_run_against_a_taker_doubles_nothing() {
    model(|| {
        let map = Arc::new(PageBitmap::new(66));
        map.set_range(62, 3);
        let taker = {
            let map = Arc::clone(&map);
            loom::thread::spawn(move || map.take_run(60, 66, 2).map_or(0, |run| run.count))
        };
        let mine = map.take_run(0, 66, 66).map_or(0, |run| run.count);
        assert_eq!(3, mine + taker.join().unwrap() + map.count());
    });
}

/// A thread that takes a bit sees all writes that preceded the setting of the bit.
#[test]
fn take_run_sees_what_was_written_before_the_bit_was_set() {
    model(|| {
        let map = Arc::new(PageBitmap::new(64));
        let page = Arc::new(AtomicU64::new(0));
        let writer = {
            let (map, page) = (Arc::clone(&map), Arc::clone(&page));
            loom::thread::spawn(move || {
                page.store(1, Ordering::Relaxed);
                map.set_range(3, 1);
            })
        };
        if map.take_run(0, 64, 64).is_some() {
            assert_eq!(page.load(Ordering::Relaxed), 1);
        }
        writer.join().unwrap();
    });
}

/// A device writes a page and then sets its bit in the log, twice; another device's page shares the word.
///
/// Pages that the syncs find are read afterwards, and no write is missed.
#[test]
fn drain_against_devices_that_log_loses_no_write() {
    model(|| {
        let word = Arc::new(AtomicU64::new(0));
        let pages = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let device = {
            let (word, pages) = (Arc::clone(&word), Arc::clone(&pages));
            loom::thread::spawn(move || {
                for (page, value) in [(0, 1), (1, 2), (0, 3)] {
                    pages[page].store(value, Ordering::Relaxed);
                    word.fetch_or(1 << page, Ordering::Release);
                }
            })
        };
        let mut copy = [0; 2];
        let mut sync = || {
            let found = drain_words(std::slice::from_ref(&*word));
            let bits = found.first().map_or(0, |(_, bits)| *bits);
            for (page, copy) in copy.iter_mut().enumerate() {
                if bits >> page & 1 == 1 {
                    *copy = pages[page].load(Ordering::Relaxed);
                }
            }
        };
        sync();
        sync();
        device.join().unwrap();
        sync();
        assert_eq!(copy, [3, 2]);
    });
}
