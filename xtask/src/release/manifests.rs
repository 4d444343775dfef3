//! Checks that each manifest has the fields that a registry shows: description, README, keywords,
//! categories, licence texts. Each feature must have a comment.

use std::path::Path;

use serde_json::Value;

use super::Published;
use crate::parts::Outcome;
use crate::process::Result;

/// Fails with everything that a manifest lacks.
pub fn check(crates: &[Published]) -> Result<Outcome> {
    let mut wrong = Vec::new();
    for each in crates {
        let manifest = Path::new(each.package["manifest_path"].as_str().unwrap_or_default());
        let directory = manifest.parent().unwrap_or(manifest);
        let text = std::fs::read_to_string(manifest).map_err(|e| format!("{}: {e}", manifest.display()))?;
        wrong.extend(lacks(&each.package).into_iter().map(|what| format!("{}: {what}", each.name)));
        let without = undescribed(&text, &each.features());
        wrong.extend(
            without.into_iter().map(|name| format!("{}: no comment above feature {name}", each.name)),
        );
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            if !directory.join(file).is_file() {
                wrong.push(format!("{}: no {file}", each.name));
            }
        }
    }
    let names: Vec<&str> = crates.iter().map(|each| each.name.as_str()).collect();
    println!("published, in this order: {}", names.join(", "));
    if wrong.is_empty() { Ok(Outcome::Passed) } else { Err(wrong.join("; ")) }
}

fn lacks(package: &Value) -> Vec<String> {
    let has = |name: &str| package[name].as_str().is_some_and(|text| !text.is_empty());
    let count = |name: &str| package[name].as_array().map_or(0, Vec::len);
    let mut wrong: Vec<String> = ["description", "license", "readme", "rust_version"]
        .iter()
        .filter(|name| !has(name))
        .map(|name| format!("no {name}"))
        .collect();
    for list in ["keywords", "categories"] {
        if !(1..=5).contains(&count(list)) {
            wrong.push(format!("{list}: one to five, not {}", count(list)));
        }
    }
    // Cargo warns when all three are missing.
    if !["documentation", "homepage", "repository"].iter().any(|name| has(name)) {
        wrong.push("no documentation, homepage or repository".into());
    }
    let (docs, features) = (&package["metadata"]["docs"]["rs"], package["features"].as_object());
    if docs.is_null() {
        wrong.push("no [package.metadata.docs.rs]".into());
    } else if features.is_some_and(|features| !features.is_empty()) && docs["all-features"] != true {
        wrong.push("docs.rs does not document all features".into());
    }
    let uses = package["dependencies"].as_array().into_iter().flatten();
    let open = uses.filter(|used| used["kind"] != "dev" && !used["path"].is_null() && used["req"] == "*");
    wrong.extend(open.map(|used| format!("{} has a path and no version", used["name"])));
    wrong
}

/// Features that have no comment above them in the text of a manifest.
fn undescribed(manifest: &str, features: &[String]) -> Vec<String> {
    let lines: Vec<&str> = manifest.lines().collect();
    let is_described = |name: &String| {
        let at = lines.iter().position(|line| line.starts_with(&format!("{name} = [")));
        // Features that form one choice are consecutive lines below one comment.
        at.is_some_and(|at| {
            let above = lines[..at].iter().rev().find(|line| !line.contains(" = ["));
            above.is_some_and(|line| line.starts_with('#'))
        })
    };
    features.iter().filter(|name| !is_described(name)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn undescribed_finds_features_without_a_comment() {
        let manifest = "[features]\n# Which library.\na = []\nb = [\"x\"]\n\nc = []\n";
        let features = ["a", "b", "c"].map(str::to_owned);

        assert_eq!(undescribed(manifest, &features), ["c"]);
    }

    #[test]
    fn lacks_names_what_is_missing() {
        let package = serde_json::json!({
            "description": "", "license": "MIT", "readme": "README.md", "rust_version": "1.88",
            "keywords": ["a"], "categories": [], "metadata": null, "features": {},
            "dependencies": [{"name": "low", "kind": null, "path": "/x", "req": "*"}],
        });

        let wrong = lacks(&package).join("; ");

        for what in ["no description", "categories", "docs.rs", "low", "repository"] {
            assert!(wrong.contains(what), "{what}: {wrong}");
        }
        assert!(!wrong.contains("keywords"));
        let some = serde_json::json!({"features": {"a": []}, "metadata": {"docs": {"rs": {"targets": []}}}});
        assert!(lacks(&some).join("; ").contains("all features"));
    }
}
