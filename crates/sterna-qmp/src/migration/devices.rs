//! Commands for disks and network cards of the VM: `query-block`, `block_resize`, `announce-self`.
//!
//! The names are in the VMM's order: `disk0`, `disk1`, ... for disks, as devices and as nodes, and `net0`, `net1`, ...
//! for network cards.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::MigrationControl;
use super::announcing::Announcing;
use super::parameters::parameter;
use super::vm::BlockDevice;
use crate::error::{ErrorClass, QmpError};
use crate::server::Arguments;

impl MigrationControl {
    /// Answers `query-block`.
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

    /// Executes `block_resize`.
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
        self.operate("block_resize", move |vm| {
            vm.resize_disk(index, size).map_err(|error| QmpError::generic(error.to_string()))
        })
    }

    /// Executes `announce-self`.
    pub(super) fn announce_self(&self, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        let announcing = announcing(arguments)?;
        let expects = || QmpError::expects("interfaces", "a list of network cards, such as 'net0'");
        let interfaces = arguments.get("interfaces").and_then(Value::as_array);
        let card = |name: &Value| name.as_str().and_then(|name| numbered(name, "net")).ok_or_else(expects);
        let cards: Vec<_> = interfaces.into_iter().flatten().map(card).collect::<Result<_, _>>()?;
        let id = Arguments(arguments).string("id")?.unwrap_or_default().to_owned();
        self.operate("announce-self", move |vm| {
            vm.announce(announcing, &cards, &id).map_err(|error| QmpError::generic(error.to_string()))
        })
    }
}

/// The settings in the arguments, checked with the ranges of the parameters.
fn announcing(arguments: &Map<String, Value>) -> Result<Announcing, QmpError> {
    for name in ["initial", "max", "rounds", "step"] {
        let spec = parameter(&format!("announce-{name}"));
        let checked = spec.map(|spec| spec.check(arguments.get(name).unwrap_or(&Value::Null)));
        checked.transpose().map_err(|error| QmpError {
            desc: error.desc.replace(&format!("announce-{name}"), name),
            ..error
        })?;
    }
    let number = |name| arguments.get(name).and_then(Value::as_u64).unwrap_or(0);
    Ok(Announcing {
        initial: Duration::from_millis(number("initial")),
        max: Duration::from_millis(number("max")),
        rounds: u32::try_from(number("rounds")).unwrap_or(u32::MAX),
        step: Duration::from_millis(number("step")),
    })
}

/// The number in a name such as `disk0`. None for another kind of name.
fn numbered(name: &str, kind: &str) -> Option<usize> {
    let number = name.strip_prefix(kind)?;
    number.parse().ok().filter(|index: &usize| index.to_string() == number)
}
