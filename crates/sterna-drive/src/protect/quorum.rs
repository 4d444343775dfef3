//! Advice for an operator whose disk is no quorum: QEMU cannot add a child to any other node.

use serde_json::Value;

/// The node in `nodes` (from `query-named-block-nodes`) that `name` means.
/// `name` is a node name, or the name of a drive in `devices` (from `query-block`).
pub(super) fn find<'a>(nodes: &'a [Value], devices: &Value, name: &str) -> Option<&'a Value> {
    let by_name = |name: &str| nodes.iter().find(|node| node["node-name"] == name);
    by_name(name).or_else(|| {
        let is_named = |device: &&Value| device["device"] == name || device["qdev"] == name;
        let device = devices.as_array()?.iter().find(is_named)?;
        by_name(device["inserted"]["node-name"].as_str()?)
    })
}

/// The command line options with which the disk `node` is a quorum.
pub(super) fn advice(nodes: &[Value], node: &Value) -> String {
    let node = top(nodes, node);
    let (name, driver) = (text(node, "node-name"), text(node, "drv"));
    if driver == "quorum" {
        return format!("give its quorum: --disk {name}");
    }
    let quorum = "quorum,node-name=NAME,vote-threshold=1,read-pattern=fifo,children.0";
    // QEMU generates names with `#`, and does not accept them on a command line.
    if !name.starts_with('#') {
        return format!(
            "start it with `-blockdev {quorum}={name}`, the device on NAME, and give --disk NAME"
        );
    }
    let below = children(node).find(|child| child["child"] == "file");
    let below = below.and_then(|child| nodes.iter().find(|node| node["node-name"] == child["node-name"]));
    let file = match below.map(|below| text(below, "drv")) {
        Some(kind @ ("file" | "host_device")) => {
            format!("file.driver={kind},file.filename={}", text(node, "file").replace(',', ",,"))
        }
        _ => "file.driver=…".to_owned(),
    };
    format!(
        "start it with `-blockdev {driver},node-name=NODE,{file} -blockdev {quorum}=NODE` instead of the disk's \
         -drive, the device on NAME (drive=NAME), and give --disk NAME"
    )
}

/// The node that the device uses. The nodes below it include the file without its format.
fn top<'a>(nodes: &'a [Value], node: &'a Value) -> &'a Value {
    let parent = |node: &Value| {
        nodes.iter().find(|parent| {
            children(parent)
                .any(|child| child["node-name"] == node["node-name"] && child["child"] != "backing")
        })
    };
    std::iter::successors(Some(node), |node| parent(node)).take(nodes.len().max(1)).last().unwrap_or(node)
}

fn children(node: &Value) -> impl Iterator<Item = &Value> {
    node["children"].as_array().into_iter().flatten()
}

fn text<'a>(node: &'a Value, member: &str) -> &'a str {
    node[member].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn nodes(top: &str, format: &str, below: &str) -> Vec<Value> {
        vec![
            json!({"node-name": top, "drv": format, "file": "/a,b",
                "children": [{"child": "file", "node-name": below}]}),
            json!({"node-name": below, "drv": "file", "file": "/a,b", "children": []}),
        ]
    }

    #[test]
    fn file_below_a_format_is_not_what_a_quorum_is_put_over() {
        let nodes = nodes("p0", "qcow2", "f0");
        for node in &nodes {
            let advice = advice(&nodes, node);
            assert!(advice.contains("children.0=p0`"), "{advice}");
        }
    }

    #[test]
    fn name_that_qemu_has_made_up_is_in_no_command_line() {
        let nodes = nodes("#block149", "raw", "#block027");
        for node in &nodes {
            let advice = advice(&nodes, node);
            let line = "`-blockdev raw,node-name=NODE,file.driver=file,file.filename=/a,,b -blockdev quorum,";
            assert!(advice.contains(line) && !advice.contains('#'), "{advice}");
        }
    }

    #[test]
    fn child_of_a_quorum_is_protected_by_that_quorum() {
        let mut nodes = nodes("p0", "raw", "f0");
        nodes.push(json!({"node-name": "q0", "drv": "quorum",
            "children": [{"child": "children.0", "node-name": "p0"}]}));
        for node in &nodes[..2] {
            assert_eq!(advice(&nodes, node), "give its quorum: --disk q0");
        }
    }

    #[test]
    fn disk_is_found_by_the_name_of_its_node_or_drive() {
        let nodes = nodes("#block149", "raw", "#block027");
        let devices = json!([{"device": "hd", "qdev": "/x", "inserted": {"node-name": "#block149"}}]);
        for name in ["hd", "/x", "#block149"] {
            assert_eq!(find(&nodes, &devices, name), Some(&nodes[0]), "{name}");
        }
        assert_eq!(find(&nodes, &devices, "other"), None);
    }
}
