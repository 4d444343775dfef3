//! Compares a Linux guest in the reference machine with one in QEMU's microvm: one boot of the lab, one
//! kernel, one root, one load.
//!
//! One or two emulated cores do all the work. The bench therefore compares software, by ratios of alternating
//! repetitions.
#![allow(clippy::print_stdout)]

mod rows;
mod vmm;

use serde_json::{Value, json};

use crate::Failure;
use crate::lab::{RESULTS, Selection};

/// A part of the bench, which `--only` selects by name.
struct Part {
    name: &'static str,
    measure: fn(is_quick: bool) -> Result<Value, Failure>,
}

const PARTS: [Part; 6] = [
    Part { name: "boot", measure: rows::boot },
    Part { name: "disk", measure: rows::disk },
    Part { name: "network", measure: rows::network },
    Part { name: "downtime", measure: rows::downtime },
    Part { name: "copy", measure: rows::copy },
    Part { name: "free", measure: rows::free },
];

/// Runs the selected parts and prints their results. Returns the number of failed parts.
pub(crate) fn run(selection: &Selection) -> i32 {
    let (mut failures, mut results) = (0, Vec::new());
    for part in PARTS.iter().filter(|part| selection.takes(part.name, false)) {
        match (part.measure)(selection.is_quick()) {
            Ok(found) => {
                println!("LAB {}: {found:#}", part.name);
                results.push(json!({ "part": part.name, "found": found }));
            }
            Err(why) => {
                println!("LAB {} FAILED: {why}", part.name);
                failures += 1;
            }
        }
    }
    println!("{RESULTS}{}", json!({ "parts": results }));
    failures
}
