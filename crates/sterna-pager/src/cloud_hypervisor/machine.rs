//! The texts of a machine: `Config` and `State`, and the files of the VMM's own snapshots (specs/ch-offload.md §4). Pure.

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::json::member;
use super::layout::{MemoryLayout, Range, Slot};
use super::machine_error::MachineError;

#[derive(Deserialize)]
struct Manager {
    guest_ram_mappings: Vec<Mapping>,
    #[serde(default)]
    memory_ranges: Ranges,
}

#[derive(Deserialize)]
struct Mapping {
    slot: u32,
    gpa: u64,
    size: u64,
    #[serde(default)]
    zone_id: String,
    #[serde(default)]
    virtio_mem: bool,
    #[serde(default)]
    file_offset: u64,
}

#[derive(Default, Deserialize)]
struct Ranges {
    #[serde(default)]
    data: Vec<Range>,
}

#[derive(Deserialize)]
struct Tree {
    #[serde(default)]
    snapshots: Managers,
    #[serde(default)]
    snapshot_data: Option<Data>,
}

#[derive(Default, Deserialize)]
struct Managers {
    #[serde(default, rename = "memory-manager")]
    memory: Option<Node>,
}

#[derive(Deserialize)]
struct Node {
    #[serde(default)]
    snapshot_data: Option<Data>,
}

#[derive(Deserialize)]
struct Data {
    /// JSON in a string.
    state: String,
}

impl MemoryLayout {
    /// The layout in a `Config` and a `State`.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn new(config: &[u8], state: &[u8]) -> Result<Self, MachineError> {
        let text = |why: String| MachineError::Text { text: "Config", why };
        let manager = member(config, "memory_manager_data").map_err(text)?;
        let manager = manager.ok_or(MachineError::Lacks {
            text: "Config",
            member: "memory_manager_data",
            advice: "",
        })?;
        let manager: Manager = serde_json::from_slice(manager).map_err(|error| text(error.to_string()))?;
        let mut ranges = manager.memory_ranges.data;
        // The VMM fills its table when it saves itself, which is after the configuration was sent.
        if let Some(saved) = memory_state(state)? {
            let saved: Manager = serde_json::from_str(&saved)
                .map_err(|error| MachineError::Text { text: "State", why: error.to_string() })?;
            if !saved.memory_ranges.data.is_empty() {
                ranges = saved.memory_ranges.data;
            }
        }
        let slots: Vec<Slot> = manager.guest_ram_mappings.into_iter().map(Slot::from).collect();
        Self::of(slots, ranges)
    }
}

/// The machine's configuration as the VMM's own snapshots have it, from a `Config`.
///
/// # Errors
/// [`MachineError`].
pub fn vm_config(config: &[u8]) -> Result<&[u8], MachineError> {
    let found = member(config, "vm_config").map_err(|why| MachineError::Text { text: "Config", why })?;
    found.ok_or(MachineError::Lacks { text: "Config", member: "vm_config", advice: "" })
}

/// A `Config`, from the files `config.json` and `state.json` of a snapshot that the VMM wrote itself.
///
/// # Errors
/// [`MachineError`].
pub fn migration_config(config_file: &[u8], state_file: &[u8]) -> Result<Vec<u8>, MachineError> {
    const ADVICE: &str = ": this snapshot has the form of another release, so restore it with `sterna convert` and the \
                          VMM's own --restore";
    let lacks = |member| MachineError::Lacks { text: "state.json", member, advice: ADVICE };
    let wrong = |text| move |why: String| MachineError::Text { text, why };
    // Each text is one whole value, so that the result is one, too.
    let whole = |text: &[u8]| serde_json::from_slice::<IgnoredAny>(text).map_err(|error| error.to_string());
    whole(config_file).map_err(wrong("config.json"))?;
    let tree = tree(state_file, "state.json")?;
    let machine = tree.snapshot_data.ok_or_else(|| lacks("snapshot_data"))?.state;
    let cpuid = member(machine.as_bytes(), "common_cpuid").map_err(wrong("state.json"))?;
    let cpuid = cpuid.ok_or_else(|| lacks("common_cpuid"))?;
    let memory = tree.snapshots.memory.and_then(|node| node.snapshot_data);
    let memory = memory.ok_or_else(|| lacks("snapshots.memory-manager"))?.state;
    whole(memory.as_bytes()).map_err(wrong("state.json"))?;
    let parts: [&[u8]; 7] = [
        b"{\"vm_config\":",
        config_file.trim_ascii(),
        b",\"common_cpuid\":",
        cpuid,
        b",\"memory_manager_data\":",
        memory.as_bytes(),
        b"}",
    ];
    Ok(parts.concat())
}

impl From<Mapping> for Slot {
    fn from(mapping: Mapping) -> Self {
        Self {
            number: mapping.slot,
            address: mapping.gpa,
            bytes: mapping.size,
            file_offset: mapping.file_offset,
            zone: mapping.zone_id,
            is_virtio_mem: mapping.virtio_mem,
        }
    }
}

fn tree(state: &[u8], text: &'static str) -> Result<Tree, MachineError> {
    serde_json::from_slice(state).map_err(|error| MachineError::Text { text, why: error.to_string() })
}

/// What the memory manager has saved.
fn memory_state(state: &[u8]) -> Result<Option<String>, MachineError> {
    let data = tree(state, "State")?.snapshots.memory.and_then(|node| node.snapshot_data);
    Ok(data.map(|data| data.state))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::cloud_hypervisor::Found;

    fn mapping(slot: u32, gpa: u64, size: u64) -> Value {
        json!({"slot": slot, "gpa": gpa, "size": size, "zone_id": "mem0", "virtio_mem": false, "file_offset": 0})
    }

    fn config(mappings: &[Value]) -> Vec<u8> {
        json!({"vm_config": {"cpus": {}}, "common_cpuid": [], "memory_manager_data": {"guest_ram_mappings": mappings}})
            .to_string()
            .into_bytes()
    }

    fn state(mappings: &[Value], ranges: &[(u64, u64)]) -> Vec<u8> {
        let data: Vec<_> = ranges.iter().map(|(gpa, length)| json!({"gpa": gpa, "length": length})).collect();
        let memory = json!({"guest_ram_mappings": mappings, "memory_ranges": {"data": data}}).to_string();
        let machine = json!({"clock": null, "common_cpuid": [{"function": 1}]}).to_string();
        let managers = json!({"memory-manager": {"snapshots": {}, "snapshot_data": {"state": memory}}});
        json!({"snapshots": managers, "snapshot_data": {"state": machine}}).to_string().into_bytes()
    }

    fn refused(mappings: &[Value], ranges: &[(u64, u64)]) -> MachineError {
        MemoryLayout::new(&config(mappings), &state(mappings, ranges)).unwrap_err()
    }

    #[test]
    fn memory_has_the_order_of_the_ranges() {
        let mappings = [mapping(0, 0, 0x8000), mapping(1, 0x10_0000, 0x4000)];
        let ranges = [(0x10_0000, 0x4000), (0, 0x8000)];

        let layout = MemoryLayout::new(&config(&mappings), &state(&mappings, &ranges)).unwrap();

        assert_eq!(layout.len_bytes(), 0xc000);
        let places: Vec<_> = layout.parts().iter().map(|part| (part.offset, part.slot, part.bytes)).collect();
        assert_eq!(places, [(0, 1, 0x4000), (0x4000, 0, 0x8000)]);
        assert_eq!(
            layout.at_address(0x10_1000, 4096),
            Some(vec![Found::Image { offset: 4096, bytes: 4096 }])
        );
        assert_eq!(layout.at_address(0x8000, 4096), None);
        let cut: Vec<_> =
            layout.at_offset(0x3000, 0x2000).map(|part| (part.slot, part.file_offset)).collect();
        assert_eq!(cut, [(1, 0x3000), (0, 0)]);
    }

    #[test]
    fn machine_without_a_table_of_ranges_has_its_slots_in_the_order_of_addresses() {
        let mappings = [mapping(4, 0x10_0000, 0x1000), mapping(0, 0, 0x2000)];

        let layout = MemoryLayout::new(&config(&mappings), br#"{"snapshots":{}}"#).unwrap();

        let slots: Vec<_> = layout.parts().iter().map(|part| layout.slots()[part.slot].number).collect();
        assert_eq!(slots, [0, 4]);
    }

    #[test]
    fn unused_memory_of_virtio_mem_is_zero() {
        let mut hot = mapping(2, 0x10_0000, 0x10000);
        hot["virtio_mem"] = json!(true);
        hot["file_offset"] = json!(0x8000);
        let mappings = [mapping(0, 0, 0x8000), hot];
        let ranges = [(0, 0x8000), (0x10_4000, 0x1000)];

        let layout = MemoryLayout::new(&config(&mappings), &state(&mappings, &ranges)).unwrap();

        let found = layout.at_address(0x10_3000, 0x3000).unwrap();
        let unused = |file_offset| Found::Unused { slot: 1, file_offset, bytes: 4096 };
        assert_eq!(found, [unused(0xb000), Found::Image { offset: 0x8000, bytes: 4096 }, unused(0xd000)]);
        assert_eq!(layout.slots()[1].file_bytes(), 0x18000);
    }

    #[test]
    fn layout_that_breaks_a_rule_is_refused() {
        let one = mapping(0, 0, 0x8000);
        assert_eq!(refused(&[], &[]), MachineError::Slots { count: 0 });
        for wrong in [mapping(0, 1, 4096), mapping(0, 0, 0), mapping(0, 0, 5), mapping(0, !0xfff, 4096)] {
            assert!(matches!(refused(&[wrong], &[]), MachineError::Number { .. }));
        }
        let mut far = one.clone();
        far["file_offset"] = json!(u64::MAX);
        assert!(matches!(refused(&[far], &[]), MachineError::Number { field: "file_offset", .. }));
        let overlap = refused(&[one.clone(), mapping(1, 0x7000, 4096)], &[]);
        assert_eq!(overlap, MachineError::Overlap { what: "memory slots", address: 0x7000 });
        assert!(matches!(
            refused(&[one.clone(), mapping(0, 0x8000, 4096)], &[]),
            MachineError::Number { .. }
        ));
        let one = [one];
        let twice = refused(&one, &[(0, 0x8000), (0x7000, 4096)]);
        assert_eq!(twice, MachineError::Overlap { what: "memory ranges", address: 0x7000 });
        assert_eq!(refused(&one, &[(0, 0x9000)]), MachineError::NoSlot { address: 0, missing: 0x8000 });
        let outside = MachineError::Outside { address: 0x4000, zone: "mem0".into() };
        assert_eq!(refused(&one, &[(0, 0x4000)]), outside);
        assert!(matches!(MemoryLayout::new(b"{}", b"{}"), Err(MachineError::Lacks { .. })));
        assert!(matches!(
            MemoryLayout::new(&config(&one), b"["),
            Err(MachineError::Text { text: "State", .. })
        ));
    }

    #[test]
    fn configuration_becomes_a_file_and_comes_back() {
        let mappings = [mapping(0, 0, 0x8000)];
        let (config, state) = (config(&mappings), state(&mappings, &[(0, 0x8000)]));
        assert_eq!(vm_config(&config).unwrap(), br#"{"cpus":{}}"#);

        let again = migration_config(b"{\"cpus\":{}}\n", &state).unwrap();

        assert_eq!(vm_config(&again).unwrap(), br#"{"cpus":{}}"#);
        assert_eq!(member(&again, "common_cpuid").unwrap().unwrap(), br#"[{"function":1}]"#);
        assert_eq!(MemoryLayout::new(&again, &state), MemoryLayout::new(&config, &state));
        assert!(matches!(
            migration_config(b"{},{}", &state),
            Err(MachineError::Text { text: "config.json", .. })
        ));
        let lacks = migration_config(b"{}", br#"{"snapshots":{}}"#).unwrap_err();
        assert!(matches!(lacks, MachineError::Lacks { member: "snapshot_data", .. }));
    }
}
