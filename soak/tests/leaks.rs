//! Tests that growth over many cases is found. This binary has one test, because the test counts the
//! resources of the process.

use std::time::Duration;

use sterna::ram::{Backing, RamBlock};
use sterna_soak::drift::Drift;

/// Number of cases; the first tenth warms the process.
const CASES: u64 = 20;

/// Reports the growth over cases if the later half leaves `leak` behind.
fn grown(leak: fn()) -> Vec<&'static str> {
    let mut drift = Drift::over(CASES);
    for case in 0..CASES {
        if case >= CASES / 2 {
            leak();
        }
        drift.played();
    }
    // The limit is zero, because no thread needs time to end here.
    drift.end(Duration::ZERO);
    let said = drift.to_string();
    assert_eq!(said.contains("GROWN"), !drift.grown().is_empty(), "{said}");
    drift.grown()
}

#[test]
fn what_cases_leave_behind_is_found_and_named() {
    assert_eq!(grown(|| {}), [""; 0]);
    assert_eq!(grown(leave_a_thread), ["threads"]);
    assert_eq!(grown(|| std::mem::forget(std::fs::File::open("/dev/null"))), ["descriptors"]);
    assert_eq!(grown(|| std::mem::forget(RamBlock::new("left", 1 << 20, Backing::Anonymous))), ["mappings"]);
    // 80 MiB in total, in pieces that are too small to be mappings.
    let pieces = || {
        for _ in 0..128 {
            std::mem::forget(vec![1_u8; 64 << 10]);
        }
    };
    assert_eq!(grown(pieces), ["resident memory"]);
}

/// Starts a thread that does not end, and waits until it has started: with its first allocation, the allocator opens a file
/// for a moment.
fn leave_a_thread() {
    let (tell, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = tell.send(Box::new(()));
        loop {
            std::thread::park();
        }
    });
    let _ = started.recv();
}
