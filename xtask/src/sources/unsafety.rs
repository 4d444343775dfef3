//! Where `unsafe` may stand, and that whoever writes it argues why it is sound.
//!
//! The argument itself is clippy's affair (`undocumented_unsafe_blocks`); here it is seen to that no package, and no line,
//! gets round that lint. Tests may be unsafe anywhere but where a crate forbids it: they are in no program.

use std::path::Path;

use crate::process::Result;
use crate::workspace::{Metadata, root};

use super::{has_word, read};

/// Crates that are there for it (they end in `/`), and single files.
const PLACES: &[&str] = &[
    "crates/sterna-ram/src/",
    "crates/sterna-transport/src/",
    "crates/sterna-vmm/src/",
    "crates/sterna-disk/src/files.rs",
    "crates/sterna-devices/src/statebank/dma/map.rs",
    "crates/sterna-devices/src/vfio/kernel/system.rs",
    "guests/src/ledger/blob.rs",
    "guests/src/tide/blob.rs",
    "interop/src/guests.rs",
    "interop/src/linux/network.rs",
    "interop/src/workload/boot.rs",
    "benches/src/clock.rs",
    "examples/minimal-vmm/src/main.rs",
    "examples/vm-memory-vmm/src/machine.rs",
    "examples/vm-memory-vmm/src/vcpu.rs",
];
const LINT: &str = "undocumented_unsafe_blocks";

/// Finds what breaks the rules in sources, one after the other.
#[derive(Default)]
pub(super) struct Unsafety {
    /// Files with unsafe outside of tests, and the first line that has it.
    found: Vec<(String, usize)>,
    /// Files that mention the lint.
    switched: Vec<String>,
}

impl Unsafety {
    /// `name` is the path from the workspace's root on.
    pub(super) fn look(&mut self, name: &str, text: &str) {
        // It forbids unsafe, and has the words in strings.
        if name.starts_with("xtask/") {
            return;
        }
        if text.contains(&format!("clippy::{LINT}")) {
            self.switched.push(name.to_owned());
        }
        if !is_test(name) {
            self.found.extend(unsafe_line(text).map(|line| (name.to_owned(), line)));
        }
    }

    /// How many files have unsafe outside of tests.
    pub(super) fn files(&self) -> usize {
        self.found.len()
    }

    /// What breaks a rule; also a place that needs none any more.
    pub(super) fn wrong(&self, places: &[&str]) -> Vec<String> {
        let strangers = self.found.iter().filter(|(name, _)| !places.iter().any(|place| is_of(name, place)));
        let needless = places.iter().filter(|place| !self.found.iter().any(|(name, _)| is_of(name, place)));
        strangers
            .map(|(name, line)| format!("{name}:{line} is unsafe, which only {} may be", places.join(", ")))
            .chain(needless.map(|place| format!("{place} has no unsafe and needs no leave for it")))
            .chain(self.switched.iter().map(|name| format!("{name} mentions {LINT}: that lint stays on")))
            .collect()
    }
}

/// What breaks a rule in the sources that were looked at, and in the manifests.
pub(super) fn wrong(sources: &Unsafety) -> Result<Vec<String>> {
    let mut wrong = sources.wrong(PLACES);
    if !read(&root().join("Cargo.toml"))?.contains(&format!("\n{LINT} = \"deny\"\n")) {
        wrong.push(format!("Cargo.toml does not deny {LINT}"));
    }
    for package in Metadata::of_members(None)?.packages() {
        let manifest = package["manifest_path"].as_str().unwrap_or_default();
        if !read(Path::new(manifest))?.contains("\n[lints]\nworkspace = true\n") {
            wrong.push(format!("{manifest} does not take the workspace's lints"));
        }
    }
    Ok(wrong)
}

/// Whether a file is of a crate's tests or micro-benches.
fn is_test(name: &str) -> bool {
    name.contains("/tests/") || name.starts_with("crates/") && name.contains("/benches/")
}

fn is_of(name: &str, place: &str) -> bool {
    if place.ends_with('/') { name.starts_with(place) } else { name == place }
}

/// The first line of code that is unsafe.
fn unsafe_line(text: &str) -> Option<usize> {
    let is_code = |line: &str| !line.trim_start().starts_with("//");
    text.lines().position(|line| is_code(line) && has_word(line, "unsafe")).map(|at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: &str = "// SAFETY: unsafe, but argued.\nunsafe { f() }\n";

    fn looked_at(sources: &[(&str, &str)]) -> Unsafety {
        let mut unsafety = Unsafety::default();
        for (name, text) in sources {
            unsafety.look(name, text);
        }
        unsafety
    }

    #[test]
    fn unsafe_in_a_place_or_a_test_is_right() {
        let sources = looked_at(&[
            ("crates/a/src/deep/file.rs", BLOCK),
            ("b/src/one.rs", BLOCK),
            ("b/tests/t.rs", BLOCK),
            ("b/src/two.rs", "#![forbid(unsafe_code)]\n//! Nothing unsafe.\n"),
        ]);

        assert_eq!(sources.wrong(&["crates/a/src/", "b/src/one.rs"]), Vec::<String>::new());
        assert_eq!(sources.files(), 2);
    }

    #[test]
    fn unsafe_elsewhere_is_named_with_its_line() {
        let sources = looked_at(&[("b/src/one.rs", BLOCK), ("b/src/two.rs", BLOCK)]);

        let wrong = sources.wrong(&["b/src/one.rs"]);

        assert_eq!(wrong, ["b/src/two.rs:2 is unsafe, which only b/src/one.rs may be"]);
    }

    #[test]
    fn place_without_unsafe_is_needless() {
        let wrong = looked_at(&[]).wrong(&["crates/a/src/"]);

        assert_eq!(wrong, ["crates/a/src/ has no unsafe and needs no leave for it"]);
    }

    #[test]
    fn lint_switched_off_in_a_source_is_noticed() {
        let text = format!("#![allow(clippy::{LINT})]\n{BLOCK}");

        let wrong = looked_at(&[("b/tests/t.rs", &text)]).wrong(&[]);

        assert_eq!(wrong, [format!("b/tests/t.rs mentions {LINT}: that lint stays on")]);
    }
}
