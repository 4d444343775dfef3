//! Pages that an adapter uses keep their physical memory.

use sterna_ram::{Backing, Emptied, PAGE_SIZE, PageBitmap, RamBlock, RamError, Run};

const PAGE: u64 = PAGE_SIZE as u64;
const PAGES: u64 = 2048;

fn full(backing: Backing) -> RamBlock {
    let block = RamBlock::new("ram", PAGES * PAGE, backing).unwrap();
    block.write(0, &vec![7; (PAGES * PAGE) as usize]).unwrap();
    block
}

fn absent(block: &RamBlock) -> u64 {
    let absent = PageBitmap::new(block.pages());
    block.mark_absent(0, block.pages(), &absent).unwrap();
    absent.count()
}

fn is_zero(block: &RamBlock, first: u64, count: u64) -> bool {
    block.slice(first * PAGE, (count * PAGE) as usize).unwrap().is_zero().unwrap()
}

#[test]
fn zeros_are_stored_under_a_pin_and_memory_is_given_back_elsewhere() {
    for backing in [Backing::Memfd, Backing::Anonymous] {
        let block = full(backing);
        let pin = block.pin(600 * PAGE, 4 * PAGE).unwrap();

        block.zero_pages(0, 512).unwrap();
        assert_eq!(absent(&block), 512, "{backing:?}: nothing is pinned there");
        block.zero_pages(512, 512).unwrap();
        assert_eq!(absent(&block), 512, "{backing:?}: a page was given back under the pin");
        assert!(is_zero(&block, 512, 512), "{backing:?}");

        // A clone has the same memory. Its pin is dropped immediately.
        drop(block.clone().pin(0, PAGE).unwrap());
        drop(pin);
        block.zero_present_pages(512, 512).unwrap();
        assert_eq!(absent(&block), 1024, "{backing:?}: nothing is pinned any more");
    }
}

#[test]
fn pinned_block_is_emptied_by_storing_zeros() {
    let block = full(Backing::Memfd);
    let pin = block.pin(5 * PAGE + 1, 1).unwrap();

    let refused = block.discard_all().unwrap_err();
    assert!(
        matches!(refused, RamError::Pinned { offset, len: 1, .. } if offset == 5 * PAGE + 1),
        "{refused}"
    );
    assert!(!is_zero(&block, 0, 1), "nothing has changed");
    let Emptied::Zeroed(why) = block.empty().unwrap() else { panic!("given back") };
    assert!(why.to_string().contains("registered with an adapter"), "{why}");
    assert!(is_zero(&block, 0, PAGES) && absent(&block) == 0);

    drop(pin);
    assert!(matches!(block.empty().unwrap(), Emptied::Freed));
    assert_eq!(absent(&block), PAGES);
}

#[test]
fn pages_that_are_pinned_are_told() {
    let block = RamBlock::new("ram", 16 * PAGE, Backing::Memfd).unwrap();
    let _one = block.pin(3 * PAGE + 5, 2 * PAGE).unwrap();
    let _two = block.pin(9 * PAGE, PAGE).unwrap();

    assert_eq!(block.pinned_in(0, 16), Some(Run { first: 3, count: 3 }));
    assert_eq!(block.pinned_in(4, 1), Some(Run { first: 4, count: 1 }));
    assert_eq!(block.pinned_in(6, 10), Some(Run { first: 9, count: 1 }));
    assert_eq!(block.pinned_in(6, 3), None);
    assert_eq!(block.pinned_in(4, 0), None, "no page is asked for");
    assert!(matches!(block.pin(15 * PAGE, 2 * PAGE), Err(RamError::OutOfRange { .. })));
}
