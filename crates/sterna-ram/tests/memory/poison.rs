//! Tests of failed memory: known pages are not accessed, and a new failure is an error with its place.

use std::cell::Cell;
use std::sync::Once;

use sterna_ram::zero::Method;
use sterna_ram::{Backing, GuestRam, PAGE_SIZE, RamBlock, RamError, guard};

use crate::broken::break_page;
use crate::support::{is_alone, skipped};

const PAGE: u64 = PAGE_SIZE as u64;
const PAGES: u64 = 64;

thread_local! {
    /// The address that this thread's signals report instead of the accessed one; 0 for none.
    static HEAD: Cell<usize> = const { Cell::new(0) };
}

/// Installs a handler that forwards SIGBUS, like a VMM.
pub fn forward_sigbus() {
    /// Offset of `si_addr` in `siginfo_t`.
    const ADDRESS_OFFSET: usize = 16;
    extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: these are the arguments of the running handler, which may change the structure; `signal` is
        // async-signal-safe.
        unsafe {
            if HEAD.get() != 0 {
                info.byte_add(ADDRESS_OFFSET).cast::<usize>().write_unaligned(HEAD.get());
            }
            if !guard::handle_sigbus(info, context) {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
            }
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
        // SAFETY: the structure is plain data, and filled; the handler has the signature that SA_SIGINFO
        // requires.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
        };
        assert_eq!(result, 0);
    });
}

fn ram(backing: Backing) -> GuestRam {
    let block = |name| RamBlock::new(name, PAGES * PAGE, backing).unwrap();
    GuestRam::new(vec![block("low").at_guest_address(0), block("high").at_guest_address(1 << 32)]).unwrap()
}

fn address_of(ram: &GuestRam, block: usize, page: u64) -> usize {
    ram.block(block).host_address() as usize + (page * PAGE) as usize
}

#[test]
fn page_that_fails_under_a_scan_ends_it_with_its_address() {
    forward_sigbus();
    let ram = ram(Backing::Memfd);
    let window = ram.block(0).slice(0, (PAGES * PAGE) as usize).unwrap();
    break_page(ram.block(0), 20);
    for method in Method::available() {
        let mut bits = [0; 1];
        let fault = method.zero_page_bits(window, &mut bits).unwrap_err();
        assert_eq!(fault.address & !(PAGE_SIZE - 1), address_of(&ram, 0, 20), "{method:?}");

        let before = window.part(0, 20 * PAGE_SIZE).unwrap();
        assert_eq!(method.is_zero(before), Ok(true), "{method:?}");
        // From the middle of a line, and from the line before the page.
        for from in [20 * PAGE_SIZE - 7, 20 * PAGE_SIZE - 64, 20 * PAGE_SIZE - 4096 + 64] {
            let part = window.part(from, PAGE_SIZE).unwrap();
            assert_eq!(
                method.is_zero(part).unwrap_err().address,
                address_of(&ram, 0, 20),
                "{method:?} {from}"
            );
        }
    }
}

#[test]
fn page_that_fails_under_a_copy_is_an_error_with_block_and_offset() {
    forward_sigbus();
    for backing in [Backing::Memfd, Backing::Anonymous] {
        let ram = ram(backing);
        let block = ram.block(1);
        block.write(8 * PAGE, &[7; 4096]).unwrap();
        break_page(block, 9);
        let window = block.slice(8 * PAGE, 3 * PAGE_SIZE).unwrap();
        let mut bytes = vec![0; 3 * PAGE_SIZE];

        let read = window.copy_to(&mut bytes).unwrap_err();
        let written = window.copy_from(&bytes).unwrap_err();
        let filled = window.fill_zero().unwrap_err();

        for fault in [read, written, filled] {
            assert_eq!(fault.address & !(PAGE_SIZE - 1), address_of(&ram, 1, 9));
            assert_eq!(ram.page_at(fault.address), Some((1, 9)));
        }
        assert_eq!(bytes[..PAGE_SIZE], [7; PAGE_SIZE], "what comes before is copied");
        assert!(ram.poisoned().is_empty(), "a window does not know its block");
        let error = block.read(9 * PAGE + 100, &mut [0; 200]).unwrap_err();
        let RamError::Poisoned { page } = &error else { panic!("{error}") };
        assert_eq!((page.block.as_str(), page.offset), ("high", 9 * PAGE));
        assert_eq!(page.guest_address, Some((1 << 32) + 9 * PAGE));
        assert!(error.to_string().contains("0x100009000"), "{error}");
        assert_eq!(ram.poisoned(), std::slice::from_ref(page), "it is known from now on");
        assert!(block.read(8 * PAGE, &mut [0; 4096]).is_ok(), "its neighbours are sound");
    }
}

/// Kernels before 6.8 may report the first byte of the huge page around the accessed page.
#[test]
fn page_that_fails_and_is_told_by_the_begin_of_its_huge_page_is_an_error() {
    forward_sigbus();
    let ram = ram(Backing::Memfd);
    let block = ram.block(1);
    break_page(block, 9);
    let window = block.slice(8 * PAGE, 3 * PAGE_SIZE).unwrap();
    let mut bytes = vec![0; 3 * PAGE_SIZE];
    let head = address_of(&ram, 1, 0);

    HEAD.set(head);
    let faults = [window.copy_to(&mut bytes), window.copy_from(&bytes), window.fill_zero()];
    let error = block.read(8 * PAGE, &mut bytes).unwrap_err();
    HEAD.set(0);

    assert!(faults.iter().all(|fault| fault.unwrap_err().address == head), "{faults:?}");
    let RamError::Poisoned { page } = &error else { panic!("{error}") };
    assert_eq!((page.block.as_str(), page.offset), ("high", 0));
}

#[test]
fn page_that_is_known_to_have_failed_is_not_touched() {
    // In a process without a handler, so that a signal would end the process.
    if !is_alone() {
        return;
    }
    let ram = ram(Backing::Memfd);
    let block = ram.block(0);
    break_page(block, 5);
    block.mark_poisoned(5, 1).unwrap();
    let is_refused = |result: Result<(), RamError>| matches!(result, Err(RamError::Poisoned { .. }));

    assert!(is_refused(block.slice(4 * PAGE, 2 * PAGE_SIZE).map(drop)));
    assert!(is_refused(block.read(5 * PAGE, &mut [0; 8])));
    assert!(is_refused(block.write(6 * PAGE - 4, &[0; 8])));
    assert!(is_refused(block.read_u64(5 * PAGE).map(drop)));
    assert!(is_refused(block.write_u64(5 * PAGE + 8, 1)));
    assert!(is_refused(block.zero_pages(0, 10)));
    assert!(block.slice(6 * PAGE, PAGE_SIZE).is_ok());
    assert!(block.mark_poisoned(PAGES, 1).is_err());

    block.clear_poisoned(5, 1).unwrap();
    assert!(block.slice(4 * PAGE, 2 * PAGE_SIZE).is_ok());
    assert!(ram.poisoned().is_empty());
}

#[test]
fn page_that_fails_when_it_is_populated_is_an_error_with_its_place() {
    let ram = ram(Backing::Memfd);
    break_page(ram.block(0), 11);

    let error = ram.block(0).populate(8, 8).unwrap_err();

    let RamError::Poisoned { page } = error else { panic!("{error}") };
    assert_eq!(page.offset, 11 * PAGE);
}

#[test]
fn pages_that_have_failed_are_found_without_a_signal() {
    let ram = ram(Backing::Memfd);
    ram.block(1).write(0, &[1; 30 * PAGE_SIZE]).unwrap();
    for page in [0, 17, 63] {
        break_page(ram.block(1), page);
    }
    let resident = ram.block(0).resident_bytes().unwrap();

    let found = ram.find_poisoned().unwrap();

    assert_eq!(found.iter().map(|page| page.offset / PAGE).collect::<Vec<_>>(), [0, 17, 63]);
    assert!(found.iter().all(|page| page.block == "high"));
    assert_eq!(ram.block(0).resident_bytes().unwrap(), resident, "nothing was populated");
}

/// The real error of the kernel for failed memory, if this machine can inject it.
#[test]
fn page_that_the_kernel_has_given_up_is_an_error() {
    forward_sigbus();
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let ram = ram(backing);
        let block = ram.block(0);
        block.write(3 * PAGE, &[1; 4096]).unwrap();
        let at = block.host_address().wrapping_add(3 * PAGE_SIZE);
        // SAFETY: the page is the block's own, and no reference to it exists.
        if unsafe { libc::madvise(at.cast(), PAGE_SIZE, libc::MADV_HWPOISON) } != 0 {
            let error = std::io::Error::last_os_error();
            return skipped(
                "page_that_the_kernel_has_given_up_is_an_error",
                format!("MADV_HWPOISON: {error}"),
            );
        }
        assert!(matches!(block.read(3 * PAGE, &mut [0; 8]), Err(RamError::Poisoned { .. })), "{backing:?}");
        block.clear_poisoned(3, 1).unwrap();
        assert_eq!(ram.find_poisoned().unwrap().len(), 1, "{backing:?}");
    }
}
