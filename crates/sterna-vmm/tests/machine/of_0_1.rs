//! Tests that this version loads the device state that version 0.1 saved (docs/compatibility.md).
//!
//! `STERNA_WRITE_GOLDEN=1 cargo test --workspace -p sterna-vmm --test machine of_0_1 -- --ignored` saves the
//! state. It must remain 0.1's state: save it again only for a new device.
#![allow(clippy::print_stderr, missing_docs)]

use std::path::PathBuf;

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::Kvm;
use serde_json::{Value, json};
use sterna::{Device, SourceVm, Vm};
use sterna_vmm::{KvmMachine, MachineConfig};

use crate::common::{Console, flat, guests, kvm_or_skip, skip, target, wait_for};

const RAM: u64 = 64 << 20;

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/of-0.1/devices.json")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let digits = hex.as_str().unwrap();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn devices_of_0_1_are_loaded() {
    if !kvm_or_skip("devices_of_0_1_are_loaded") {
        return;
    }
    // A KVM that always shows the processor's own counter cannot show the stored value after a reboot. A vCPU
    // that shows a wrong time is not loaded.
    if !sets_tsc() {
        skip("devices_of_0_1_are_loaded", "this KVM takes a TSC and shows another");
        return;
    }
    let stored: Value = serde_json::from_slice(&std::fs::read(file()).unwrap()).unwrap();
    let target = target(1, RAM, &Console::default());
    // The state was saved on a processor that may differ from this one.
    let record = &stored["compatibility"];
    if let Err(why) = target.compatibility().load(1, &bytes(record)) {
        eprintln!("SKIPPED devices_of_0_1_are_loaded: another processor: {why}");
        return;
    }
    for (device, stored) in target.devices().iter().zip(stored["devices"].as_array().unwrap()) {
        assert_eq!(device.name(), stored["name"]);
        let version = stored["version"].as_u64().unwrap() as u32;
        device.load(version, &bytes(&stored["body"])).unwrap_or_else(|why| panic!("{stored}: {why}"));
    }
    assert_eq!(target.devices().len(), stored["devices"].as_array().unwrap().len());
    for hook in Vm::hooks(&*target) {
        hook.acquire().unwrap();
    }
}

/// Whether a vCPU's counter continues from the value that it is set to.
fn sets_tsc() -> bool {
    const TSC: u32 = 0x10;
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let msrs =
        |data| Msrs::from_entries(&[kvm_msr_entry { index: TSC, data, ..Default::default() }]).unwrap();
    let read = || {
        let mut msrs = msrs(0);
        assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1);
        msrs.as_slice()[0].data
    };
    // Some minutes later than the present value.
    let ahead = read() + (1 << 40);
    assert_eq!(vcpu.set_msrs(&msrs(ahead)).unwrap(), 1);
    read() >= ahead
}

#[test]
#[ignore = "writes what the test above reads"]
fn record() {
    assert!(
        std::env::var_os("STERNA_WRITE_GOLDEN").is_some(),
        "set STERNA_WRITE_GOLDEN=1 to write the state"
    );
    let config = MachineConfig { guest: flat(&guests::counter()), ..MachineConfig::new("source") };
    let source = KvmMachine::new(config).unwrap();
    source.resume().unwrap();
    wait_for("counting", || source.ram().block(0).read_u64(guests::COUNTERS).unwrap() > 100);
    SourceVm::stop(&*source).unwrap();
    let device = |device: &std::sync::Arc<dyn Device>| json!({"name": device.name(), "version": device.version(), "body": hex(&device.save().unwrap())});
    let devices: Vec<Value> = source.devices().iter().map(device).collect();
    let stored = json!({"compatibility": hex(&source.compatibility().save().unwrap()), "devices": devices});
    std::fs::create_dir_all(file().parent().unwrap()).unwrap();
    std::fs::write(file(), format!("{stored:#}\n")).unwrap();
}
