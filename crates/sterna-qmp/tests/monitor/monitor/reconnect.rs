//! Tests the events and the answer to `query-migrate` when a lost connection is replaced.

use std::time::Duration;

use serde_json::{Value, json};
use sterna::{Event, Reconnection, Status};

use super::support::{ClientExt, Monitor};

#[test]
fn loss_and_new_connection_are_events_and_fields_of_the_query() {
    let (monitor, mut client) = Monitor::running().client_of();
    let on = json!({"capabilities": [{"capability": "events", "state": true}]});
    client.ok("migrate-set-capabilities", on);
    client.ok("migrate-set-parameters", json!({"x-sterna-reconnect-window": 60_000}));
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:9"}));
    let migration = monitor.engine.outgoing();
    migration.set(Status::Active);
    assert_eq!(client.event("MIGRATION"), json!({"status": "active"}));
    assert_eq!(client.ok("query-migrate", Value::Null)["x-sterna-reconnect"], Value::Null);

    *migration.disconnected.lock().unwrap() = Some(Duration::from_millis(1500));
    migration.tell(&Event::ConnectionLost { why: "the cable".into() });
    assert_eq!(client.event("X_STERNA_CONNECTION_LOST"), json!({"reason": "the cable"}));
    let info = client.ok("query-migrate", Value::Null);
    let shown =
        json!({"reconnections": 0, "resent-bytes": 0, "time": 0, "disconnected": 1500, "remaining": 58_500});
    assert_eq!((&info["status"], &info["x-sterna-reconnect"]), (&json!("active"), &shown));

    *migration.disconnected.lock().unwrap() = None;
    let took = Duration::from_millis(2300);
    let reconnection = Reconnection { took, resent_bytes: 8192, ..Reconnection::default() };
    *migration.reconnections.lock().unwrap() = vec![reconnection.clone(), reconnection];
    migration.tell(&Event::Reconnected { took, resent_bytes: 8192 });
    assert_eq!(client.event("X_STERNA_RECONNECTED"), json!({"time": 2300, "resent-bytes": 8192}));
    let schema = client.ok("query-qmp-schema", Value::Null);
    for event in ["X_STERNA_CONNECTION_LOST", "X_STERNA_RECONNECTED"] {
        let is_it = |entity: &&Value| entity["name"] == event && entity["meta-type"] == "event";
        assert!(schema.as_array().unwrap().iter().find(is_it).is_some(), "{event} is in no schema");
    }
    let info = client.ok("query-migrate", Value::Null);
    let shown = json!({"reconnections": 2, "resent-bytes": 16_384, "time": 4600});
    assert_eq!(info["x-sterna-reconnect"], shown);
}
