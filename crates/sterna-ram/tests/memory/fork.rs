//! After a fork (a VMM that daemonises), the child reads its own page tables, not its parent's.

use sterna_ram::dirty::UffdDirtyLog;
use sterna_ram::{Backing, DirtyBitmaps, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, RamBlock};

use crate::support::{is_alone, skipped};

const PAGES: u64 = 1024;
/// Exit statuses of the child; every other status is a failed test.
const RIGHT: i32 = 0;
const NO_LOG: i32 = 77;

fn ram() -> GuestRam {
    let block = RamBlock::new("ram", PAGES * PAGE_SIZE as u64, Backing::Anonymous).unwrap();
    block.advise_huge_pages(false).unwrap();
    GuestRam::new(vec![block]).unwrap()
}

fn absent(ram: &GuestRam) -> u64 {
    let absent = PageBitmap::new(PAGES);
    ram.block(0).mark_absent(0, PAGES, &absent).unwrap();
    absent.count()
}

fn write_all(ram: &GuestRam) {
    (0..PAGES).for_each(|page| ram.block(0).write(page * PAGE_SIZE as u64, &[1]).unwrap());
}

/// Runs `work` in a child and returns its exit status.
fn forked(work: fn(&GuestRam) -> i32, inherited: &GuestRam) -> i32 {
    // SAFETY: the test runs alone in this process, so no other thread holds a lock that the child would wait
    // for.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork failed");
    if child == 0 {
        let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(inherited))).unwrap_or(1);
        // SAFETY: ends the child without the exit handlers of the test harness.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: `status` is a live int, and the child is ours.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -status }
}

/// Behaves like a daemon after its fork: makes and tracks a guest of its own.
fn track_own(_: &GuestRam) -> i32 {
    let ram = ram();
    write_all(&ram);
    assert_eq!(absent(&ram), 0, "pages that were written are said to be absent");
    let log = UffdDirtyLog::new(ram.clone());
    if let Err(error) = log.start() {
        skipped("the log of a child", error);
        return NO_LOG;
    }
    log.sync(&mut DirtyBitmaps::new(&ram)).unwrap();
    write_all(&ram);
    let mut found = DirtyBitmaps::new(&ram);
    log.sync(&mut found).unwrap();
    assert_eq!(found.count(), PAGES, "pages that were written are not reported");
    RIGHT
}

/// Checks memory that was mapped before the fork and of which the child writes its own copy.
fn look_at_inherited(inherited: &GuestRam) -> i32 {
    assert_eq!(absent(inherited), PAGES);
    write_all(inherited);
    assert_eq!(absent(inherited), 0, "pages that were written are said to be absent");
    RIGHT
}

#[test]
fn fork_after_the_page_table_was_asked_sees_its_own_pages() {
    if !is_alone() {
        return;
    }
    // The order of a VMM that checks its features first and then becomes a daemon.
    UffdDirtyLog::is_supported();
    let before = ram();
    assert_eq!(absent(&before), PAGES);

    let status = forked(track_own, &before);
    assert!(matches!(status, RIGHT | NO_LOG), "the child ended with {status}");
    assert_eq!(forked(look_at_inherited, &before), RIGHT);

    write_all(&before);
    assert_eq!(absent(&before), 0);
}
