//! Tests of blocked writes: which writes block, until when, and that no writer blocks forever.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sterna_ram::dirty::UffdDirtyLog;
use sterna_ram::write_protection::{WriteProtection, WriteProtectionError};
use sterna_ram::{Backing, DirtySource, ExternalMemory, GuestRam, MemoryPermissions, PAGE_SIZE, RamBlock};

use crate::support::skipped;

const PAGES: u64 = 64;
const PAGE: u64 = PAGE_SIZE as u64;

fn ram(backing: Backing) -> GuestRam {
    GuestRam::new(vec![RamBlock::new("ram", PAGES * PAGE, backing).unwrap()]).unwrap()
}

/// Makes a protection, or `None` if this host does not support it.
pub(crate) fn protection(ram: &GuestRam, test: &str) -> Option<Arc<WriteProtection>> {
    match WriteProtection::new(ram) {
        Ok(protection) => Some(Arc::new(protection)),
        Err(error @ WriteProtectionError::Unsupported { .. }) => {
            skipped(test, error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Serves writers until dropped: records the page and its content, then releases the writer.
pub(crate) struct Served {
    protection: Arc<WriteProtection>,
    pub(crate) held: Arc<parking_lot::Mutex<Vec<(u64, u64)>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Served {
    pub(crate) fn new(ram: &GuestRam, protection: &Arc<WriteProtection>) -> Self {
        let held = Arc::<parking_lot::Mutex<Vec<_>>>::default();
        let (ram, serves, notes) = (ram.clone(), Arc::clone(protection), Arc::clone(&held));
        let serve = move || {
            let answer = |block: usize, page: u64| {
                notes.lock().push((page, ram.block(block).read_u64(page * PAGE).unwrap()));
                serves.release(block, page, 1).unwrap();
            };
            serves.serve(answer).unwrap();
        };
        Self { protection: Arc::clone(protection), held, thread: Some(std::thread::spawn(serve)) }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.protection.stop_serving();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Starts a thread that writes a page. The flag is set once the write is done.
fn writer(ram: &GuestRam, page: u64) -> (Arc<AtomicBool>, std::thread::JoinHandle<()>) {
    let (ram, done) = (ram.clone(), Arc::new(AtomicBool::new(false)));
    let is_done = Arc::clone(&done);
    let thread = std::thread::spawn(move || {
        ram.block(0).write_u64(page * PAGE, 7).unwrap();
        is_done.store(true, Ordering::Release);
    });
    (done, thread)
}

/// Gives the thread time to block in the kernel, which user space cannot observe.
fn let_it_wait() {
    std::thread::sleep(Duration::from_millis(30));
}

#[test]
fn first_write_of_a_thread_waits_and_the_others_do_not() {
    let test = "first_write_of_a_thread_waits_and_the_others_do_not";
    for backing in [Backing::Memfd, Backing::Anonymous] {
        let ram = ram(backing);
        // Page 20 is not populated; writes to it must block, too.
        (0..PAGES)
            .filter(|page| *page != 20)
            .for_each(|page| ram.block(0).write_u64(page * PAGE, page).unwrap());
        let Some(protection) = protection(&ram, test) else { return };
        let served = Served::new(&ram, &protection);
        protection.protect(0, 10, 20).unwrap();
        for page in (0..PAGES).chain(0..PAGES) {
            ram.block(0).write_u64(page * PAGE, 1000 + page).unwrap();
        }

        let expected: Vec<_> = (10..30).map(|page| (page, if page == 20 { 0 } else { page })).collect();
        assert_eq!(*served.held.lock(), expected, "{backing:?}");
        assert!((0..PAGES).all(|page| ram.block(0).read_u64(page * PAGE).unwrap() == 1000 + page));
    }
}

#[test]
fn writes_of_the_kernel_wait_alike() {
    let ram = ram(Backing::Memfd);
    let Some(protection) = protection(&ram, "writes_of_the_kernel_wait_alike") else { return };
    let served = Served::new(&ram, &protection);
    protection.protect(0, 0, 2).unwrap();
    let (mut from, mut to) = std::io::pipe().unwrap();
    to.write_all(&[5; PAGE_SIZE]).unwrap();
    // SAFETY: a window of the block; the only reference to it exists during this call.
    let bytes = unsafe { std::slice::from_raw_parts_mut(ram.block(0).host_address(), PAGE_SIZE) };
    from.read_exact(bytes).unwrap();

    assert_eq!(*served.held.lock(), [(0, 0)]);
    assert_eq!(ram.block(0).read_u64(0).unwrap(), u64::from_ne_bytes([5; 8]));
}

#[test]
fn lifting_and_dropping_let_everybody_go_on_for_ever() {
    let test = "lifting_and_dropping_let_everybody_go_on_for_ever";
    for (backing, lifts) in [(Backing::Memfd, true), (Backing::Anonymous, true), (Backing::Memfd, false)] {
        let ram = ram(backing);
        let Some(protection) = protection(&ram, test) else { return };
        protection.protect(0, 0, PAGES).unwrap();
        // No thread serves writers here.
        let (done, thread) = writer(&ram, 3);
        let_it_wait();
        assert!(!done.load(Ordering::Acquire), "the write was not held");
        if lifts {
            protection.lift();
            assert!(protection.is_lifted());
            assert!(matches!(protection.protect(0, 0, 1), Err(WriteProtectionError::Lifted)));
            protection.release(0, 0, 1).unwrap();
            protection.lift();
        } else {
            drop(protection);
        }
        thread.join().unwrap();
        (0..PAGES).for_each(|page| ram.block(0).write_u64(page * PAGE, 9).unwrap());
    }
}

#[test]
fn writers_that_are_known_but_not_answered_go_on_when_it_is_lifted() {
    let ram = ram(Backing::Memfd);
    let test = "writers_that_are_known_but_not_answered_go_on_when_it_is_lifted";
    let Some(protection) = protection(&ram, test) else { return };
    let known = Arc::new(AtomicU64::new(0));
    let (serves, counts) = (Arc::clone(&protection), Arc::clone(&known));
    let server = std::thread::spawn(move || {
        serves
            .serve(|_, _| {
                counts.fetch_add(1, Ordering::AcqRel);
            })
            .unwrap();
    });
    protection.protect(0, 0, PAGES).unwrap();
    let writers: Vec<_> = (0..4).map(|page| writer(&ram, page)).collect();
    let began = Instant::now();
    while known.load(Ordering::Acquire) < 4 {
        assert!(began.elapsed() < Duration::from_secs(60), "nobody heard of the writers");
        std::thread::sleep(Duration::from_millis(1));
    }
    protection.lift();
    writers.into_iter().for_each(|(_, thread)| thread.join().unwrap());
    protection.stop_serving();
    server.join().unwrap();
}

/// A forked process also has the descriptor, so closing it here would release no writer.
#[test]
fn forked_process_keeps_nobody_waiting() {
    let ram = ram(Backing::Memfd);
    let Some(protection) = protection(&ram, "forked_process_keeps_nobody_waiting") else { return };
    protection.protect(0, 0, PAGES).unwrap();
    let (mut from, to) = std::io::pipe().unwrap();
    // SAFETY: the child makes only system calls.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let mut byte = 0u8;
        // SAFETY: reads into a live byte until the other side closes; then ends this process without running anything else.
        unsafe {
            libc::close(std::os::fd::AsRawFd::as_raw_fd(&to));
            libc::read(std::os::fd::AsRawFd::as_raw_fd(&from), (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    let (done, thread) = writer(&ram, 3);
    let_it_wait();
    assert!(!done.load(Ordering::Acquire));
    drop(protection);
    thread.join().unwrap();
    drop(to);
    let mut status = 0;
    // SAFETY: `status` is a live int, and the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(from.read(&mut [0]).unwrap(), 0);
}

#[test]
fn memory_that_cannot_be_protected_is_named_with_the_reason() {
    let test = "memory_that_cannot_be_protected_is_named_with_the_reason";
    let tracked = ram(Backing::Memfd);
    let log = UffdDirtyLog::new(tracked.clone());
    if let Err(error) = log.start() {
        return skipped(test, error);
    }
    match WriteProtection::new(&tracked) {
        Err(WriteProtectionError::Taken { block }) => assert_eq!(block, "ram"),
        Err(error @ WriteProtectionError::Unsupported { .. }) => return skipped(test, error),
        other => panic!("{other:?}"),
    }
    log.stop().unwrap();
    assert!(WriteProtection::new(&tracked).is_ok());

    let own = RamBlock::new("own", PAGE, Backing::Anonymous).unwrap();
    let external = |name: &str, permissions: MemoryPermissions| {
        let memory = RamBlock::new("below", PAGE, Backing::Anonymous).unwrap();
        let address = memory.host_address();
        let memory = ExternalMemory::new(address, PAGE, Arc::new(memory)).permit(permissions);
        // SAFETY: the memory is mapped as long as its owner lives, which the block keeps.
        unsafe { RamBlock::from_external(name, memory) }.unwrap()
    };
    let blocks = vec![
        external("forbidden", MemoryPermissions::none()),
        own,
        external("allowed", MemoryPermissions::none().allow_userfaultfd()),
        RamBlock::without_memory("none", PAGE).unwrap(),
    ];
    let some = WriteProtection::new(&GuestRam::new(blocks).unwrap()).unwrap();
    assert_eq!([0, 1, 2, 3, 4].map(|block| some.covers(block)), [false, true, true, false, false]);
    let reasons: Vec<_> = some.refused().map(ToString::to_string).collect();
    assert!(reasons[0].contains("forbidden") && reasons[1].contains("no memory"), "{reasons:?}");
    for (block, first, count) in [(0, 0, 1), (1, 0, 0), (1, 0, 2), (1, u64::MAX, 1), (9, 0, 1)] {
        assert!(matches!(some.protect(block, first, count), Err(WriteProtectionError::Outside { .. })));
        assert!(matches!(some.release(block, first, count), Err(WriteProtectionError::Outside { .. })));
    }
}

#[test]
fn private_memory_of_a_file_is_refused_where_the_kernel_cannot_protect_it() {
    let file = tempfile::tempfile_in("/var/tmp").unwrap();
    file.set_len(PAGE).unwrap();
    let block = RamBlock::of_file("disk", PAGE, file).unwrap();
    match WriteProtection::new(&GuestRam::new(vec![block]).unwrap()) {
        Err(WriteProtectionError::Unsupported { .. }) => {}
        Err(WriteProtectionError::Block { block, call: "UFFDIO_REGISTER", .. }) => assert_eq!(block, "disk"),
        // The test's directory may be on tmpfs, which can be protected.
        Ok(_) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn serving_that_was_stopped_before_it_began_returns() {
    let ram = ram(Backing::Memfd);
    let Some(protection) = protection(&ram, "serving_that_was_stopped_before_it_began_returns") else {
        return;
    };
    protection.stop_serving();
    protection.serve(|_, _| {}).unwrap();
}
