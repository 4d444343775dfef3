//! The zero scan: every method against every position of a single byte that is not zero.

use sterna_ram::zero::Method;
use sterna_ram::{Backing, PAGE_SIZE, RamBlock};

#[test]
fn zero_scan_every_single_byte_is_seen_by_every_method() {
    let block = RamBlock::new("ram", 2 * PAGE_SIZE as u64, Backing::Anonymous).unwrap();
    let page = block.page(0).unwrap();
    for method in Method::available() {
        assert!(method.is_zero(page).unwrap(), "{method:?}");
        for at in 0..PAGE_SIZE as u64 {
            for value in [1, 0x80] {
                block.write(at, &[value]).unwrap();
                assert!(!method.is_zero(page).unwrap(), "{method:?} at {at}");
            }
            block.write(at, &[0]).unwrap();
        }
        assert!(method.is_zero(page).unwrap(), "{method:?}");
    }
}

#[test]
fn zero_scan_crooked_windows_see_their_own_bytes_only() {
    let block = RamBlock::new("ram", PAGE_SIZE as u64, Backing::Anonymous).unwrap();
    for method in Method::available() {
        for from in [0u64, 1, 7, 63, 64, 65, 100] {
            for len in [0usize, 1, 15, 63, 64, 65, 127, 128, 200, 255, 256, 257, 320, 577, 1000] {
                let window = block.slice(from, len).unwrap();
                for at in from.saturating_sub(2)..from + len as u64 + 2 {
                    block.write(at, &[0xff]).unwrap();
                    let inside = (from..from + len as u64).contains(&at);
                    assert_eq!(method.is_zero(window).unwrap(), !inside, "{method:?} {from}+{len} at {at}");
                    block.write(at, &[0]).unwrap();
                }
            }
        }
    }
}

#[test]
fn zero_scan_of_many_pages_agrees_with_each_page() {
    let pages = 150;
    let block = RamBlock::new("ram", pages * PAGE_SIZE as u64, Backing::Memfd).unwrap();
    for page in (0..pages).filter(|page| page % 7 == 3 || page % 64 == 63) {
        block.write(page * PAGE_SIZE as u64 + page * 13, &[9]).unwrap();
    }
    let window = block.slice(0, pages as usize * PAGE_SIZE).unwrap();
    for method in Method::available() {
        let mut bits = [u64::MAX; 4];
        let zero = method.zero_page_bits(window, &mut bits).unwrap();
        for page in 0..256 {
            let expected = page < pages && block.page(page).unwrap().is_zero().unwrap();
            assert_eq!(bits[page as usize / 64] >> (page % 64) & 1 == 1, expected, "{method:?} {page}");
        }
        assert_eq!(zero, u64::from(bits.iter().map(|word| word.count_ones()).sum::<u32>()));
        let mut few = [0u64; 1];
        assert_eq!(method.zero_page_bits(window, &mut few).unwrap(), u64::from(bits[0].count_ones()));
    }
    assert!(Method::available().contains(&Method::best()));
}
