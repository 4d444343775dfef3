//! The part `interop`: tests in which real QEMU and real libvirt judge what Sterna writes and reads.
//!
//! The tests live in `interop/` (crate sterna-interop) and find the roots by themselves; a test that cannot
//! run here says `SKIPPED name: reason`, and is named in the closing lines.

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::roots;
use crate::workspace::target_directory;

/// The crate of the tests.
pub const PACKAGE: &str = "sterna-interop";

/// `cargo xtask interop [-- ARGS]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let arguments = match arguments {
        [] => &[][..],
        [dashes, rest @ ..] if dashes == "--" => rest,
        [other, ..] => return Err(Failure::Usage(format!("interop takes `-- ARGS`, not `{other}`"))),
    };
    let mut parts = Parts::default();
    let mut notes = Vec::new();
    parts.part("roots", || roots::in_background().finish(&mut notes));
    parts.part("interop", || run(arguments, &mut notes));
    notes.into_iter().for_each(|note| parts.note(note));
    parts.finish()
}

/// Runs the tests; `notes` gets the line of each that was skipped.
pub fn run(arguments: &[String], notes: &mut Vec<String>) -> Result<Outcome> {
    let mut command = process::cargo();
    command.args(["test", "--package", PACKAGE, "--no-fail-fast"]).args(arguments);
    command.env("STERNA_ROOTS", target_directory().join("roots"));
    let (done, found) = process::run_and_watch(&mut command, "SKIPPED ");
    notes.extend(found);
    done.map(|()| Outcome::Passed)
}
