//! Disks and network cards of the VM: `query-block`, `block_resize`, `announce-self`.
//!
//! Disks are called `disk0`, `disk1`, ... in the VMM's order, as devices and as nodes; network cards `net0`, `net1`, ....

use serde_json::{Map, Value, json};

use super::MigrationControl;
use super::announcing::Announcing;
use super::vm::BlockDevice;
use crate::error::{ErrorClass, QmpError};
use crate::server::ArgumentKind::{Array, Integer, String as Text};
use crate::server::{Arguments, CommandSpec};

pub(super) fn commands() -> [CommandSpec; 3] {
    let numbers = ["initial", "max", "rounds", "step"];
    let announce = CommandSpec::new("announce-self").optional("interfaces", Array).optional("id", Text);
    [
        CommandSpec::new("query-block"),
        CommandSpec::new("block_resize")
            .optional("device", Text)
            .optional("node-name", Text)
            .required("size", Integer),
        numbers.into_iter().fold(announce, |command, name| command.required(name, Integer)),
    ]
}

impl MigrationControl {
    /// `query-block`.
    pub(super) fn query_block(&self) -> Value {
        let device = |(index, disk): (usize, BlockDevice)| {
            let name = format!("disk{index}");
            let mut inserted = json!({
                "file": disk.file,
                "node-name": name,
                "drv": disk.format,
                "ro": disk.is_read_only,
                "backing_file_depth": u8::from(disk.backing_file.is_some()),
                "image": {
                    "filename": disk.file,
                    "format": disk.format,
                    "virtual-size": disk.len_bytes,
                },
            });
            if let Some(file) = disk.backing_file {
                inserted["backing_file"] = file.into();
            }
            json!({
                "device": name,
                "type": "unknown",
                "removable": false,
                "locked": false,
                "inserted": inserted,
            })
        };
        self.vm.disks().into_iter().enumerate().map(device).collect()
    }

    /// `block_resize`.
    pub(super) fn block_resize(&self, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        let look = Arguments(arguments);
        let name = match (look.string("device")?, look.string("node-name")?) {
            (Some(name), None) | (None, Some(name)) => name,
            _ => return Err(QmpError::generic("Give either 'device' or 'node-name', such as 'disk0'")),
        };
        let index = numbered(name, "disk").filter(|index| *index < self.vm.disks().len());
        let index = index.ok_or_else(|| QmpError {
            class: ErrorClass::DeviceNotFound,
            desc: format!(
                "Cannot find device='{name}' nor node-name='{name}': 'query-block' lists the disks"
            ),
        })?;
        let size = arguments.get("size").and_then(Value::as_u64);
        let size = size.ok_or_else(|| QmpError::expects("size", "a size in bytes, not negative"))?;
        self.with_free_guest(|vm| {
            vm.resize_disk(index, size).map_err(|error| QmpError::generic(error.to_string()))
        })
    }

    /// `announce-self`.
    pub(super) fn announce_self(&self, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        let announcing = Announcing::of_arguments(arguments)?;
        let expects = || QmpError::expects("interfaces", "a list of network cards, such as 'net0'");
        let interfaces = arguments.get("interfaces").and_then(Value::as_array);
        let card = |name: &Value| name.as_str().and_then(|name| numbered(name, "net")).ok_or_else(expects);
        let cards: Vec<_> = interfaces.into_iter().flatten().map(card).collect::<Result<_, _>>()?;
        let id = Arguments(arguments).string("id")?.unwrap_or_default();
        self.with_free_guest(|vm| {
            vm.announce(announcing, &cards, id).map_err(|error| QmpError::generic(error.to_string()))
        })
    }
}

/// The number in a name such as `disk0`.
fn numbered(name: &str, kind: &str) -> Option<usize> {
    let number = name.strip_prefix(kind)?;
    number.parse().ok().filter(|index: &usize| index.to_string() == number)
}
