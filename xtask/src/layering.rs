//! Checks the layers: each crate may use only those above it in the design's list (ARCHITECTURE.md,
//! *The crates*).

use crate::parts::Outcome;
use crate::process::Result;
use crate::workspace::Metadata;

/// The layers, the lowest first. Crates in one row may not use each other.
const LAYERS: &[&[&str]] = &[
    &["sterna-testing"],
    &["sterna-link", "sterna-uffd-peer"],
    &["sterna-wire"],
    &["sterna-proto"],
    &["sterna-forecast"],
    &["sterna-arbiter"],
    &["sterna-ram"],
    &["sterna-transport"],
    &["sterna-store"],
    &["sterna-image", "sterna-libvirt", "sterna-relay", "sterna"],
    &["sterna-opaque", "sterna-pager", "sterna-s3"],
    &["sterna-standby"],
    &["sterna-qmp"],
    &["sterna-drive", "sterna-capi"],
    &["sterna-devices", "sterna-disk"],
    &["sterna-vmm", "sterna-guests"],
    &["sterna-cli", "sterna-fuzz", "minimal-vmm", "vm-memory-vmm", "sandboxed-vmm"],
    &["sterna-interop", "sterna-soak"],
    &["sterna-benches"],
];

/// Libraries that may not do I/O, and therefore may not use `IMPURE_DEPENDENCIES`.
const PURE: &[&str] = &["sterna-wire", "sterna-proto", "sterna-forecast"];
const IMPURE_DEPENDENCIES: &[&str] = &["libc", "rustix", "nix", "mio", "tokio", "tracing", "socket2"];

/// Fails with every dependency on a crate of the same or a higher layer.
pub fn check() -> Result<Outcome> {
    let metadata = Metadata::of_members(None)?;
    let mut wrong = Vec::new();
    for package in metadata.packages() {
        let name = package["name"].as_str().unwrap_or_default();
        // Dependencies of tests are not restricted.
        let uses: Vec<&str> = package["dependencies"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|dependency| dependency["kind"] != "dev")
            .filter_map(|dependency| dependency["name"].as_str())
            .collect();
        wrong.extend(violations(name, &uses));
    }
    if wrong.is_empty() { Ok(Outcome::Passed) } else { Err(wrong.join("; ")) }
}

fn violations(name: &str, uses: &[&str]) -> Vec<String> {
    let mut wrong = Vec::new();
    let Some(layer) = layer(name) else {
        if name != "xtask" {
            wrong.push(format!("{name} stands in no layer: add it to xtask/src/layering.rs"));
        }
        return wrong;
    };
    for used in uses {
        if self::layer(used).is_some_and(|below| below >= layer) {
            wrong.push(format!(
                "{name} may not use {used}, which does not stand above it in the design's list"
            ));
        }
        if PURE.contains(&name) && IMPURE_DEPENDENCIES.contains(used) {
            wrong.push(format!("{name} does no I/O and may not use {used}"));
        }
    }
    wrong
}

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|row| row.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn violations_of_a_crate_that_looks_upwards_are_none() {
        assert!(violations("sterna", &["sterna-wire", "sterna-transport", "zstd"]).is_empty());
        assert!(violations("xtask", &["serde_json"]).is_empty());
    }

    #[test]
    fn violations_name_what_looks_down_or_sideways() {
        assert_eq!(violations("sterna-ram", &["sterna"]).len(), 1);
        assert_eq!(violations("sterna-vmm", &["sterna-guests"]).len(), 1);
        assert_eq!(violations("sterna", &["sterna-image", "sterna-opaque", "sterna-standby"]).len(), 3);
        assert_eq!(violations("sterna-wire", &["libc"]).len(), 1);
        assert_eq!(violations("stray", &[]).len(), 1);
    }
}
