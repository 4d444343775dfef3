//! Tests of pages that arrive while a thread waits for them.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use sterna_ram::missing_pages::{Fault, MissingPages, MissingPagesError, Placed, PlacedEnd, TakenAhead};
use sterna_ram::{Backing, ExternalMemory, GuestRam, PAGE_SIZE, RamBlock};

use crate::support::skipped;

const PAGES: u64 = 8;

fn ram(backing: Backing) -> GuestRam {
    GuestRam::new(vec![RamBlock::new("m0", PAGES * PAGE_SIZE as u64, backing).unwrap()]).unwrap()
}

/// Registers the RAM; `None` if this host forbids it.
fn registered(ram: &GuestRam) -> Option<Arc<MissingPages>> {
    match MissingPages::new(ram) {
        Ok(missing) => {
            missing.register().unwrap();
            Some(Arc::new(missing))
        }
        Err(error @ MissingPagesError::Unsupported { .. }) => {
            skipped("missing_pages", error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

const OCCUPIED: &str = "there was a page";

/// Returns the number of placed pages, and why the next one was not placed.
fn pages(placed: Placed) -> (u64, Option<&'static str>) {
    let end = placed.end.map(|end| match end {
        PlacedEnd::Occupied => OCCUPIED,
        PlacedEnd::Failed(error) => panic!("{error}"),
    });
    (placed.pages, end)
}

fn first_fault(missing: &MissingPages) -> Fault {
    let mut faults = Vec::new();
    while faults.is_empty() {
        assert!(missing.wait(&mut faults).unwrap());
    }
    faults[0]
}

#[test]
fn whoever_touches_a_missing_page_waits_until_it_is_placed() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let ram = ram(backing);
        let Some(missing) = registered(&ram) else { return };
        let theirs = ram.clone();
        let (said, hears) = mpsc::channel();
        let reader = thread::spawn(move || {
            let mut page = [0; PAGE_SIZE];
            theirs.block(0).read(3 * PAGE_SIZE as u64, &mut page).unwrap();
            said.send(page).unwrap();
        });

        let fault = first_fault(&missing);
        assert_eq!((fault.block, fault.first, fault.count), (0, 3, 1));
        assert_ne!(fault.thread, 0, "which thread waits");
        assert!(hears.try_recv().is_err(), "it waits");
        assert_eq!(pages(missing.place(0, 3, &[7; PAGE_SIZE])), (1, None));

        assert_eq!(hears.recv().unwrap(), [7; PAGE_SIZE]);
        reader.join().unwrap();
        assert_eq!(pages(missing.place(0, 3, &[8; PAGE_SIZE])), (0, Some(OCCUPIED)), "a page is placed once");
        assert_eq!(pages(missing.place_zeros(0, 4, 2)), (2, None));
        assert_eq!(pages(missing.place_zeros(0, 4, 1)), (0, Some(OCCUPIED)));
        let mut page = [1; PAGE_SIZE];
        ram.block(0).read(4 * PAGE_SIZE as u64, &mut page).unwrap();
        assert_eq!(page, [0; PAGE_SIZE]);
        missing.end();
    }
}

#[test]
fn kernel_that_writes_into_a_missing_page_waits_too() {
    let ram = ram(Backing::Memfd);
    let Some(missing) = registered(&ram) else { return };
    let theirs = ram.clone();
    let writer = thread::spawn(move || {
        let address = theirs.block(0).host_address();
        // SAFETY: a page of the block, which lives until this thread has ended; no other code accesses it.
        let place = unsafe { std::slice::from_raw_parts_mut(address.wrapping_add(PAGE_SIZE), 16) };
        File::open("/dev/zero").unwrap().read_exact(place).unwrap();
    });

    let fault = first_fault(&missing);
    assert_eq!(fault.first, 1);
    assert_eq!(pages(missing.place(0, 1, &[9; PAGE_SIZE])), (1, None));

    writer.join().unwrap();
    let mut bytes = [1; 32];
    ram.block(0).read(PAGE_SIZE as u64, &mut bytes).unwrap();
    assert_eq!(bytes[..16], [0; 16], "what the kernel wrote into the page that was placed");
    assert_eq!(bytes[16..], [9; 16]);
    missing.end();
}

#[test]
fn page_that_is_taken_away_is_missing_again_and_the_end_lets_everybody_go_on() {
    let ram = ram(Backing::Anonymous);
    ram.block(0).write(0, &[5; PAGE_SIZE]).unwrap();
    let Some(missing) = registered(&ram) else { return };
    missing.take_away(0, 0, 1).unwrap();
    let theirs = ram.clone();
    let reader = thread::spawn(move || theirs.block(0).read_u64(0).unwrap());
    assert_eq!(first_fault(&missing).first, 0);

    missing.end();

    assert_eq!(reader.join().unwrap(), 0);
    missing.stop_waiting();
    assert!(!missing.wait(&mut Vec::new()).unwrap());
}

#[test]
fn pages_taken_away_ahead_are_away_unless_somebody_touches_one() {
    let (memfd, anonymous) = (ram(Backing::Memfd), ram(Backing::Anonymous));
    let taken = |ram: &GuestRam, touch: bool| {
        ram.block(0).write(0, &[5; PAGES as usize * PAGE_SIZE]).unwrap();
        let mut ahead = TakenAhead::new(ram);
        assert!(ahead.still_away(0).is_none());
        ahead.take_away(0, 1, 2).unwrap();
        if touch {
            // A read is enough to fill a discarded page.
            assert_eq!(ram.block(0).read_u64(PAGE_SIZE as u64).unwrap(), 0);
        }
        ahead.take_away(0, 5, 1).unwrap();
        ahead
    };
    let ahead = taken(&memfd, false);
    let away = ahead.still_away(0).unwrap();
    assert_eq!((0..PAGES).filter(|page| away.get(*page)).collect::<Vec<_>>(), [1, 2, 5]);
    memfd.block(0).write(2 * PAGE_SIZE as u64, &[7]).unwrap();
    assert!(ahead.still_away(0).is_none(), "it is there again");

    assert!(taken(&memfd, true).still_away(0).is_none(), "it came back between two that were taken away");
    assert!(taken(&anonymous, false).still_away(0).is_none(), "nothing tells whether it is there");
    assert!(TakenAhead::new(&memfd).take_away(0, PAGES, 1).is_err());
}

#[test]
fn guest_whose_missing_pages_are_dropped_waits_for_ever_and_sees_no_zeros() {
    let ram = ram(Backing::Memfd);
    let Some(missing) = registered(&ram) else { return };
    drop(missing);
    let theirs = ram.clone();
    let (said, hears) = mpsc::channel();
    // The thread blocks until the process ends.
    thread::spawn(move || said.send(theirs.block(0).read_u64(0)));

    // A thread that does not block would answer within a fraction of this time.
    assert!(hears.recv_timeout(Duration::from_millis(300)).is_err());
    // The memory must outlive the blocked thread.
    std::mem::forget(ram);
}

#[test]
fn memory_whose_pages_cannot_come_later_is_refused_by_its_name() {
    let owner = RamBlock::new("owner", PAGES * PAGE_SIZE as u64, Backing::Anonymous).unwrap();
    let memory = ExternalMemory::new(owner.host_address(), owner.len_bytes(), Arc::new(owner.clone()));
    // SAFETY: the memory lives as long as its owner, which the block keeps.
    let block = unsafe { RamBlock::from_external("theirs", memory) }.unwrap();
    let error = MissingPages::check(&GuestRam::new(vec![block]).unwrap()).unwrap_err();
    assert!(matches!(&error, MissingPagesError::Refused { block, .. } if block == "theirs"), "{error}");

    let empty = RamBlock::without_memory("image", 4096).unwrap();
    assert!(MissingPages::check(&GuestRam::new(vec![empty]).unwrap()).is_err());
    MissingPages::check(&ram(Backing::Anonymous)).unwrap();
}

#[test]
fn pages_that_are_not_there_are_not_placed() {
    let ram = ram(Backing::Anonymous);
    let Some(missing) = registered(&ram) else { return };
    let empty = missing.place(0, 0, &[]);
    for wrong in [missing.place(0, PAGES, &[0; PAGE_SIZE]), missing.place(1, 0, &[0; PAGE_SIZE]), empty] {
        assert_eq!(wrong.pages, 0);
        assert!(matches!(wrong.end, Some(PlacedEnd::Failed(MissingPagesError::Outside { .. }))), "{wrong:?}");
    }
    missing.end();
}

#[test]
fn pages_before_one_that_cannot_be_placed_are_counted() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let ram = ram(backing);
        let Some(missing) = registered(&ram) else { return };
        assert_eq!(pages(missing.place(0, 3, &[1; PAGE_SIZE])), (1, None));
        assert_eq!(pages(missing.place_zeros(0, 6, 1)), (1, None));

        assert_eq!(pages(missing.place(0, 1, &[2; 4 * PAGE_SIZE])), (2, Some(OCCUPIED)));
        assert_eq!(pages(missing.place_zeros(0, 4, 4)), (2, Some(OCCUPIED)));

        let mut content = [0; PAGES as usize * PAGE_SIZE];
        assert_eq!(pages(missing.place_zeros(0, 0, 1)), (1, None));
        assert_eq!(pages(missing.place_zeros(0, 7, 1)), (1, None));
        ram.block(0).read(0, &mut content).unwrap();
        let first_bytes = content.iter().step_by(PAGE_SIZE).copied().collect::<Vec<_>>();
        assert_eq!(first_bytes, [0, 2, 2, 1, 0, 0, 0, 0], "what was there is unchanged");
        missing.end();
    }
}
