//! Tests that the dirty source reports every page that a device writes. The last write before the stop counts
//! too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::support::{Plan, Served, migrate, serve};
use sterna::DeviceStream;
use sterna_devices::statebank::dma::{Dma, DmaPlan};
use sterna_devices::statebank::stream::MOST_COUNT;
use sterna_devices::statebank::{StateBankConfig, Verdict};
use sterna_devices::vfio_user::wire::{DMA_READ, DMA_WRITE, DmaMap};
use sterna_devices::vfio_user::{DmaLog, DmaRegion};
use sterna_ram::dirty::LoggedRange;
use sterna_ram::{Backing, DirtyBitmaps, DirtySource, GuestRam, PAGE_SIZE, RamBlock};

const PAGE: u64 = PAGE_SIZE as u64;
const LOW_PAGES: u64 = 1000;
const HIGH_PAGES: u64 = 3001;
/// Far more writes per second than a test needs.
const WRITES_PER_SECOND: u64 = 200_000;

fn guest() -> (GuestRam, Vec<LoggedRange>) {
    let block = |name, pages| RamBlock::new(name, pages * PAGE, Backing::Memfd).unwrap();
    let ram = GuestRam::new(vec![block("low", LOW_PAGES), block("high", HIGH_PAGES)]).unwrap();
    // The second range begins inside a block, at a page whose index is no multiple of 64.
    let ranges = vec![
        LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: LOW_PAGES },
        LoggedRange { guest_address: 1 << 32, block: 1, first_page: 37, pages: HIGH_PAGES - 37 },
    ];
    (ram, ranges)
}

fn writer(seed: u64) -> StateBankConfig {
    StateBankConfig { dma_rate: WRITES_PER_SECOND, seed, ..StateBankConfig::default() }
}

fn waits_for_writes(served: &Served, more: u64) {
    let (start, began) = (served.bank().status().dma_writes, Instant::now());
    while served.bank().status().dma_writes < start + more {
        assert!(began.elapsed() < Duration::from_secs(30), "the device does not write");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Pages that contain a byte other than zero.
fn written(ram: &GuestRam) -> Vec<(usize, u64)> {
    let mut pages = Vec::new();
    for (index, block) in ram.blocks().iter().enumerate() {
        pages.extend(
            (0..block.pages())
                .filter(|page| !block.page(*page).unwrap().is_zero().unwrap())
                .map(|page| (index, page)),
        );
    }
    pages
}

fn copy(from: &GuestRam, to: &GuestRam, pages: &DirtyBitmaps) {
    let mut page = vec![0; PAGE_SIZE];
    for (index, bitmap) in pages.blocks().iter().enumerate() {
        for number in (0..bitmap.pages()).filter(|number| bitmap.get(*number)) {
            from.block(index).read(number * PAGE, &mut page).unwrap();
            to.block(index).write(number * PAGE, &page).unwrap();
        }
    }
}

#[test]
fn sync_after_the_stop_has_every_page_that_was_written() {
    let (ram, ranges) = guest();
    let served = serve(writer(1));
    let log = DmaLog::new(Arc::clone(&served.client), ram.clone(), ranges.clone()).unwrap();
    log.start().unwrap();
    served.client.map_ram(&ram, &ranges).unwrap();
    waits_for_writes(&served, 300);

    served.device.quiesce().unwrap();
    waits_for_writes(&served, 100);
    served.device.stop().unwrap();
    let at_stop = served.bank().status().dma_writes;
    let mut found = DirtyBitmaps::new(&ram);
    let report = log.sync(&mut found).unwrap();

    let pages = written(&ram);
    assert!(pages.len() > 200, "{}", pages.len());
    for (block, page) in &pages {
        assert!(found.block(*block).get(*page), "page {page} of block {block} was written and not reported");
    }
    assert_eq!(found.count(), pages.len() as u64, "pages were reported that were not written");
    assert_eq!(report.newly_dirty, found.count());
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(served.bank().status().dma_writes, at_stop, "it writes on");
    found.clear_all();
    log.sync(&mut found).unwrap();
    assert_eq!(found.count(), 0, "a report takes the bits out of the log");
    log.stop().unwrap();
    log.stop().unwrap();
    assert!(log.sync(&mut found).is_err());
}

#[test]
fn sync_while_it_writes_loses_nothing_that_a_later_one_does_not_bring() {
    let (ram, ranges) = guest();
    let served = serve(writer(2));
    let log = DmaLog::new(Arc::clone(&served.client), ram.clone(), ranges.clone()).unwrap();
    log.start().unwrap();
    served.client.map_ram(&ram, &ranges).unwrap();

    let mut found = DirtyBitmaps::new(&ram);
    for _ in 0..30 {
        waits_for_writes(&served, 50);
        log.sync(&mut found).unwrap();
    }
    served.device.stop().unwrap();
    log.sync(&mut found).unwrap();

    let pages = written(&ram);
    assert_eq!(found.count(), pages.len() as u64);
    assert!(pages.iter().all(|(block, page)| found.block(*block).get(*page)));
}

#[test]
fn migrate_with_ram_whose_last_sync_follows_the_stop_satisfies_the_device() {
    let ((from, ranges), (to, _)) = (guest(), guest());
    let (source, target) =
        (serve(writer(3)), serve(StateBankConfig { seed: 4, ..StateBankConfig::default() }));
    let log = DmaLog::new(Arc::clone(&source.client), from.clone(), ranges.clone()).unwrap();
    log.start().unwrap();
    source.client.map_ram(&from, &ranges).unwrap();
    target.client.map_ram(&to, &ranges).unwrap();
    waits_for_writes(&source, 500);
    let sync = || {
        let mut pages = DirtyBitmaps::new(&from);
        log.sync(&mut pages).unwrap();
        copy(&from, &to, &pages);
    };
    sync();

    migrate(&source.device, &target.device, Plan { stopped: &sync, ..Plan::plain() }).unwrap();

    assert_eq!(target.bank().status().ram, Verdict::Good);
    // The loaded device continues to write in its source's window.
    waits_for_writes(&target, 10);
}

#[test]
fn migrate_with_ram_whose_last_sync_is_missing_is_noticed_by_the_device() {
    let ((from, ranges), (to, _)) = (guest(), guest());
    let (source, target) = (serve(writer(5)), serve(StateBankConfig::default()));
    let log = DmaLog::new(Arc::clone(&source.client), from.clone(), ranges.clone()).unwrap();
    log.start().unwrap();
    source.client.map_ram(&from, &ranges).unwrap();
    target.client.map_ram(&to, &ranges).unwrap();
    waits_for_writes(&source, 500);
    let mut pages = DirtyBitmaps::new(&from);
    log.sync(&mut pages).unwrap();
    copy(&from, &to, &pages);
    waits_for_writes(&source, 50);

    let error = migrate(&source.device, &target.device, Plan::plain()).unwrap_err();

    assert!(error.to_string().contains("the change to RUNNING failed"), "{error}");
}

#[test]
fn map_ram_that_cannot_be_shared_is_refused() {
    let block = RamBlock::new("private", 16 * PAGE, Backing::Anonymous).unwrap();
    let ram = GuestRam::new(vec![block]).unwrap();
    let range = LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: 16 };
    let served = serve(StateBankConfig::default());

    let error = served.client.map_ram(&ram, &[range]).unwrap_err();

    assert!(error.to_string().contains("private memory"), "{error}");
    let error = DmaLog::new(Arc::clone(&served.client), ram, vec![LoggedRange { pages: 17, ..range }]);
    assert!(error.is_err());
}

#[test]
fn map_twice_and_unmap_what_is_not_there_are_refused() {
    let (ram, ranges) = guest();
    let served = serve(StateBankConfig::default());
    served.client.map_ram(&ram, &ranges).unwrap();

    let twice = served.client.map_ram(&ram, &ranges[..1]).unwrap_err();
    let nothing = served.client.dma_unmap(0x1000, 0x1000).unwrap_err();

    assert!(twice.to_string().contains("exists"), "{twice}");
    assert!(nothing.to_string().contains("No such"), "{nothing}");
    served.client.dma_unmap(0, LOW_PAGES * PAGE).unwrap();
    served.client.map_ram(&ram, &ranges[..1]).unwrap();
    served.client.dma_unmap_all().unwrap();
    served.client.map_ram(&ram, &ranges).unwrap();
}

#[test]
fn verify_of_more_writes_than_anybody_can_count_ends() {
    const PAGES: u64 = 500;
    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGES * PAGE).unwrap();
    let map = DmaMap { flags: DMA_READ | DMA_WRITE, offset: 0, address: 0, size: PAGES * PAGE };
    let dma = Dma::new(DmaPlan::default());
    dma.map(&DmaRegion { map, file: file.into() }).unwrap();
    dma.become_other(DmaPlan { seed: 9, ..DmaPlan::default() }, MOST_COUNT);

    let lost = dma.verify().expect("something to look at").unwrap_err();

    assert_eq!(lost.found, 0);
    assert!(lost.expected > MOST_COUNT - 100 * PAGES, "{lost}");
}
