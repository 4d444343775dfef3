//! Checks that programs whose tests cargo must not build (`test = false`) contain no tests.

use std::path::Path;

use serde_json::Value;

use crate::process::Result;
use crate::workspace::Metadata;

/// Each test that would never run.
pub fn wrong() -> Result<Vec<String>> {
    let metadata = Metadata::of_members(None)?;
    let mut wrong = Vec::new();
    for package in metadata.packages().filter(|package| package["source"].is_null()) {
        for target in package["targets"].as_array().into_iter().flatten() {
            wrong.extend(of_target(target)?);
        }
    }
    Ok(wrong)
}

fn of_target(target: &Value) -> Result<Vec<String>> {
    let runs = target["kind"][0] != "bin" || target["test"] != false;
    let Some(path) = target["src_path"].as_str().filter(|_| !runs) else { return Ok(Vec::new()) };
    let path = Path::new(path);
    let mut files = vec![path.to_path_buf()];
    // The modules of a `main.rs` are in the same directory, unless a library has them.
    let directory = path.parent().unwrap_or(path);
    if path.ends_with("main.rs") && !directory.join("lib.rs").is_file() {
        super::rust_files(directory, &mut files)?;
    }
    let mut wrong = Vec::new();
    for file in files {
        if super::read(&file)?.lines().any(|line| line.trim() == "#[test]") {
            wrong.push(format!(
                "{} has tests that never run: the target has `test = false` in its Cargo.toml",
                file.display()
            ));
        }
    }
    wrong.dedup();
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_target_finds_tests_that_would_not_run() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/main.rs");
        let target = |test: bool| serde_json::json!({"kind": ["bin"], "test": test, "src_path": path});

        assert!(!of_target(&target(false)).expect("files").is_empty());
        assert_eq!(of_target(&target(true)), Ok(Vec::new()));
    }
}
