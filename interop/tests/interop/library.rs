//! Tests of this library's own functions.
#![allow(missing_docs)]

use sterna_interop::ticks::unbroken_serials;

#[test]
fn unbroken_serials_joins_a_line_that_was_cut_by_the_move() {
    let serials = ["boot\ntick 1 checksum OK\ntick 2 che", "cksum OK\r\ntick 3 checksum OK 77\n"];

    assert_eq!(unbroken_serials(&serials), Ok(3));
}

#[test]
fn unbroken_serials_finds_gaps_repeats_and_bad_memory() {
    let line = |number: u64| format!("tick {number} checksum OK\n");
    let broken = |first: String, second: String| unbroken_serials(&[&first, &second]).unwrap_err();

    assert!(broken(line(1), line(3)).contains("tick 3 came after tick 1"));
    assert!(broken(line(1), line(1)).contains("tick 1 came after tick 1"));
    assert!(broken(line(1), "tick 2 checksum BAD\n".into()).contains("BAD"));
    assert!(broken(line(1), "Kernel panic\n".into()).contains("machine 1"));
}
