//! Dirty bitmaps of a QEMU's disks. Incremental backups need them. A migration drops them unless
//! `dirty-bitmaps` is switched on.

use serde_json::{Value, json};
use sterna_drive::Settings;

use crate::monitor::Monitor;

const CAPABILITY: &str = "dirty-bitmaps";

/// A warning that lists the bitmaps that the guest of `monitor` would lose. None if no bitmap is lost, or if
/// the VM does not report bitmaps.
/// `cap`: capabilities that the command line switches; `advice`: how the operator keeps bitmaps with this
/// command.
pub fn warning(
    monitor: &mut Monitor,
    settings: &Settings,
    cap: &[(String, bool)],
    advice: &str,
) -> Option<String> {
    let stays = cap
        .iter()
        .rfind(|(name, _)| name == CAPABILITY)
        .map_or(settings.capability(CAPABILITY) != Some(false), |(_, is_on)| *is_on);
    if monitor.is_sterna() || stays {
        return None;
    }
    let nodes = monitor.try_execute("query-named-block-nodes", json!({})).ok()?;
    let lost = lost(&nodes);
    if lost.is_empty() {
        return None;
    }
    Some(format!(
        "these dirty bitmaps are not migrated: {}. The next incremental backup that uses them will fail: {advice}, or \
         make a full backup next",
        lost.join(", ")
    ))
}

/// The bitmaps that exist only in memory. A persistent bitmap is stored in its image, which the destination
/// opens.
fn lost(nodes: &Value) -> Vec<String> {
    let nodes = nodes.as_array().into_iter().flatten();
    let of_node = |node: &Value| -> Vec<String> {
        let at = node["node-name"].as_str().unwrap_or("a disk without a name").to_owned();
        let bitmaps = node["dirty-bitmaps"].as_array().into_iter().flatten();
        let lost = bitmaps.filter(|bitmap| bitmap["persistent"] != true);
        // Bitmaps without a name are internal to jobs of the block layer.
        lost.filter_map(|bitmap| bitmap["name"].as_str()).map(|name| format!("`{name}` of {at}")).collect()
    };
    nodes.flat_map(of_node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmaps_that_are_in_memory_alone_are_lost() {
        let nodes = json!([
            {"node-name": "disk0", "dirty-bitmaps": [
                {"name": "backup", "persistent": false, "count": 131072, "recording": true},
                {"name": "stored", "persistent": true, "count": 0, "recording": true},
                {"persistent": false, "count": 0, "recording": true},
            ]},
            {"node-name": "file0"},
        ]);

        assert_eq!(lost(&nodes), ["`backup` of disk0"]);
        assert!(lost(&json!({})).is_empty() && lost(&json!([])).is_empty());
    }
}
