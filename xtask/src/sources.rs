//! Rules for sources that no lint checks: where `unsafe` is permitted, which crates do no I/O, how
//! long a file may be.

mod combinations;
mod names;
mod promises;
mod threads;
mod unsafety;
mod untested;
mod words;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::parts::Outcome;
use crate::process::Result;
use crate::workspace::root;
use unsafety::Unsafety;

/// Largest number of lines in a file.
const MOST_LINES: usize = 600;

/// Crate roots, each with the attributes of which one must be present.
const ATTRIBUTES: &[(&str, &[&str])] = &[
    ("crates/sterna-wire/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-proto/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-forecast/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-arbiter/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-relay/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-libvirt/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-store/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-image/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-s3/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-pager/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna/src/lib.rs", &["#![forbid(unsafe_code)]", "#![deny(unsafe_code)]"]),
    ("crates/sterna-opaque/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-standby/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-qmp/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-drive/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-cli/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-cli/src/main.rs", &["#![forbid(unsafe_code)]"]),
    ("fuzz/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("fuzz/src/main.rs", &["#![forbid(unsafe_code)]"]),
    ("soak/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("soak/src/main.rs", &["#![forbid(unsafe_code)]"]),
    ("xtask/src/main.rs", &["#![forbid(unsafe_code)]"]),
];

/// Directories whose code does no I/O and reads no clock. `IMPURE` lists the words that would do
/// either.
const PURE: &[&str] = &[
    "crates/sterna-wire/src",
    "crates/sterna-proto/src",
    "crates/sterna-forecast/src",
    "crates/sterna-relay/src/frame",
    "crates/sterna-relay/src/session",
    "crates/sterna-relay/src/phase",
];
const IMPURE: &[&str] =
    &["std::fs", "std::net", "std::process", "std::thread", "std::os", "Instant", "SystemTime", "std::env"];

/// Documents whose words are checked. CONTRIBUTING.md names the banned ones.
const DOCUMENTS: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "PROMISES.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/c-api.md",
    "docs/cli.md",
    "docs/combinations.md",
    "docs/compatibility.md",
    "docs/embedding.md",
    "docs/embedding-states.md",
    "docs/glossary.md",
    "docs/lazy-restore.md",
    "docs/libvirt.md",
    "docs/limitations.md",
    "docs/machines.md",
    "docs/postcopy.md",
    "docs/protection.md",
    "docs/qmp.md",
    "docs/rdma.md",
    "docs/reference-machine.md",
    "docs/same-host.md",
    "docs/design/convergence.md",
    "docs/design/decisions.md",
    "docs/design/devices.md",
    "docs/design/engine.md",
    "docs/design/handover.md",
    "docs/design/images.md",
    "docs/design/pages.md",
    "docs/design/protection.md",
    "docs/design/threads.md",
    "specs/ch-offload.md",
    "specs/colo.md",
    "specs/convergence.md",
    "specs/extension.md",
    "specs/libvirt-rpc.md",
    "specs/libvirt-save.md",
    "specs/mapped-ram.md",
    "specs/postcopy.md",
    "specs/rdma.md",
    "specs/replica.md",
    "specs/stream.md",
    "specs/uffd.md",
    "specs/vfio-user.md",
    "specs/vhost-user.md",
];

/// Fails with every file that breaks a rule.
pub fn check() -> Result<Outcome> {
    let mut wrong = Vec::new();
    for (file, any_of) in ATTRIBUTES {
        let text = read(&root().join(file))?;
        if !any_of.iter().any(|attribute| text.lines().any(|line| line.trim() == *attribute)) {
            wrong.push(format!("{file} lacks {}", any_of[0]));
        }
    }
    let (mut files, mut unsafety) = (Vec::new(), Unsafety::default());
    for directory in
        ["crates", "guests", "testing", "benches", "interop", "soak", "xtask", "fuzz", "examples"]
    {
        rust_files(&root().join(directory), &mut files)?;
    }
    let (mut names, mut own) = (BTreeSet::new(), BTreeSet::new());
    for file in &files {
        let text = read(file)?;
        names.extend(file.file_stem().map(|name| name.to_string_lossy().into_owned()));
        names.extend(file.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned()));
        names.extend(functions(&text));
        let name = file.strip_prefix(root()).unwrap_or(file).display().to_string();
        let lines = text.lines().count();
        if lines > MOST_LINES {
            wrong.push(format!("{name} has {lines} lines, more than {MOST_LINES}: split it"));
        }
        unsafety.look(&name, &text);
        wrong.extend(words::in_source(&name, &text));
        wrong.extend(threads::wrong(&name, &text));
        if name.starts_with("crates/") && name.contains("/src/") {
            own.extend(names::own_names(&text));
        }
        let is_test = file.file_name().is_some_and(|name| name == "tests.rs");
        if !is_test && PURE.iter().any(|directory| name.starts_with(directory)) {
            wrong.extend(impurities(&text).map(|(line, word)| {
                format!("{name}:{line} mentions {word}: this crate does no I/O and reads no clock")
            }));
        }
    }
    wrong.extend(unsafety::wrong(&unsafety)?);
    wrong.extend(untested::wrong()?);
    for name in DOCUMENTS {
        wrong.extend(words::in_document(name, &read(&root().join(name))?));
    }
    let document = read(&root().join("docs/combinations.md"))?;
    wrong.extend(promises::wrong(&read(&root().join("PROMISES.md"))?, &names));
    wrong.extend(combinations::wrong(&document, |name| names.contains(name)));
    wrong.extend(names::wrong(&read(&root().join("docs/qmp.md"))?, &own));
    println!("{} files of Rust, {} of them with unsafe outside of tests", files.len(), unsafety.files());
    if wrong.is_empty() { Ok(Outcome::Passed) } else { Err(wrong.join("; ")) }
}

/// The names of the functions in a source text.
fn functions(text: &str) -> impl Iterator<Item = String> {
    let named = text.lines().filter_map(|line| line.split_once("fn ")?.1.split(['(', '<']).next());
    named.map(str::to_owned)
}

/// Lines of code before the unit tests that contain a word of [`IMPURE`].
fn impurities(text: &str) -> impl Iterator<Item = (usize, &'static str)> {
    text.lines()
        .enumerate()
        .take_while(|(_, line)| line.trim() != "#[cfg(test)]")
        .filter(|(_, line)| !line.trim_start().starts_with("//"))
        .filter_map(|(at, line)| IMPURE.iter().find(|word| has_word(line, word)).map(|word| (at + 1, *word)))
}

fn has_word(line: &str, word: &str) -> bool {
    let boundary = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(at, _)| {
        boundary(line[..at].chars().next_back()) && boundary(line[at + word.len()..].chars().next())
    })
}

fn rust_files(directory: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Ok(()) };
    for entry in entries {
        let path = entry.map_err(|error| format!("{}: {error}", directory.display()))?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                rust_files(&path, into)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impurities_finds_words_in_code_only() {
        let text = "//! Not Instant.\nuse std::fs;\nstruct Instantaneous;\nlet x = Instant::now();\n#[cfg(test)]\nuse std::env;";

        assert_eq!(impurities(text).collect::<Vec<_>>(), [(2, "std::fs"), (4, "Instant")]);
    }
}
