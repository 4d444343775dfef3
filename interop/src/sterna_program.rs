//! The `sterna` command as these tests build it.

use std::process::Command;

/// The `sterna` command (as the program `sterna-under-test`, which cargo builds before this crate's tests).
///
/// # Panics
/// If it lies nowhere near the test.
pub fn sterna() -> Command {
    let exe = std::env::current_exe().expect("a running program has a path");
    let program = exe
        .ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join("sterna-under-test"))
        .find(|program| program.is_file())
        .expect("cargo builds sterna-under-test beside the tests of sterna-interop");
    Command::new(program)
}
