//! Compares the public interfaces with those of an earlier revision, and the versions with the change.
//!
//! cargo-semver-checks compares with a release on crates.io, and there is none. The listings of `api/` name every public
//! item with its type, so an item that is gone or has changed is a line that is gone.

use std::process::Command;

use super::Published;
use crate::parts::Outcome;
use crate::process::{self, Result};
use crate::workspace::root;

/// Fails with each crate that breaks its users and has no new version. `since` is a revision; without it the last tag
/// that begins with `v` is used.
pub fn check(crates: &[Published], since: Option<&str>) -> Result<Outcome> {
    let Some(since) = since.map(str::to_owned).or_else(last_tag) else {
        return Ok(Outcome::Skipped("no release has a tag: name a revision with --since REVISION".into()));
    };
    process::output(git().args(["rev-parse", "--verify", "--quiet", &format!("{since}^{{commit}}")]))
        .map_err(|_| format!("{since} is no revision of this repository"))?;
    let mut wrong = Vec::new();
    for each in crates {
        let file = format!("api/{}.txt", each.name);
        let manifest = each.package["manifest_path"].as_str().unwrap_or_default();
        let Some(before) = at(&since, &file) else {
            println!("{}: new since {since}", each.name);
            continue;
        };
        let now = std::fs::read_to_string(root().join(&file)).map_err(|e| format!("{file}: {e}"))?;
        let gone = gone(&before, &now);
        println!("{}: {} items gone or changed since {since}", each.name, gone.len());
        let is_now = each.package["version"].as_str().unwrap_or_default();
        let was = at(&since, "Cargo.toml").and_then(|text| version_in(&text)).unwrap_or_default();
        if !gone.is_empty() && !is_breaking(&was, is_now) {
            gone.iter().for_each(|line| println!("- {line}"));
            wrong.push(format!("{} ({manifest}) is {is_now} and was {was}", each.name));
        }
    }
    match wrong.is_empty() {
        true => Ok(Outcome::Passed),
        false => Err(format!("their users break, so they need a new version: {}", wrong.join(", "))),
    }
}

/// Lines of `before` that `now` lacks.
fn gone<'a>(before: &'a str, now: &str) -> Vec<&'a str> {
    let now: std::collections::HashSet<&str> = now.lines().collect();
    before.lines().filter(|line| !now.contains(line)).collect()
}

/// Whether Cargo treats `now` as incompatible with `was`: another major version, or before 1.0 another minor version.
fn is_breaking(was: &str, now: &str) -> bool {
    let compatible = |version: &str| -> Vec<String> {
        let numbers: Vec<String> = version.split('.').map(str::to_owned).collect();
        let first =
            numbers.iter().position(|number| number != "0").unwrap_or(numbers.len().saturating_sub(1));
        numbers.into_iter().take(first + 1).collect()
    };
    compatible(was) != compatible(now)
}

/// The workspace's version in the text of a manifest.
fn version_in(manifest: &str) -> Option<String> {
    let package = manifest.split_once("[workspace.package]")?.1;
    let line = package.lines().find_map(|line| line.strip_prefix("version = "))?;
    Some(line.trim_matches('"').to_owned())
}

fn last_tag() -> Option<String> {
    let tag = process::output(git().args(["describe", "--tags", "--abbrev=0", "--match", "v*"])).ok()?;
    Some(tag.trim().to_owned())
}

/// A file of that revision; `None` if it did not exist.
fn at(revision: &str, file: &str) -> Option<String> {
    process::output(git().args(["show", &format!("{revision}:{file}")])).ok()
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.current_dir(root()).stderr(std::process::Stdio::null());
    git
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gone_are_lines_that_changed_and_not_lines_that_are_new() {
        assert_eq!(gone("a\nb -> u8\nc", "c\nb -> u16\na\nd"), ["b -> u8"]);
    }

    #[test]
    fn is_breaking_as_cargo_understands_versions() {
        for (was, now, breaks) in [
            ("0.1.0", "0.1.1", false),
            ("0.1.0", "0.2.0", true),
            ("0.0.1", "0.0.2", true),
            ("1.2.0", "1.3.0", false),
            ("1.2.0", "2.0.0", true),
        ] {
            assert_eq!(is_breaking(was, now), breaks, "{was} {now}");
        }
    }

    #[test]
    fn version_in_a_manifest_is_that_of_the_workspace() {
        let manifest = "[a]\nversion = \"7\"\n[workspace.package]\nversion = \"0.1.0\"\n";
        assert_eq!(version_in(manifest).as_deref(), Some("0.1.0"));
    }
}
