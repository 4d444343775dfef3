//! Compares merging with a bitwise model: every method, every offset, odd ends, threads.

use std::sync::atomic::Ordering;

use sterna_ram::merge::{Method, Shifted, merge};
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, PageBitmap, RamBlock};

/// Returns words of a random kind: sparse, dense, mostly clear with islands, or all set.
fn words(random: &mut fastrand::Rng, len: usize) -> Vec<u64> {
    let kind = random.u64(..4);
    let word = |random: &mut fastrand::Rng| match kind {
        0 if random.u64(..8) == 0 => 1 << random.u64(..64),
        1 => random.u64(..),
        2 if random.u64(..40) == 0 => random.u64(..) & random.u64(..),
        3 => u64::MAX,
        _ => 0,
    };
    (0..len).map(|_| word(random)).collect()
}

fn bit(words: &[u64], index: usize) -> bool {
    words.get(index / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
}

/// ORs `from`, shifted up by `bits` and without its first `skipped` words, into `into`, one bit at a time.
fn model(into: &mut [u64], from: &[u64], bits: usize, skipped: usize) -> u64 {
    let mut newly = 0;
    for index in 0..from.len() * 64 {
        let Some(at) = (index + bits).checked_sub(skipped * 64) else { continue };
        if bit(from, index) && at < into.len() * 64 && !bit(into, at) {
            into[at / 64] |= 1 << (at % 64);
            newly += 1;
        }
    }
    newly
}

#[test]
fn merge_by_every_method_at_every_offset_is_the_model() {
    let mut random = sterna_testing::random("merge_by_every_method");
    for bits in 0..64u32 {
        for round in 0..8 {
            let lengths = if round == 0 { 5 } else { 300 };
            let from = {
                let len = random.u64(..lengths) as usize;
                words(&mut random, len)
            };
            let target = {
                let len = 8 + random.u64(..lengths) as usize;
                words(&mut random, len)
            };
            // The target begins at any word of a cache line, and leading words of the source may be left out.
            let (begin, skipped) = (random.u64(..8) as usize, random.u64(..3) as usize);
            let mut expected = target.clone();
            let newly = model(&mut expected[begin..], &from, bits as usize, skipped);
            for method in Method::available() {
                let mut got = target.clone();
                let counted = method.merge(&mut got[begin..], Shifted::new(&from, bits).after(skipped));
                assert_eq!((counted, &got), (newly, &expected), "{method:?}, {bits} bits, {skipped} skipped");
            }
        }
    }
}

#[test]
fn bits_cleared_and_counted_by_every_method_are_those_of_the_model() {
    let mut random = sterna_testing::random("bits_cleared_and_counted");
    for len in 0..200 {
        let (bits, target) = (words(&mut random, len), words(&mut random, len));
        let expected: Vec<u64> = target.iter().zip(&bits).map(|(word, bits)| word & !bits).collect();
        let ones = |words: &[u64]| (0..words.len() * 64).filter(|index| bit(words, *index)).count() as u64;
        for method in Method::available() {
            let mut got = target.clone();
            let cleared = method.clear(&mut got, &bits);
            assert_eq!((cleared, &got), (ones(&target) - ones(&expected), &expected), "{method:?}");
            assert_eq!(method.count(&target), ones(&target), "{method:?}");
        }
    }
}

#[test]
fn merge_on_threads_is_as_on_one() {
    let mut random = sterna_testing::random("merge_on_threads");
    for bits in [0, 1, 37, 63] {
        // Enough for two threads, and an odd number of words.
        let from = words(&mut random, (1 << 21) + 77);
        let len = (1 << 21) + 50 + random.u64(..60) as usize;
        let target = words(&mut random, len);
        let (mut one, mut many) = (target.clone(), target);
        let newly = Method::Scalar.merge(&mut one, Shifted::new(&from, bits));
        assert_eq!(merge(&mut many, Shifted::new(&from, bits)), newly);
        assert!(one == many, "{bits} bits");
    }
}

#[test]
fn bitmap_merged_with_bits_behind_its_end_keeps_none_of_them() {
    let mut random = sterna_testing::random("bitmap_merged_with_bits_behind_its_end");
    for first in 0..64u64 {
        for pages in [1, 63, 64, 65, 4095, 4096, 4097, 9_000 + random.u64(..500)] {
            let mut map = PageBitmap::new(pages);
            // Far more bits than the bitmap has, all set.
            let newly = map.merge_words(first, &vec![u64::MAX; pages as usize / 64 + 40]);
            assert_eq!(newly, pages.saturating_sub(first), "page {first} of {pages}");
            let in_words: u64 =
                map.words().iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum();
            assert_eq!(in_words, newly, "no bit behind the last page");
        }
    }
}

#[test]
fn bitmap_merge_of_long_words_is_the_model() {
    let mut random = sterna_testing::random("bitmap_merge_of_long_words");
    for first in 0..64u64 {
        let pages = 10_000 + random.u64(..5000);
        let from = {
            let len = 100 + random.u64(..200) as usize;
            words(&mut random, len)
        };
        let first = first + 64 * random.u64(..20);
        let mut map = PageBitmap::new(pages);
        let newly = map.merge_words(first, &from);
        let set = (0..pages).filter(|page| map.get(*page));
        let expected: Vec<u64> = (0..from.len() * 64)
            .filter(|index| bit(&from, *index))
            .map(|index| first + index as u64)
            .filter(|page| *page < pages)
            .collect();
        assert!(set.eq(expected.iter().copied()), "offset {first}");
        assert_eq!(newly, expected.len() as u64);
        assert_eq!(map.merge_words(first, &from), 0, "nothing is new the second time");
    }
}

#[test]
fn bitmap_range_added_is_the_range_set() {
    let mut random = sterna_testing::random("bitmap_range_added");
    for _ in 0..500 {
        let pages = 1 + random.u64(..1000);
        let (shared, mut own) = (PageBitmap::new(pages), PageBitmap::new(pages));
        for _ in 0..10 {
            let first = random.u64(..pages + 1);
            let count = random.u64(..pages - first + 1);
            assert_eq!(own.add_range(first, count), shared.set_range(first, count));
        }
        assert!((0..pages).all(|page| own.get(page) == shared.get(page)));
    }
}

#[test]
fn reports_of_pages_still_to_be_sent_are_dropped_and_no_others() {
    let mut random = sterna_testing::random("reports_of_pages_still_to_be_sent");
    let block = |name: &str, pages: u64| {
        RamBlock::new(name, pages * PAGE_SIZE as u64, Backing::Anonymous).expect("memory")
    };
    let ram = GuestRam::new(vec![block("a", 5000), block("b", 77)]).expect("RAM");
    for _ in 0..50 {
        let (mut next, sent) = (DirtyBitmaps::new(&ram), DirtyBitmaps::new(&ram));
        let mut kept = Vec::new();
        let mut dropped = 0;
        for (index, block) in ram.blocks().iter().enumerate() {
            for page in 0..block.pages() {
                let (reported, waits) = (random.u64(..9) == 0, random.u64(..3) == 0);
                if reported {
                    next.block(index).set(page);
                }
                if waits {
                    sent.block(index).set(page);
                }
                match (reported, waits) {
                    (true, true) => dropped += 1,
                    (true, false) => kept.push((index, page)),
                    _ => {}
                }
            }
        }
        let before = sent.count();
        assert_eq!(next.drop_reported(&sent), dropped);
        assert_eq!((next.count(), sent.count()), (kept.len() as u64, before));
        assert!(kept.iter().all(|&(block, page)| next.block(block).get(page)));
    }
}
