//! Tests `migrate` with `resume`, `migrate-recover` and `migrate-pause`.

use serde_json::json;
use sterna::Status;

use super::support::{ClientExt, Monitor};

const SOMEWHERE: &str = "tcp:127.0.0.1:49152";
const ELSEWHERE: &str = "tcp:127.0.0.1:49153";

#[test]
fn paused_source_goes_on_where_it_is_told_to_and_no_other_does() {
    let (monitor, mut client) = Monitor::running().client_of();
    let resume = json!({"uri": ELSEWHERE, "resume": true});
    assert!(client.refused("migrate", resume.clone()).contains("no paused migration"));
    client.ok("migrate", json!({"uri": SOMEWHERE}));
    let migration = monitor.engine.outgoing();
    for status in [Status::Active, Status::PostcopyActive, Status::PostcopyRecover] {
        migration.set(status);
        let refusal = client.refused("migrate", resume.clone());
        assert!(refusal.contains("postcopy-paused"), "{refusal}");
    }
    migration.set(Status::PostcopyPaused);
    client.ok("migrate", resume);
    assert_eq!(*migration.goes_on_at.lock().unwrap(), Some(ELSEWHERE.parse().unwrap()));
    assert!(client.refused("migrate-recover", json!({"uri": ELSEWHERE})).contains("at the destination"));
    let line = format!("migrate -r -d {SOMEWHERE}");
    let said = client.ok("human-monitor-command", json!({"command-line": line}));
    assert_eq!(said, json!(""));
    assert_eq!(*migration.goes_on_at.lock().unwrap(), Some(SOMEWHERE.parse().unwrap()));
}

#[test]
fn paused_destination_listens_anew_and_no_other_does() {
    let (monitor, mut client) = Monitor::waiting(true).client_of();
    let recover = json!({"uri": ELSEWHERE});
    client.ok("migrate-incoming", json!({"uri": SOMEWHERE}));
    let migration = monitor.engine.incoming();
    for status in [Status::Setup, Status::PostcopyActive, Status::PostcopyRecover, Status::Completed] {
        migration.set(status);
        let refusal = client.refused("migrate-recover", recover.clone());
        assert!(refusal.contains("can only be run when postcopy is paused"), "{refusal}");
    }
    migration.set(Status::PostcopyPaused);
    assert!(client.refused("migrate-recover", json!({})).contains("'uri'"));
    client.ok("migrate-recover", recover);
    assert_eq!(*migration.goes_on_at.lock().unwrap(), Some(ELSEWHERE.parse().unwrap()));
    let line = format!("migrate_recover {SOMEWHERE}");
    assert_eq!(client.ok("human-monitor-command", json!({"command-line": line})), json!(""));
    assert_eq!(*migration.goes_on_at.lock().unwrap(), Some(SOMEWHERE.parse().unwrap()));
}

#[test]
fn either_side_is_paused_while_pages_follow_a_guest() {
    let nothing = json!({});
    let only = "only supported during postcopy-active or postcopy-recover";
    let (monitor, mut client) = Monitor::running().client_of();
    assert!(client.refused("migrate-pause", nothing.clone()).contains(only));
    client.ok("migrate", json!({"uri": SOMEWHERE}));
    let migration = monitor.engine.outgoing();
    for status in [Status::Active, Status::Device, Status::Completed] {
        migration.set(status);
        let refusal = client.refused("migrate-pause", nothing.clone());
        assert!(refusal.contains(only), "{status:?}: {refusal}");
    }
    for status in [Status::PostcopyActive, Status::PostcopyRecover] {
        migration.set(status);
        assert_eq!(client.ok("migrate-pause", nothing.clone()), nothing);
    }
    let said = client.ok("human-monitor-command", json!({"command-line": "migrate_pause"}));
    assert_eq!((said, *migration.pauses.lock().unwrap()), (json!(""), 3));

    let (monitor, mut client) = Monitor::waiting(true).client_of();
    client.ok("migrate-incoming", json!({"uri": SOMEWHERE}));
    let migration = monitor.engine.incoming();
    for status in [Status::Setup, Status::Active, Status::PostcopyPaused, Status::Completed] {
        migration.set(status);
        let refusal = client.refused("migrate-pause", nothing.clone());
        assert!(refusal.contains(only), "{status:?}: {refusal}");
    }
    migration.set(Status::PostcopyActive);
    client.ok("migrate-pause", nothing);
    assert_eq!(*migration.pauses.lock().unwrap(), 1);
}
