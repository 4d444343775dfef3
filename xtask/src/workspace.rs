//! Facts about the workspace, read from `cargo metadata`.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::process::{self, Result};

/// The directory of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_path_buf()
}

/// The directory of cargo's output, where xtask also keeps its own files.
pub fn target_directory() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The parsed output of `cargo metadata`.
pub struct Metadata(Value);

/// A target that cargo can build and run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The package that contains the target.
    pub package: String,
    /// The name of the target.
    pub name: String,
    /// `bin`, `example`, `test` or `bench`.
    pub kind: String,
    /// The first source file of the target.
    pub file: PathBuf,
}

impl Metadata {
    /// Metadata of the workspace alone, or of `manifest`. This needs no network.
    pub fn of_members(manifest: Option<&Path>) -> Result<Self> {
        Self::read(manifest, &["--no-deps"])
    }

    /// Metadata of the workspace and of all its dependencies on Linux and x86-64.
    pub fn of_everything(manifest: Option<&Path>) -> Result<Self> {
        Self::read(manifest, &["--all-features", "--filter-platform", "x86_64-unknown-linux-gnu"])
    }

    fn read(manifest: Option<&Path>, more: &[&str]) -> Result<Self> {
        let mut command = process::cargo();
        command.args(["metadata", "--quiet", "--format-version", "1"]).args(more);
        if let Some(manifest) = manifest {
            command.arg("--manifest-path").arg(manifest);
        }
        let text = process::output(&mut command)?;
        serde_json::from_str(&text).map(Self).map_err(|error| format!("cargo metadata: {error}"))
    }

    /// Each package as JSON.
    pub fn packages(&self) -> impl Iterator<Item = &Value> {
        self.0["packages"].as_array().into_iter().flatten()
    }

    /// Every bin, example, test and bench of the workspace's members.
    pub fn targets(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        for package in self.packages().filter(|p| p["source"].is_null()) {
            for target in package["targets"].as_array().into_iter().flatten() {
                targets.push(Target {
                    package: text(&package["name"]),
                    name: text(&target["name"]),
                    kind: text(&target["kind"][0]),
                    file: text(&target["src_path"]).into(),
                });
            }
        }
        targets
    }

    /// The runnable target of that name. A test counts only if no other kind of target has the
    /// name.
    pub fn target(&self, name: &str) -> Option<Target> {
        let rank = |kind: &str| ["bin", "example", "bench", "test"].iter().position(|k| *k == kind);
        self.targets()
            .into_iter()
            .filter(|target| target.name == name && rank(&target.kind).is_some())
            .min_by_key(|target| rank(&target.kind))
    }
}

impl Target {
    /// Whether the directory of the first source file contains a module of that name.
    pub fn has_module(&self, name: &str) -> bool {
        let path = self.file.with_file_name(name);
        path.is_dir() || path.with_extension("rs").is_file()
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
