//! Tests the monitor with `rdma:`: addresses, settings, and statistics.

use serde_json::{Value, json};
use sterna::{Address, IncomingRdmaStatistics, RdmaStatistics, Status};
use sterna_qmp::migration::rdma::from_query;

use super::support::{ClientExt, Monitor};

const SOURCE: RdmaStatistics = RdmaStatistics {
    writes: 4500,
    written_bytes: 5 << 30,
    in_flight_bytes: 3 << 20,
    registrations: 12,
    pinned_bytes: 2 << 30,
    windows: 11,
    destination_pinned_bytes: 1 << 30,
    exchanges: 16,
    receiver_not_ready: 1,
};
const DESTINATION: IncomingRdmaStatistics =
    IncomingRdmaStatistics { registrations: 11, pinned_bytes: 1 << 30, commands: 17, zero_ranges: 6 };

#[test]
fn destination_says_where_it_listens_in_the_form_that_channels_take() {
    let (monitor, mut client) = Monitor::waiting(true).client_of();

    client.ok("migrate-incoming", json!({"uri": "rdma:[fd09::1]:4444"}));

    let address = json!({"transport": "rdma", "host": "fd09::1", "port": "4444"});
    assert_eq!(
        client.ok("query-migrate", Value::Null),
        json!({"status": "setup", "x-sterna-address": address})
    );
    assert!(client.human("info migrate").unwrap().contains("fd09::1"));
    let (source, mut other) = Monitor::running().client_of();
    other.ok("migrate", json!({"channels": [{"channel-type": "main", "addr": address}]}));
    assert_eq!(source.engine.outgoing().address, monitor.engine.incoming().address);
    assert_eq!(source.engine.outgoing().address, Address::Rdma { host: "fd09::1".into(), port: 4444 });
}

#[test]
fn what_rdma_did_at_the_source_is_shown_and_read_again() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", json!({"uri": "rdma:h:4444"}));
    monitor.engine.outgoing().set(Status::Active);
    assert_eq!(client.ok("query-migrate", Value::Null).get("x-sterna-rdma"), None);
    assert!(!client.human("info migrate").unwrap().contains("RDMA"));

    *monitor.engine.outgoing().rdma.lock().unwrap() = Some(SOURCE);

    let info = client.ok("query-migrate", Value::Null);
    assert_eq!(
        info["x-sterna-rdma"],
        json!({"writes": 4500, "written-bytes": 5u64 << 30, "in-flight-bytes": 3 << 20, "registrations": 12,
            "pinned-bytes": 2u64 << 30, "windows": 11, "destination-pinned-bytes": 1 << 30, "exchanges": 16,
            "receiver-not-ready": 1})
    );
    assert_eq!(from_query(&info), Some(SOURCE));
    let shown = client.human("info migrate").unwrap();
    for part in [
        "RDMA info:",
        "count=4500, written=5 GiB, in_flight=3 MiB",
        "registrations=12, pinned=2 GiB",
        "windows=11, pinned=1 GiB",
        "exchanges=16, receiver_not_ready=1",
    ] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
}

#[test]
fn what_rdma_did_at_the_destination_is_shown() {
    let (monitor, mut client) = Monitor::waiting(true).client_of();
    client.ok("migrate-incoming", json!({"uri": "rdma:h:4444"}));
    assert!(!client.human("info migrate").unwrap().contains("RDMA info"));

    *monitor.engine.incoming().incoming_rdma.lock().unwrap() = Some(DESTINATION);

    assert_eq!(
        client.ok("query-migrate", Value::Null)["x-sterna-rdma"],
        json!({"registrations": 11, "pinned-bytes": 1 << 30, "commands": 17, "zero-ranges": 6})
    );
    let shown = client.human("info migrate").unwrap();
    for part in ["RDMA info:", "registrations=11, pinned=1 GiB", "all=17, zero_ranges=6"] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
}

#[test]
fn parameters_of_rdma_say_so_take_sizes_and_are_frozen_on_the_human_monitor() {
    let (monitor, mut client) = Monitor::running().client_of();
    for line in ["x-rdma-chunk-size 64M", "x-sterna-rdma-pinned-limit 1G"] {
        assert_eq!(client.human(&format!("migrate_set_parameter {line}")).unwrap(), "", "{line}");
    }
    for line in ["x-rdma-chunk-size 512K", "x-sterna-rdma-pinned-limit 1000K"] {
        let text = client.human(&format!("migrate_set_parameter {line}")).unwrap();
        assert!(text.starts_with("Error: "), "{line}: {text}");
    }
    let shown = client.human("info migrate_parameters").unwrap();
    assert!(shown.contains("x-rdma-chunk-size: 67108864 bytes (only for rdma:)\r\n"), "{shown}");
    assert!(shown.contains("x-sterna-rdma-pinned-limit: 1073741824 bytes (only for rdma:)\r\n"), "{shown}");
    assert_eq!(shown.matches("only for").count(), 2, "{shown}");

    client.ok("migrate", json!({"uri": "rdma:h:4444"}));
    monitor.engine.outgoing().set(Status::Active);

    for line in ["x-rdma-chunk-size 2M", "x-sterna-rdma-pinned-limit 0"] {
        let text = client.human(&format!("migrate_set_parameter {line}")).unwrap();
        assert!(text.contains("cannot change during a migration"), "{line}: {text}");
    }
    assert_eq!(client.human("info migrate_parameters").unwrap(), shown);
}
