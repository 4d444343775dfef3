//! Answers `qom-list` and `qom-get` with a tree of the VM's parts that this monitor knows.
//!
//! Programs that connect to a QEMU look here for the machine's type and for objects that they have added. Every node
//! has the property `type`. Its other properties are its children.

use serde_json::{Value, json};

use super::MigrationControl;
use crate::error::{ErrorClass, QmpError};

/// A part of the VM, with its children.
struct Node {
    kind: String,
    children: Vec<(String, Node)>,
}

impl Node {
    fn leaf(kind: impl Into<String>) -> Self {
        Self { kind: kind.into(), children: Vec::new() }
    }

    fn child(&self, name: &str) -> Option<&Node> {
        self.children.iter().find(|(own, _)| own == name).map(|(_, node)| node)
    }
}

impl MigrationControl {
    /// Answers `qom-list`: the properties of the part at `path`.
    ///
    /// # Errors
    /// There is no part at `path`.
    pub fn list_properties(&self, path: &str) -> Result<Value, QmpError> {
        let root = self.tree();
        let mut list = vec![json!({"name": "type", "type": "string"})];
        let children = &find(&root, path)?.children;
        list.extend(
            children
                .iter()
                .map(|(name, node)| json!({"name": name, "type": format!("child<{}>", node.kind)})),
        );
        Ok(list.into())
    }

    /// Answers `qom-get`: a property of the part at `path`.
    ///
    /// # Errors
    /// There is no part at `path`, or it has no such property.
    pub fn property(&self, path: &str, property: &str) -> Result<Value, QmpError> {
        let root = self.tree();
        let node = find(&root, path)?;
        if property == "type" {
            return Ok(node.kind.as_str().into());
        }
        // The value of a child property is the child's path.
        node.child(property)
            .map(|_| format!("/{}", names(path).chain([property]).collect::<Vec<_>>().join("/")))
            .map(Value::from)
            .ok_or_else(|| QmpError::generic(format!("Property '{}.{property}' not found", node.kind)))
    }

    fn tree(&self) -> Node {
        let vcpus = 0..self.vm.vcpu_threads().len();
        let machine = Node {
            kind: format!("{}-machine", self.vm.machine_type()),
            children: vcpus.map(|index| (format!("cpu[{index}]"), Node::leaf("cpu"))).collect(),
        };
        let objects = Node {
            kind: "container".into(),
            children: self.objects().into_iter().map(|(id, kind)| (id, Node::leaf(kind))).collect(),
        };
        Node {
            kind: "container".into(),
            children: vec![("objects".into(), objects), ("machine".into(), machine)],
        }
    }
}

fn names(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|name| !name.is_empty())
}

/// Finds the part at `path`. The slash at the start may be missing, because no name occurs twice in this tree.
fn find<'a>(root: &'a Node, path: &str) -> Result<&'a Node, QmpError> {
    if path.is_empty() {
        return Err(QmpError::generic("Path '' is ambiguous"));
    }
    names(path).try_fold(root, |node, name| node.child(name)).ok_or_else(|| QmpError {
        class: ErrorClass::DeviceNotFound,
        desc: format!("Device '{path}' not found"),
    })
}
