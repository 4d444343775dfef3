//! `sterna plan` for a real QEMU: its RAM, its settings, and the pages that its guest dirties.

use serde_json::Value;
use sterna_interop::{Failure, Guest, Qemu, Root, sterna};

/// RAM of the machine in MiB; the guest sweeps half of it.
const MEMORY_MIB: u64 = 64;

fn plan(machine: &Qemu, more: &[&str]) -> Result<(Option<i32>, Value, String), Failure> {
    let mut command = sterna();
    command.arg("plan").arg(machine.operator_socket()).arg("--json").args(more);
    let output = command.output().map_err(|error| error.to_string())?;
    let value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    Ok((output.status.code(), value, String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn plan_for_a_writing_guest_finds_its_ram_and_dirty_rate() -> Result<(), Failure> {
    let test = "plan_for_a_writing_guest_finds_its_ram_and_dirty_rate";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut machine = Qemu::builder(&root).memory_mib(MEMORY_MIB).guest(Guest::Boot).spawn()?;
    machine.wait_for_ticks(2)?;

    let (code, value, complaints) = plan(&machine, &["--bandwidth", "1GB/s"])?;

    assert_eq!(code, Some(0), "{complaints}");
    let inputs = &value["inputs"];
    // Video RAM and ROMs are also migrated.
    let ram = inputs["ram_bytes"].as_u64().unwrap_or(0);
    assert!((MEMORY_MIB << 20..(MEMORY_MIB + 40) << 20).contains(&ram), "{ram}");
    // The default of max-bandwidth is 128 MiB/s, less than the link. It does not limit the downtime.
    assert_eq!(inputs["bandwidth_bytes"], 128 << 20);
    assert_eq!(inputs["pause_bandwidth_bytes"], 1_000_000_000);
    assert_eq!(inputs["downtime_limit"], 0.3);
    assert_eq!(value["measured"]["run_state"], "running");
    let curve = inputs["dirty"]["curve"].as_array().cloned().unwrap_or_default();
    assert_eq!(curve.len(), 3, "{inputs}");
    // Within a second, the guest writes a large part of the half that it sweeps. It writes no other pages
    // except its own page and the screen.
    let dirtied = curve[2]["distinct_bytes"].as_u64().unwrap_or(0);
    assert!((1 << 20..(MEMORY_MIB / 2 + 8) << 20).contains(&dirtied), "{curve:?}");
    assert!(value["forecast"]["rounds"]["low"].is_number(), "{value}");
    Ok(())
}

#[test]
fn plan_for_a_stopped_guest_dirties_nothing_and_says_so() -> Result<(), Failure> {
    let test = "plan_for_a_stopped_guest_dirties_nothing_and_says_so";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut machine = Qemu::builder(&root).memory_mib(MEMORY_MIB).guest(Guest::Boot).spawn()?;
    machine.wait_for_ticks(1)?;
    machine.stop()?;

    let (code, value, complaints) = plan(&machine, &["--intervals", "100ms"])?;

    assert_eq!(code, Some(0), "{complaints}");
    assert_eq!(value["inputs"]["dirty"]["curve"][0]["distinct_bytes"], 0);
    assert_eq!(value["forecast"]["rounds"]["expected"], 1.0);
    let assumed = value["assumed"].to_string();
    assert!(assumed.contains("paused"), "{assumed}");
    Ok(())
}

#[test]
fn plan_without_a_known_bandwidth_asks_for_it() -> Result<(), Failure> {
    let test = "plan_without_a_known_bandwidth_asks_for_it";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut machine = Qemu::builder(&root).memory_mib(MEMORY_MIB).spawn()?;
    machine.execute("migrate-set-parameters", serde_json::json!({ "max-bandwidth": 0 }))?;

    let (code, _, complaints) = plan(&machine, &[])?;

    assert_eq!(code, Some(2), "{complaints}");
    assert!(complaints.contains("--bandwidth"), "{complaints}");
    Ok(())
}

#[test]
fn plan_for_a_destination_is_refused() -> Result<(), Failure> {
    let test = "plan_for_a_destination_is_refused";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let machine = Qemu::builder(&root).memory_mib(MEMORY_MIB).incoming_defer().spawn()?;

    let (code, _, complaints) = plan(&machine, &[])?;

    assert_eq!(code, Some(1));
    assert!(complaints.contains("the QMP socket of the source"), "{complaints}");
    Ok(())
}
