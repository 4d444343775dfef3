//! The public interface of each library as text, stored in `api/`, so that a review shows every
//! change.
//!
//! cargo-semver-checks would compare with the previous release, which does not exist yet.

use std::path::{Path, PathBuf};

use super::{Published, tools};
use crate::parts::Outcome;
use crate::process::{self, Result};
use crate::workspace::{root, target_directory};

/// Fails with each crate whose interface differs from the stored one.
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

/// Stores the present interfaces in `api/`.
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

/// The interface, one line for each public item, without automatic traits.
///
/// Other items that every type has are left out too.
fn interface(tool: &Path, each: &Published) -> Result<String> {
    let target = target_directory().join("release-check");
    let mut rustdoc = process::cargo();
    // rustdoc's JSON is unstable. This variable makes the pinned stable compiler write it.
    rustdoc.env("RUSTC_BOOTSTRAP", "1").args([
        "rustdoc",
        "--quiet",
        "--locked",
        "--lib",
        "--all-features",
        "--package",
        &each.name,
    ]);
    rustdoc.arg("--target-dir").arg(&target).args([
        "--",
        "-Z",
        "unstable-options",
        "--output-format",
        "json",
    ]);
    process::run(&mut rustdoc)?;
    let json = target.join("doc").join(format!("{}.json", each.name.replace('-', "_")));
    let mut list = tools::command(tool);
    process::output(list.args(["public-api", "-sss", "--color", "never", "--rustdoc-json"]).arg(json))
}

fn print_difference(stored: &str, now: &str) {
    let (stored, now): (Vec<&str>, Vec<&str>) = (stored.lines().collect(), now.lines().collect());
    stored.iter().filter(|line| !now.contains(line)).for_each(|line| println!("- {line}"));
    now.iter().filter(|line| !stored.contains(line)).for_each(|line| println!("+ {line}"));
}
