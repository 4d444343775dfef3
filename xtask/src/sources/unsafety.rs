//! Checks where `unsafe` is permitted, and that each use argues why it is sound.
//!
//! Clippy checks the argument itself (`undocumented_unsafe_blocks`). This check makes sure that no
//! package and no line evades that lint. Tests may use `unsafe` anywhere, except where a crate
//! forbids it, because no program contains them.

use std::path::Path;

use crate::process::Result;
use crate::workspace::{Metadata, root};

use super::{has_word, read};

/// Crates that need `unsafe` for their purpose (paths that end in `/`), and single files.
const PLACES: &[&str] = &[
    "crates/sterna-ram/src/",
    "crates/sterna-transport/src/",
    "crates/sterna-vmm/src/",
    "crates/sterna-capi/src/",
    "crates/sterna-disk/src/files.rs",
    "crates/sterna-devices/src/statebank/dma/map.rs",
    "crates/sterna-devices/src/vfio/kernel/system.rs",
    "crates/sterna-devices/src/watchdog.rs",
    "guests/src/ledger/blob.rs",
    "guests/src/tide/blob.rs",
    "interop/src/guests.rs",
    "interop/src/linux/network.rs",
    "interop/src/workload/boot.rs",
    "testing/link/src/host.rs",
    "testing/uffd-peer/src/memory.rs",
    "benches/src/clock.rs",
    "examples/minimal-vmm/src/main.rs",
    "examples/vm-memory-vmm/src/machine.rs",
    "examples/vm-memory-vmm/src/vcpu.rs",
];
const LINT: &str = "undocumented_unsafe_blocks";

/// Collects violations in sources, file by file.
#[derive(Default)]
pub(super) struct Unsafety {
    /// Files with `unsafe` outside of tests, and the first line that has it.
    found: Vec<(String, usize)>,
    /// Files that mention the lint.
    switched: Vec<String>,
}

impl Unsafety {
    /// Checks one file; `name` is its path in the workspace.
    pub(super) fn look(&mut self, name: &str, text: &str) {
        // xtask forbids `unsafe`, and has the words in strings.
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

    /// Number of files with `unsafe` outside of tests.
    pub(super) fn files(&self) -> usize {
        self.found.len()
    }

    /// Every violation, and every permitted place that no longer needs the permission.
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

/// Every violation in the checked sources and in the manifests.
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

/// Whether a file belongs to a crate's tests or micro-benches.
fn is_test(name: &str) -> bool {
    name.contains("/tests/") || name.starts_with("crates/") && name.contains("/benches/")
}

fn is_of(name: &str, place: &str) -> bool {
    if place.ends_with('/') { name.starts_with(place) } else { name == place }
}

/// The first line of code that contains `unsafe`.
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
