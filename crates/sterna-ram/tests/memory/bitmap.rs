//! Compares page bitmaps with a simple model, also under concurrent threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_ram::{PageBitmap, Run};

fn filled(bits: &[bool]) -> PageBitmap {
    let map = PageBitmap::new(bits.len() as u64);
    for (page, bit) in bits.iter().enumerate() {
        if *bit {
            map.set(page as u64);
        }
    }
    map
}

fn bits(map: &PageBitmap) -> Vec<bool> {
    (0..map.pages()).map(|page| map.get(page)).collect()
}

fn random_bits(random: &mut fastrand::Rng, len: usize) -> Vec<bool> {
    let density = 1 + random.u64(..20);
    (0..len).map(|_| random.u64(..20) < density).collect()
}

#[test]
fn bitmap_set_and_clear_give_what_was_there() {
    let map = PageBitmap::new(130);
    assert!(!map.set(129) && map.set(129) && map.get(129));
    assert!(map.clear(129) && !map.clear(129) && !map.get(129));
}

#[test]
fn bitmap_set_all_leaves_the_tail_clear() {
    for pages in [1, 63, 64, 65, 127, 128, 1000] {
        let map = PageBitmap::new(pages);
        map.set_all();
        assert_eq!(map.count(), pages);
        let in_words: u32 = map.words().iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum();
        assert_eq!(u64::from(in_words), pages);
        map.clear_all();
        assert_eq!(map.count(), 0);
    }
}

#[test]
#[should_panic(expected = "not in a bitmap")]
fn bitmap_page_behind_the_end_panics() {
    PageBitmap::new(65).get(65);
}

#[test]
fn bitmap_ranges_behave_as_the_model() {
    let mut random = sterna_testing::random("bitmap_ranges");
    for _ in 0..2000 {
        let len = 1 + random.u64(..300) as usize;
        let mut model = random_bits(&mut random, len);
        let map = filled(&model);
        let first = random.u64(..len as u64 + 1);
        let count = random.u64(..len as u64 - first + 1);
        let range = first as usize..(first + count) as usize;
        let set = model[range.clone()].iter().filter(|bit| **bit).count() as u64;
        assert_eq!(map.count_range(first, count), set);
        if random.u64(..2) == 0 {
            assert_eq!(map.set_range(first, count), count - set);
            model[range].fill(true);
        } else {
            assert_eq!(map.clear_range(first, count), set);
            model[range].fill(false);
        }
        assert_eq!(bits(&map), model);
    }
}

#[test]
fn bitmap_merge_at_every_offset_is_the_model() {
    let mut random = sterna_testing::random("bitmap_merge");
    for first in (0..200u64).chain([63, 64, 65, 128, 10_000]) {
        for _ in 0..20 {
            let len = 1 + random.u64(..400) as usize;
            let mut model = random_bits(&mut random, len);
            let mut map = filled(&model);
            let words: Vec<u64> = (0..random.u64(..6)).map(|_| random.u64(..) & random.u64(..)).collect();

            let newly = map.merge_words(first, &words);

            let mut expected = 0;
            for bit in 0..words.len() * 64 {
                let page = first as usize + bit;
                if words[bit / 64] >> (bit % 64) & 1 == 1 && page < len && !model[page] {
                    model[page] = true;
                    expected += 1;
                }
            }
            assert_eq!(newly, expected, "offset {first}");
            assert_eq!(bits(&map), model, "offset {first}");
            assert_eq!(map.count(), model.iter().filter(|bit| **bit).count() as u64, "no bit in the tail");
        }
    }
}

#[test]
fn bitmap_copy_words_is_the_inverse_of_merge() {
    let mut random = sterna_testing::random("bitmap_copy_words");
    for first in 0..200 {
        let model = random_bits(&mut random, 500);
        let map = filled(&model);
        let mut words = [u64::MAX; 7];
        map.copy_words(first, &mut words);
        for bit in 0..words.len() * 64 {
            let expected = model.get(first as usize + bit).copied().unwrap_or(false);
            assert_eq!(words[bit / 64] >> (bit % 64) & 1 == 1, expected, "offset {first} bit {bit}");
        }
    }
}

#[test]
fn bitmap_or_from_counts_what_is_new() {
    let mut random = sterna_testing::random("bitmap_or_from");
    let (one, other) = (random_bits(&mut random, 777), random_bits(&mut random, 777));
    let mut map = filled(&one);
    let new = one.iter().zip(&other).filter(|(one, other)| !**one && **other).count();
    assert_eq!(map.or_from(&filled(&other)), new as u64);
    assert!(
        bits(&map).iter().zip(one.iter().zip(&other)).all(|(bit, (one, other))| *bit == (*one || *other))
    );
}

#[test]
fn bitmap_runs_are_those_of_the_model() {
    let mut random = sterna_testing::random("bitmap_runs");
    for _ in 0..3000 {
        let len = 1 + random.u64(..400) as usize;
        let mut model = random_bits(&mut random, len);
        let map = filled(&model);
        let from = random.u64(..len as u64 + 10);
        let end = random.u64(..len as u64 + 10);
        let max = [0, 1, 2, 63, 64, 65, 128, u64::MAX][random.u64(..8) as usize];
        let stop = (end as usize).min(len);
        let first = (from as usize..stop).find(|page| model[*page]).filter(|_| max > 0);
        let expected = first.map(|first| {
            let count = (first..stop).take_while(|page| model[*page]).count() as u64;
            Run { first: first as u64, count: count.min(max) }
        });

        assert_eq!(map.next_run(from, end, max), expected);
        assert_eq!(bits(&map), model, "looking takes nothing");
        assert_eq!(map.take_run(from, end, max), expected);
        if let Some(run) = expected {
            model[run.first as usize..run.end() as usize].fill(false);
        }
        assert_eq!(bits(&map), model);
    }
}

/// Takers and setters on the same words: every bit is taken exactly as often as it was set.
#[test]
fn bitmap_runs_taken_by_threads_lose_and_double_nothing() {
    const PAGES: u64 = 300;
    let map = PageBitmap::new(PAGES);
    let set: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let taken: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let setters: Vec<_> = (0..2)
            .map(|seed: u64| {
                let (map, set) = (&map, &set);
                scope.spawn(move || {
                    let mut dice = fastrand::Rng::with_seed(seed + 1);
                    for _ in 0..200_000 {
                        let page = dice.u64(..PAGES);
                        if dice.bool() {
                            if !map.set(page) {
                                set[page as usize].fetch_add(1, Ordering::Relaxed);
                            }
                        } else {
                            // A range of one page, so that the test knows which thread set it.
                            let newly = map.set_range(page, 1);
                            set[page as usize].fetch_add(newly, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        for taker in 0..2u64 {
            let (map, taken, done) = (&map, &taken, &done);
            scope.spawn(move || {
                loop {
                    let last = done.load(Ordering::SeqCst);
                    let mut from = 0;
                    while let Some(run) = map.take_run(from, PAGES, 5 + taker * 100) {
                        for page in run.first..run.end() {
                            taken[page as usize].fetch_add(1, Ordering::Relaxed);
                        }
                        from = run.end();
                    }
                    if last {
                        break;
                    }
                }
            });
        }
        for setter in setters {
            setter.join().unwrap();
        }
        done.store(true, Ordering::SeqCst);
    });
    assert_eq!(map.count(), 0);
    for page in 0..PAGES as usize {
        assert_eq!(set[page].load(Ordering::Relaxed), taken[page].load(Ordering::Relaxed), "page {page}");
    }
}
