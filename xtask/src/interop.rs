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

/// `cargo xtask interop [SUBJECT…]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if let Some(option) = arguments.iter().find(|argument| argument.starts_with('-')) {
        return Err(Failure::Usage(format!(
            "interop takes names of files in interop/tests/it, not `{option}`"
        )));
    }
    let mut parts = Parts::default();
    let mut notes = Vec::new();
    parts.part("roots", || roots::in_background().finish(&mut notes));
    parts.part("interop", || play(arguments, &mut notes));
    notes.into_iter().for_each(|note| parts.note(note));
    parts.finish()
}

/// Runs all of the tests; `notes` gets the line of each that was skipped.
pub fn run(notes: &mut Vec<String>) -> Result<Outcome> {
    play(&[], notes)
}

fn play(subjects: &[String], notes: &mut Vec<String>) -> Result<Outcome> {
    let mut command = process::cargo();
    command.args(["test", "--package", PACKAGE, "--test", "it", "--"]);
    command.args(subjects.iter().map(|subject| format!("{subject}::")));
    let roots = target_directory().join("roots");
    command.env("STERNA_ROOTS", &roots);
    let (done, found) = process::run_and_watch(&mut command, "SKIPPED ");
    let skipped = found.len();
    notes.extend(found);
    done?;
    let has_roots = std::fs::read_dir(&roots).is_ok_and(|mut there| there.next().is_some());
    Ok(match skipped {
        0 => Outcome::Passed,
        _ if has_roots => Outcome::Partly(format!("{skipped} tests skipped")),
        _ => Outcome::Skipped(format!("there are no roots: {skipped} tests skipped")),
    })
}
