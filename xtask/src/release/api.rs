//! The public interface of each library as text, stored in `api/`, so that a change of it is seen in review.
//!
//! cargo-semver-checks would compare with the release before, of which there is none yet.

use std::path::PathBuf;

use super::{Published, tools};
use crate::parts::Outcome;
use crate::process::{self, Result};
use crate::workspace::root;

/// Fails with each crate whose interface is not the stored one.
pub fn check(crates: &[Published]) -> Result<Outcome> {
    let tool = match tools::installed(&tools::PUBLIC_API) {
        Ok(tool) => tool,
        Err(why) => return Ok(Outcome::Skipped(why)),
    };
    let mut wrong = Vec::new();
    for each in crates {
        let stored = std::fs::read_to_string(file(each)).unwrap_or_default();
        let now = interface(&tool, each)?;
        if stored != now {
            wrong.push(each.name.clone());
            print_difference(&stored, &now);
        }
    }
    match wrong.is_empty() {
        true => Ok(Outcome::Passed),
        false => Err(format!(
            "changed: {}; `cargo xtask release-check --update-api` stores the interface as it is now",
            wrong.join(", ")
        )),
    }
}

/// Stores the interfaces as they are now.
pub fn update(crates: &[Published]) -> Result<()> {
    let tool = tools::installed(&tools::PUBLIC_API)?;
    for each in crates {
        let file = file(each);
        std::fs::create_dir_all(root().join("api")).map_err(|error| format!("api: {error}"))?;
        std::fs::write(&file, interface(&tool, each)?).map_err(|e| format!("{}: {e}", file.display()))?;
        println!("{}", file.display());
    }
    Ok(())
}

fn file(each: &Published) -> PathBuf {
    root().join("api").join(format!("{}.txt", each.name))
}

/// One line for each public item, sorted; without what every type has, such as automatic traits.
fn interface(tool: &std::path::Path, each: &Published) -> Result<String> {
    let mut command = tools::command(tool);
    // rustdoc's JSON is not stable: the pinned compiler writes it when told that it may.
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTUP_TOOLCHAIN", pinned()?);
    command.args(["public-api", "-sss", "--color", "never", "--package", &each.name]);
    command.arg("--target-dir").arg(crate::workspace::target_directory().join("release-check"));
    process::output(&mut command)
}

/// The toolchain of rust-toolchain.toml, so that the tool takes no other.
fn pinned() -> Result<String> {
    let text = std::fs::read_to_string(root().join("rust-toolchain.toml")).map_err(|e| e.to_string())?;
    let channel = text.lines().find_map(|line| line.strip_prefix("channel = "));
    channel.map(|name| name.trim_matches('"').to_owned()).ok_or("rust-toolchain.toml names no channel".into())
}

fn print_difference(stored: &str, now: &str) {
    let (stored, now): (Vec<&str>, Vec<&str>) = (stored.lines().collect(), now.lines().collect());
    stored.iter().filter(|line| !now.contains(line)).for_each(|line| println!("- {line}"));
    now.iter().filter(|line| !stored.contains(line)).for_each(|line| println!("+ {line}"));
}
