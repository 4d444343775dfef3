//! Tests capabilities: supported ones, refused ones, and combinations.

use serde_json::{Value, json};
use sterna::Status;
use sterna_qmp::migration::{CAPABILITIES, CapabilitySet, CapabilitySpec, Support};

use super::support::{ClientExt, Monitor};

fn on(names: &[&str]) -> Vec<(String, bool)> {
    names.iter().map(|name| ((*name).to_owned(), true)).collect()
}

#[test]
fn every_capability_is_taken_if_it_works_and_refused_if_missing() {
    for CapabilitySpec { name, support, .. } in CAPABILITIES {
        // `postcopy-preempt` needs `postcopy-ram`.
        let names = if *name == "postcopy-preempt" { vec!["postcopy-ram", name] } else { vec![*name] };
        let result = CapabilitySet::default().with(&on(&names));
        match support {
            Support::Works | Support::Harmless => assert!(result.unwrap().get(name)),
            Support::Missing => assert!(result.unwrap_err().desc.contains(name)),
        }
        // Switching off a capability that is off always succeeds. Only `return-path` cannot be off with
        // `switchover-ack`.
        CapabilitySet::default().with(&[((*name).to_owned(), false)]).unwrap();
    }
}

#[test]
fn defaults_are_off_but_the_return_path() {
    let (_monitor, mut client) = Monitor::running().client_of();
    let shown = client.ok("query-migrate-capabilities", Value::Null);
    for entry in shown.as_array().unwrap() {
        assert_eq!(entry["state"], entry["capability"] == "return-path", "{entry}");
    }
    assert_eq!(shown.as_array().unwrap().len(), CAPABILITIES.len());
}

#[test]
fn combinations_that_qemu_refuses_are_refused() {
    let without_return_path = CapabilitySet::default().with(&[("return-path".into(), false)]).unwrap();
    for (set, names, words) in [
        (&without_return_path, &["switchover-ack"][..], ["switchover-ack", "return-path"]),
        (&without_return_path, &["x-colo"], ["x-colo", "return-path"]),
        (&CapabilitySet::default(), &["postcopy-preempt"], ["postcopy-preempt", "postcopy-ram"]),
        // With `x-colo` these two are allowed together: see below.
        (&CapabilitySet::default(), &["multifd", "xbzrle"], ["multifd", "xbzrle"]),
        (&CapabilitySet::default(), &["zero-copy-send"], ["zero-copy-send", "multifd"]),
        (&CapabilitySet::default(), &["auto-converge", "dirty-limit"], ["auto-converge", "dirty-limit"]),
        (&CapabilitySet::default(), &["mapped-ram", "xbzrle"], ["mapped-ram", "xbzrle"]),
        (&CapabilitySet::default(), &["mapped-ram", "postcopy-ram"], ["mapped-ram", "postcopy-ram"]),
        (
            &CapabilitySet::default(),
            &["postcopy-ram", "x-ignore-shared"],
            ["postcopy-ram", "x-ignore-shared"],
        ),
        (&without_return_path, &["background-snapshot", "multifd"], ["background-snapshot", "multifd"]),
    ] {
        let refusal = set.with(&on(names)).unwrap_err().desc;
        assert!(words.iter().all(|word| refusal.contains(word)), "{names:?}: {refusal}");
    }
}

#[test]
fn differences_go_over_channels_to_a_standby_alone() {
    let colo = CapabilitySet::default().with(&on(&["x-colo", "multifd", "xbzrle"])).unwrap();
    assert!(colo.get("xbzrle") && colo.get("multifd"));
    let refusal = colo.with(&[("x-colo".into(), false)]).unwrap_err().desc;
    assert!(refusal.contains("xbzrle") && refusal.contains("multifd"), "{refusal}");
}

#[test]
fn taking_the_return_path_from_switchover_ack_is_refused_and_changes_nothing() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.capability("switchover-ack", true).unwrap();
    assert!(client.capability("return-path", false).unwrap_err().contains("switchover-ack"));
    assert!(monitor.control.capabilities().get("return-path"));
}

#[test]
fn unknown_capability_and_malformed_lists_are_refused() {
    let (_monitor, mut client) = Monitor::running().client_of();
    assert!(client.capability("warp", true).unwrap_err().contains("does not accept value 'warp'"));
    for bad in [
        json!({"capabilities": 1}),
        json!({"capabilities": [1]}),
        json!({"capabilities": [{"capability": "events"}]}),
        json!({"capabilities": [{"state": true}]}),
        json!({"capabilities": [{"capability": "events", "state": 1}]}),
        json!({"capabilities": [{"capability": "events", "state": true, "more": 1}]}),
        json!({}),
    ] {
        client.refused("migrate-set-capabilities", bad);
    }
}

#[test]
fn capabilities_reach_the_engine() {
    let (monitor, mut client) = Monitor::running().client_of();
    for name in [
        "multifd",
        "mapped-ram",
        "switchover-ack",
        "pause-before-switchover",
        "late-block-activate",
        "rdma-pin-all",
    ] {
        client.capability(name, true).unwrap();
    }
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    let expected = sterna::Capabilities {
        multifd: true,
        mapped_ram: true,
        return_path: true,
        switchover_ack: true,
        auto_converge: false,
        dirty_limit: false,
        pause_before_switchover: true,
        rdma_pin_all: true,
        postcopy_ram: false,
        postcopy_preempt: false,
        postcopy_blocktime: false,
        xbzrle: false,
        unmanaged: true,
    };
    assert_eq!(monitor.engine.outgoing().capabilities, expected);
}

#[test]
fn postcopy_reaches_the_engine_and_starts_when_it_is_asked_for() {
    let (monitor, mut client) = Monitor::running().client_of();
    assert!(client.refused("migrate-start-postcopy", json!({})).contains("Enable postcopy"));
    for name in ["postcopy-ram", "postcopy-preempt", "postcopy-blocktime"] {
        client.capability(name, true).unwrap();
    }
    assert!(client.refused("migrate-start-postcopy", json!({})).contains("migrate"));
    client.set("max-postcopy-bandwidth", json!(5_000_000)).unwrap();
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    let migration = monitor.engine.outgoing();
    let capabilities = migration.capabilities;
    assert!(capabilities.postcopy_ram && capabilities.postcopy_preempt && capabilities.postcopy_blocktime);
    assert_eq!(migration.parameters.lock().unwrap().max_postcopy_bandwidth_bytes, 5_000_000);
    migration.set(Status::Active);
    client.ok("migrate-start-postcopy", json!({}));
    for (status, word) in [
        (Status::PostcopyDevice, "postcopy-device"),
        (Status::PostcopyActive, "postcopy-active"),
        (Status::PostcopyPaused, "postcopy-paused"),
        (Status::PostcopyRecover, "postcopy-recover"),
    ] {
        migration.set(status);
        let info = client.ok("query-migrate", json!({}));
        assert_eq!(info["status"], word);
        let says_why = info["error-desc"].as_str().is_some_and(|why| why.contains("broke"));
        assert_eq!(says_why, status == Status::PostcopyPaused, "{info}");
    }
    migration.set(Status::PostcopyPaused);
    client.ok("x-sterna-decide", json!({"guest": "destination"}));
}

#[test]
fn change_while_migrating_is_refused_but_for_events() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    monitor.engine.outgoing().set(Status::Active);
    assert!(client.capability("multifd", true).unwrap_err().contains("in progress"));
    client.capability("events", true).unwrap();
    client.capability("multifd", false).expect("no change");
}

#[test]
fn change_while_listening_says_defer() {
    let (_monitor, mut client) = Monitor::waiting(true).client_of();
    client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
    assert!(client.capability("multifd", true).unwrap_err().contains("-incoming defer"));
}

#[test]
fn hold_or_no_autostart_makes_a_managed_destination() {
    for (autostart, hold, unmanaged) in [(true, false, true), (false, false, false), (true, true, false)] {
        let (monitor, mut client) = Monitor::waiting(autostart).client_of();
        client.capability("x-sterna-hold", hold).unwrap();
        client.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
        assert_eq!(monitor.engine.incoming().capabilities.unmanaged, unmanaged);
    }
}
