//! Checks the licences of all packages in the build against the list of deny.toml.

use std::path::Path;

use crate::parts::Outcome;
use crate::process::Result;
use crate::spdx;
use crate::workspace::{Metadata, root};

/// Fails with every package whose licence is not allowed.
pub fn check() -> Result<Outcome> {
    let text = std::fs::read_to_string(root().join("deny.toml")).map_err(|e| format!("deny.toml: {e}"))?;
    let allow = allow_list(&text)?;
    let mut count = check_workspace(None, &allow)?;
    let fuzz = root().join("fuzz/libfuzzer/Cargo.toml");
    if fuzz.is_file() {
        count += check_workspace(Some(&fuzz), &allow)?;
    }
    println!("{count} packages, each under {}", allow.join(", "));
    Ok(Outcome::Passed)
}

fn check_workspace(manifest: Option<&Path>, allow: &[&str]) -> Result<usize> {
    let metadata = Metadata::of_everything(manifest)?;
    let mut refused = Vec::new();
    let mut count = 0;
    for package in metadata.packages() {
        count += 1;
        let name = format!("{} {}", package["name"], package["version"]).replace('"', "");
        match package["license"].as_str() {
            None => refused.push(format!("{name} names no licence")),
            // rust-lang's libfuzzer binding contains LLVM's runtime under the permissive NCSA
            // licence. It is a tool that runs here, and no part of it is distributed.
            Some(licence) if manifest.is_some() && licence.ends_with(" AND NCSA") => {
                if !spdx::allowed(licence.trim_end_matches(" AND NCSA"), allow)? {
                    refused.push(format!("{name}: {licence}"));
                }
            }
            Some(licence) => match spdx::allowed(licence, allow) {
                Ok(true) => {}
                Ok(false) => refused.push(format!("{name}: {licence}")),
                Err(why) => refused.push(format!("{name}: {why}")),
            },
        }
    }
    if refused.is_empty() { Ok(count) } else { Err(format!("not allowed: {}", refused.join("; "))) }
}

/// The strings of `allow = [ … ]` in deny.toml. Only that array is read, so no TOML parser is
/// needed.
fn allow_list(deny: &str) -> Result<Vec<&str>> {
    let start = deny.find("\nallow = [").ok_or("deny.toml has no `allow = [`")?;
    let array = &deny[start..];
    let array = &array[..array.find(']').ok_or("deny.toml: `allow` does not end")?];
    let list: Vec<&str> = array.split('"').skip(1).step_by(2).collect();
    if list.is_empty() { Err("deny.toml allows no licence at all".into()) } else { Ok(list) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allow_list_reads_the_array_and_nothing_else() {
        let deny = "[graph]\ntargets = [\"x\"]\n[licenses]\nallow = [\n  \"MIT\",\n  \"Zlib\",\n]\nother = [\"GPL\"]";

        assert_eq!(allow_list(deny).unwrap(), ["MIT", "Zlib"]);
    }

    #[test]
    fn allow_list_that_is_missing_or_empty_is_an_error() {
        assert!(allow_list("[licenses]").is_err());
        assert!(allow_list("x\nallow = []").is_err());
    }
}
