//! Tests a management program's dialogue around a migration, command by command, with the events.

use serde_json::{Value, json};
use sterna::{Event, Statistics, Status};

use super::support::{ClientExt, LIMIT, Monitor};

#[test]
fn dialogue_of_a_managed_migration_goes_through() {
    let (source, mut src) = Monitor::running().client_of();
    let (destination, mut dst) = Monitor::waiting(false).client_of();

    // The program queries version and commands of both sides.
    for client in [&mut src, &mut dst] {
        assert_eq!(client.ok("query-version", Value::Null)["qemu"]["major"], 11);
        let commands = client.ok("query-commands", Value::Null);
        for needed in ["migrate", "migrate-incoming", "migrate-set-parameters", "query-migrate", "getfd"] {
            assert!(commands.as_array().unwrap().contains(&json!({"name": needed})), "{needed}");
        }
        let schema = client.ok("query-qmp-schema", Value::Null);
        let migrate = named(&schema, "migrate");
        let arguments = named(&schema, migrate["arg-type"].as_str().unwrap());
        assert!(arguments["members"].to_string().contains("channels"));
        client.ok("query-migrate-capabilities", Value::Null);
        client.ok("query-migrate-parameters", Value::Null);
        assert_eq!(client.ok("query-uuid", Value::Null)["UUID"], "00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(client.ok("query-name", Value::Null), json!({"name": "tern"}));
        assert_eq!(client.ok("query-cpus-fast", Value::Null)[1]["thread-id"], 102);
        assert_eq!(client.ok("query-machines", Value::Null)[0]["name"], "sterna-test");
        assert!(client.ok("query-kvm", Value::Null)["enabled"].is_boolean());
        assert_eq!(client.ok("query-memory-size-summary", Value::Null)["base-memory"], 1 << 20);
        let capabilities = json!({"capabilities": [
            {"capability": "xbzrle", "state": false},
            {"capability": "auto-converge", "state": false},
            {"capability": "events", "state": true},
            {"capability": "postcopy-ram", "state": false},
            {"capability": "late-block-activate", "state": true},
            {"capability": "pause-before-switchover", "state": true},
            {"capability": "multifd", "state": true},
            {"capability": "return-path", "state": true},
        ]});
        client.ok("migrate-set-capabilities", capabilities);
        client.ok(
            "migrate-set-parameters",
            json!({"multifd-channels": 4, "tls-creds": "", "tls-hostname": ""}),
        );
        assert_eq!(client.ok("query-migrate", Value::Null), json!({}), "never started");
    }

    // The destination listens, and stays in `inmigrate`.
    dst.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:49152", "exit-on-error": false}));
    assert_eq!(dst.ok("query-status", Value::Null), json!({"running": false, "status": "inmigrate"}));
    assert_eq!(
        dst.ok("query-migrate", Value::Null),
        json!({"status": "setup", "socket-address": [{"type": "inet", "host": "127.0.0.1", "port": "49152"}]})
    );

    // The source begins. Bandwidth and downtime limit are changed while the migration runs.
    src.ok("migrate", json!({"detach": true, "resume": false, "uri": "tcp:127.0.0.1:49152"}));
    let out = source.engine.outgoing();
    out.set(Status::Setup);
    out.set(Status::Active);
    out.tell(&Event::Round(1));
    assert_eq!(src.event("MIGRATION"), json!({"status": "setup"}));
    assert_eq!(src.event("MIGRATION"), json!({"status": "active"}));
    assert_eq!(src.event("MIGRATION_PASS"), json!({"pass": 1}));
    src.ok("migrate-set-parameters", json!({"max-bandwidth": 9_007_199_254_740_991u64}));
    src.ok("migrate-set-parameters", json!({"downtime-limit": 500}));
    let info = src.ok("query-migrate", Value::Null);
    assert_eq!(info["status"], "active");
    assert_eq!(info["ram"], expected_ram());
    assert_eq!((&info["total-time"], &info["setup-time"]), (&json!(1234), &json!(5)));
    assert_eq!(info["expected-downtime"], 66);
    assert!(info.get("downtime").is_none());
    assert_eq!(info["dirty-limit-throttle-time-per-round"], 1500);
    assert_eq!(info["dirty-limit-ring-full-time"], 20_000);

    // The switchover waits for the program's `migrate-continue`.
    source.vm.set_running(false);
    out.tell(&Event::Stopped);
    out.set(Status::PreSwitchover);
    assert_eq!(src.event("STOP"), Value::Null);
    assert_eq!(src.event("MIGRATION"), json!({"status": "pre-switchover"}));
    src.ok("query-block", Value::Null);
    src.ok("migrate-continue", json!({"state": "pre-switchover"}));
    assert_eq!(src.event("MIGRATION"), json!({"status": "device"}));
    let incoming = destination.engine.incoming();
    incoming.set(Status::Active);
    incoming.set(Status::Held);
    assert_eq!(dst.event("MIGRATION"), json!({"status": "active"}));
    assert_eq!(dst.event("MIGRATION"), json!({"status": "completed"}));
    out.set(Status::Completed);
    assert_eq!(src.event("MIGRATION"), json!({"status": "completed"}));
    let info = src.ok("query-migrate", Value::Null);
    assert_eq!((&info["status"], &info["downtime"]), (&json!("completed"), &json!(42)));
    assert!(info.get("expected-downtime").is_none());
    assert!(info.get("dirty-limit-ring-full-time").is_none());
    assert_eq!(src.ok("query-status", Value::Null), json!({"running": false, "status": "postmigrate"}));

    // The program starts the guest at the destination and ends the source.
    dst.ok("cont", Value::Null);
    assert_eq!(dst.event("MIGRATION"), json!({"status": "completed"}));
    assert_eq!(dst.event("RESUME"), Value::Null);
    assert_eq!(dst.ok("query-status", Value::Null), json!({"running": true, "status": "running"}));
    src.ok("quit", Value::Null);
    assert_eq!(src.event("SHUTDOWN"), json!({"guest": false, "reason": "host-qmp-quit"}));
    source.server.close();
    assert_eq!(*source.vm.quits.lock().unwrap(), 1);
}

fn named<'a>(schema: &'a Value, name: &str) -> &'a Value {
    schema.as_array().unwrap().iter().find(|entry| entry["name"] == name).expect(name)
}

fn expected_ram() -> Value {
    json!({
        "transferred": 500_000, "remaining": 8192, "total": 1 << 20, "duplicate": 100, "normal": 122,
        "normal-bytes": 122 * 4096, "dirty-pages-rate": 77, "mbps": 8.0, "dirty-sync-count": 3,
        "page-size": 4096, "multifd-bytes": 400_000, "pages-per-second": 244, "precopy-bytes": 490_000,
        "downtime-bytes": 10_000, "postcopy-bytes": 0, "dirty-sync-missed-zero-copy": 0,
        "postcopy-requests": 0,
    })
}

#[test]
fn parts_of_the_vm_are_listed_as_a_tree() {
    let (_monitor, mut client) = Monitor::running().client_of();
    client.ok("object-add", json!({"qom-type": "authz-simple", "id": "az", "identity": "x"}));

    let root = client.ok("qom-list", json!({"path": "/"}));
    let machine = client.ok("qom-get", json!({"path": "/machine", "property": "type"}));

    let kind = format!("child<{}>", machine.as_str().unwrap());
    assert!(machine.as_str().unwrap().ends_with("-machine"), "{machine}");
    assert_eq!(
        root,
        json!([{"name": "type", "type": "string"}, {"name": "objects", "type": "child<container>"},
            {"name": "machine", "type": kind}])
    );
    assert_eq!(
        client.ok("qom-list", json!({"path": "/objects"})),
        json!([{"name": "type", "type": "string"}, {"name": "az", "type": "child<authz-simple>"}])
    );
    assert_eq!(client.ok("qom-get", json!({"path": "objects", "property": "az"})), "/objects/az");
    assert_eq!(client.refused("qom-list", json!({"path": "/nope"})), "Device '/nope' not found");
    let refusal = client.refused("qom-get", json!({"path": "/objects/az", "property": "nope"}));
    assert_eq!(refusal, "Property 'authz-simple.nope' not found");
}

#[test]
fn expected_downtime_is_the_limit_before_anything_else_is_expected() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate-set-parameters", json!({"downtime-limit": 250}));
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    monitor.engine.outgoing().set(Status::Active);
    monitor.engine.outgoing().forget_expectation();

    assert_eq!(client.ok("query-migrate", Value::Null)["expected-downtime"], 250);
}

#[test]
fn failed_migration_shows_its_reason() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    *monitor.engine.outgoing().error.lock().unwrap() = Some("the peer closed".into());
    monitor.engine.outgoing().set(Status::Failed);
    let info = client.ok("query-migrate", Value::Null);
    assert_eq!((&info["status"], &info["error-desc"]), (&json!("failed"), &json!("the peer closed")));
}

#[test]
fn statistics_come_back_as_the_engines_types() {
    let (monitor, mut client) = Monitor::running().client_of();
    let none = json!({"outgoing": null, "incoming": null});
    assert_eq!(client.ok("x-sterna-migration-statistics", Value::Null), none);
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    let answer = client.ok("x-sterna-migration-statistics", Value::Null);
    let typed: Statistics = serde_json::from_value(answer["outgoing"].clone()).unwrap();
    assert_eq!(typed, monitor.control.outgoing().unwrap().statistics());
}

#[test]
fn migration_events_come_only_with_the_capability() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    let out = monitor.engine.outgoing();
    out.set(Status::Active);
    out.tell(&Event::Round(1));
    out.tell(&Event::Stopped);
    client.event("STOP");
    client.capability("events", true).unwrap();
    out.tell(&Event::Round(2));
    assert_eq!(client.event("MIGRATION_PASS"), json!({"pass": 2}));
}

#[test]
fn stop_and_cont_tell_every_client_once() {
    let (monitor, mut client) = Monitor::running().client_of();
    let mut other = monitor.client();
    for (command, event, running) in [("stop", "STOP", false), ("cont", "RESUME", true)] {
        client.ok(command, Value::Null);
        client.ok(command, Value::Null);
        assert_eq!(client.ok("query-status", Value::Null)["running"], running);
        client.event(event);
        let seen = other.next_event(LIMIT).unwrap().unwrap();
        assert_eq!(seen.name, event);
        assert!(seen.timestamp.as_secs() > 1_600_000_000, "a time of day");
    }
}
