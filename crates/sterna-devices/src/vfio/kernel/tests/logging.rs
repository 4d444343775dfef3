//! Tests of DMA writes that are read from the kernel's log.

use std::sync::Arc;

use sterna_ram::dirty::LoggedRange;
use sterna_ram::{Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, RamBlock};

use super::{OPEN, RUNS, replay};
use crate::vfio::DmaLog;

const PAGE: u64 = 4096;

/// Two ranges: 3 pages at 0, and 67 pages at 1 MiB. The latter are the block's pages from the third on.
fn guest() -> (GuestRam, Vec<LoggedRange>) {
    let block = RamBlock::new("ram", 80 * PAGE, Backing::Anonymous).unwrap();
    let low = LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: 3 };
    let high = LoggedRange { guest_address: 0x10_0000, block: 0, first_page: 3, pages: 67 };
    (GuestRam::new(vec![block]).unwrap(), vec![low, high])
}

const START: &str = "
    ioctl(vfio, 0x3b75, 20000000 06000200 0010000000000000 02000000 00000000 0000000000000000,
        &0000000000000000 0030000000000000  0000100000000000 0030040000000000) = 0
";

#[test]
fn sync_merges_the_reports_at_their_pages() {
    let report = "
        ioctl(vfio, 0x3b75, 28000000 08000100 0000000000000000 0030000000000000 0010000000000000 0000000000000000,
            &0000000000000000) = 0, &fa00000000000000                   # page 1, and bits behind the range
        ioctl(vfio, 0x3b75, 28000000 08000100 0000100000000000 0030040000000000 0010000000000000 0000000000000000,
            &0000000000000000 0000000000000000) = 0, &0100000000000080 0c00000000000000
        ioctl(vfio, 0x3b75, 28000000 08000100 0000000000000000 0030000000000000 0010000000000000 0000000000000000,
            &0000000000000000) = 0, &0200000000000000                   # page 1 again
        ioctl(vfio, 0x3b75, 28000000 08000100 0000100000000000 0030040000000000 0010000000000000 0000000000000000,
            &0000000000000000 0000000000000000) = 0
        ioctl(vfio, 0x3b75, 08000000 07000200) = 0                      # DMA_LOGGING_STOP
    ";
    replay(&joined(&[OPEN, RUNS, START, report].concat()), |port| {
        let (ram, ranges) = guest();
        let log = DmaLog::new(Arc::new(port.unwrap()), ram.clone(), ranges).unwrap();
        let mut found = DirtyBitmaps::new(&ram);

        log.start().unwrap();
        log.start().unwrap();
        let first = log.sync(&mut found).unwrap();
        let second = log.sync(&mut found).unwrap();
        log.stop().unwrap();

        let pages: Vec<u64> = (0..80).filter(|page| found.block(0).get(*page)).collect();
        // Bits 0, 63 and 66 of the second range, whose first page is 3. Bit 67 is after its end.
        assert_eq!(pages, [1, 3, 66, 69]);
        assert_eq!((first.newly_dirty, second.newly_dirty), (4, 0));
        assert!(matches!(log.sync(&mut found), Err(DirtyError::NotStarted { .. })));
    });
}

#[test]
fn sync_that_the_kernel_refuses_names_the_device() {
    let refuses = "
        ioctl(vfio, 0x3b75, 28000000 08000100 0000000000000000 0030000000000000 0010000000000000 0000000000000000,
            &0000000000000000) = -1 EIO
        ioctl(vfio, 0x3b75, 08000000 07000200) = -1 ENODEV              # the log went with the device
    ";
    replay(&joined(&[OPEN, RUNS, START, refuses].concat()), |port| {
        let (ram, ranges) = guest();
        let log = DmaLog::new(Arc::new(port.unwrap()), ram.clone(), ranges).unwrap();
        log.start().unwrap();

        let error = log.sync(&mut DirtyBitmaps::new(&ram)).unwrap_err();
        log.stop().unwrap();

        let told = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(told.contains("0000:08:00.2") && told.contains("DMA_LOGGING_REPORT"), "{error}: {told}");
    });
}

#[test]
fn start_on_a_device_that_does_not_log_fails() {
    let open = OPEN.replace("08000000 06000600) = 0", "08000000 06000600) = -1 ENOTTY");
    // A possible effect of START is undone.
    let stop = "ioctl(vfio, 0x3b75, 08000000 07000200) = -1 ENOTTY\n";
    replay(&[&open, RUNS, stop].concat(), |port| {
        let (ram, ranges) = guest();
        let log = DmaLog::new(Arc::new(port.unwrap()), ram.clone(), ranges).unwrap();

        assert!(log.start().is_err());
        log.stop().unwrap();
    });
}

/// Joins a line that ends with a comma with the next one.
fn joined(record: &str) -> String {
    record.replace(",\n", ",")
}
