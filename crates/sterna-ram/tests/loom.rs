//! Taking runs against setting bits, under every schedule and memory order that loom can think of.
//! Runs with `RUSTFLAGS="--cfg loom" cargo test -p sterna-ram --test loom --release`.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use sterna_ram::PageBitmap;

/// Two takers and a setter on two words: each bit is taken once or is still there.
#[test]
fn take_run_against_takers_and_a_setter_loses_and_doubles_nothing() {
    loom::model(|| {
        let map = Arc::new(PageBitmap::new(66));
        map.set_range(62, 3); // 62, 63 | 64
        let setter = {
            let map = Arc::clone(&map);
            loom::thread::spawn(move || u64::from(!map.set(63)) + map.merge_words(63, &[0b100])) // 65
        };
        let taker = {
            let map = Arc::clone(&map);
            loom::thread::spawn(move || map.take_run(60, 66, 2).map_or(0, |run| run.count))
        };
        let mine = map.take_run(0, 66, 66).map_or(0, |run| run.count);
        let newly = setter.join().unwrap();
        let taken = taker.join().unwrap();
        assert_eq!(3 + newly, mine + taken + map.count());
    });
}

/// Who takes a bit sees what was written before it was set: the way of a dirty page.
#[test]
fn take_run_sees_what_was_written_before_the_bit_was_set() {
    loom::model(|| {
        let map = Arc::new(PageBitmap::new(64));
        let page = Arc::new(AtomicU64::new(0));
        let writer = {
            let (map, page) = (Arc::clone(&map), Arc::clone(&page));
            loom::thread::spawn(move || {
                page.store(1, Ordering::Relaxed);
                map.merge_words(3, &[1]);
            })
        };
        if map.take_run(0, 64, 64).is_some() {
            assert_eq!(page.load(Ordering::Relaxed), 1);
        }
        writer.join().unwrap();
    });
}
