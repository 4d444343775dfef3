//! Rules for sources that no lint knows: where unsafe may stand, what may not do I/O, how long a file is.

mod combinations;
mod unsafety;
mod untested;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::parts::Outcome;
use crate::process::Result;
use crate::workspace::root;
use unsafety::Unsafety;

/// No file may be longer.
const MOST_LINES: usize = 600;

/// Crate roots and the attribute that must stand in them.
const ATTRIBUTES: &[(&str, &[&str])] = &[
    ("crates/sterna-wire/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-proto/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-arbiter/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-image/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna/src/lib.rs", &["#![forbid(unsafe_code)]", "#![deny(unsafe_code)]"]),
    ("crates/sterna-qmp/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-cli/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("crates/sterna-cli/src/main.rs", &["#![forbid(unsafe_code)]"]),
    ("fuzz/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("fuzz/src/main.rs", &["#![forbid(unsafe_code)]"]),
    ("soak/src/lib.rs", &["#![forbid(unsafe_code)]"]),
    ("soak/src/main.rs", &["#![forbid(unsafe_code)]"]),
    ("xtask/src/main.rs", &["#![forbid(unsafe_code)]"]),
];

/// Directories whose code does no I/O and reads no clock, and the words that would.
const PURE: &[&str] = &["crates/sterna-wire/src", "crates/sterna-proto/src"];
const IMPURE: &[&str] =
    &["std::fs", "std::net", "std::process", "std::thread", "std::os", "Instant", "SystemTime", "std::env"];

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
    let mut names = HashSet::new();
    for file in &files {
        let text = read(file)?;
        names.extend(file.file_stem().map(|name| name.to_string_lossy().into_owned()));
        names.extend(functions(&text));
        let name = file.strip_prefix(root()).unwrap_or(file).display().to_string();
        let lines = text.lines().count();
        if lines > MOST_LINES {
            wrong.push(format!("{name} has {lines} lines, more than {MOST_LINES}: split it"));
        }
        unsafety.look(&name, &text);
        let is_test = file.file_name().is_some_and(|name| name == "tests.rs");
        if !is_test && PURE.iter().any(|directory| name.starts_with(directory)) {
            wrong.extend(impurities(&text).map(|(line, word)| {
                format!("{name}:{line} mentions {word}: this crate does no I/O and reads no clock")
            }));
        }
    }
    wrong.extend(unsafety::wrong(&unsafety)?);
    wrong.extend(untested::wrong()?);
    let document = read(&root().join("docs/combinations.md"))?;
    wrong.extend(combinations::wrong(&document, |name| names.contains(name)));
    println!("{} files of Rust, {} of them with unsafe outside of tests", files.len(), unsafety.files());
    if wrong.is_empty() { Ok(Outcome::Passed) } else { Err(wrong.join("; ")) }
}

/// Names of functions.
fn functions(text: &str) -> impl Iterator<Item = String> {
    let named = text.lines().filter_map(|line| line.split_once("fn ")?.1.split(['(', '<']).next());
    named.map(str::to_owned)
}

/// Lines of code before the tests that use a word of [`IMPURE`].
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
