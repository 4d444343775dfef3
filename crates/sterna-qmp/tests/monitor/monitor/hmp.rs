//! Tests the human monitor: suffixes, output, and errors as output.

use serde_json::{Value, json};
use sterna::Status;
use sterna_qmp::migration::{parse_number, parse_size};

use super::support::{ClientExt, Monitor};

#[test]
fn sizes_take_qemus_suffixes() {
    for (text, unit, expected) in [
        ("0", 1, Some(0)),
        ("64", 1, Some(64)),
        ("64", 1 << 20, Some(64 << 20)),
        ("64B", 1 << 20, Some(64)),
        ("64k", 1, Some(64 << 10)),
        ("64K", 1, Some(64 << 10)),
        ("64M", 1, Some(64 << 20)),
        ("2G", 1 << 20, Some(2 << 30)),
        ("3T", 1, Some(3 << 40)),
        ("4P", 1, Some(4 << 50)),
        ("15E", 1, Some(15 << 60)),
        ("1.5G", 1, Some(3 << 29)),
        ("0.5", 1 << 20, Some(1 << 19)),
        ("0x100", 1, Some(256)),
        ("16E", 1, None),
        ("1.5", 1, None),
        ("1.5B", 1, None),
        ("0x10k", 1, None),
        ("-1", 1, None),
        ("", 1, None),
        ("M", 1, None),
        (".5M", 1, None),
        ("1.M", 1, None),
        ("1..5M", 1, None),
        ("1MM", 1, None),
        ("1 M", 1, None),
        ("1Z", 1, None),
        ("1é", 1, None),
        ("18446744073709551616", 1, None),
        ("18446744073709551615", 1, Some(u64::MAX)),
    ] {
        assert_eq!(parse_size(text, unit), expected, "{text} in {unit}");
    }
    assert_eq!(parse_number("0x1F"), Some(31));
    assert_eq!(parse_number("12k"), None);
}

#[test]
fn set_parameter_has_the_human_units() {
    let (_monitor, mut client) = Monitor::running().client_of();
    for (line, name, expected) in [
        ("max-bandwidth 32", "max-bandwidth", json!(32 << 20)),
        ("max-bandwidth 1500K", "max-bandwidth", json!(1500 << 10)),
        ("max-bandwidth 1000B", "max-bandwidth", json!(1000)),
        ("avail-switchover-bandwidth 1", "avail-switchover-bandwidth", json!(1 << 20)),
        ("max-postcopy-bandwidth 5000", "max-postcopy-bandwidth", json!(5000)),
        ("xbzrle-cache-size 128M", "xbzrle-cache-size", json!(128 << 20)),
        ("x-rdma-chunk-size 4M", "x-rdma-chunk-size", json!(4 << 20)),
        ("x-rdma-chunk-size 1048576", "x-rdma-chunk-size", json!(1 << 20)),
        ("downtime-limit 50", "downtime-limit", json!(50)),
        ("multifd-channels 8", "multifd-channels", json!(8)),
        ("multifd-compression zstd", "multifd-compression", json!("zstd")),
        ("cpu-throttle-tailslow on", "cpu-throttle-tailslow", json!(true)),
        ("zero-page-detection legacy", "zero-page-detection", json!("legacy")),
    ] {
        assert_eq!(client.human(&format!("migrate_set_parameter {line}")).unwrap(), "", "{line}");
        assert_eq!(client.ok("query-migrate-parameters", Value::Null)[name], expected, "{line}");
    }
    for line in [
        "max-bandwidth fast",
        "multifd-channels 0",
        "multifd-channels 2k",
        "x-rdma-chunk-size 3M",
        "x-rdma-chunk-size 2G",
        "downtime-limit 2000001",
        "multifd-compression lz4",
        "cpu-throttle-tailslow maybe",
        "bogus 1",
    ] {
        let text = client.human(&format!("migrate_set_parameter {line}")).unwrap();
        assert!(text.starts_with("Error: "), "{line}: {text}");
    }
}

#[test]
fn info_texts_show_what_was_set() {
    let (monitor, mut client) = Monitor::running().client_of();
    assert_eq!(client.human("info status").unwrap(), "VM status: running\r\n");
    client.human("migrate_set_capability multifd on").unwrap();
    let capabilities = client.human("info migrate_capabilities").unwrap();
    assert!(capabilities.contains("multifd: on\r\n") && capabilities.contains("xbzrle: off\r\n"));
    let parameters = client.human("info migrate_parameters").unwrap();
    assert!(parameters.contains("max-bandwidth: 134217728 bytes/second\r\n"), "{parameters}");
    assert!(parameters.contains("downtime-limit: 300 ms\r\n") && parameters.contains("tls-creds: ''\r\n"));
    assert!(client.human("info migrate").unwrap().contains("No migration"));

    assert_eq!(client.human("migrate -d tcp:127.0.0.1:1").unwrap(), "");
    monitor.engine.outgoing().set(Status::Active);
    let info = client.human("info migrate").unwrap();
    for part in ["active", "total=1234", "exp_down=66", "8.00", "normal=122, zero=100", "dirty_syncs=3"] {
        assert!(info.contains(part), "{part} in {info}");
    }
}

#[test]
fn commands_do_what_their_qmp_twins_do() {
    let (monitor, mut client) = Monitor::running().client_of();
    assert_eq!(client.human("stop").unwrap(), "");
    client.event("STOP");
    assert_eq!(client.human("info status").unwrap(), "VM status: paused\r\n");
    assert_eq!(client.human("cont").unwrap(), "");
    client.event("RESUME");
    assert!(client.human("migrate tcp:127.0.0.1:1").unwrap().contains("continuing detached"));
    assert!(client.human("migrate -d tcp:127.0.0.1:1").unwrap().contains("in progress"));
    assert_eq!(client.human("migrate_cancel").unwrap(), "");
    assert_eq!(client.human("migrate_cancel").unwrap(), "");
    assert!(client.human("migrate_set_capability background-snapshot on").unwrap().starts_with("Error: "));
    assert!(client.human("migrate_set_capability events perhaps").unwrap().starts_with("Error: "));
    assert!(client.human("migrate").unwrap().starts_with("Error: "));
    assert!(client.human("migrate_set_parameter downtime-limit").unwrap().contains("number of arguments"));
    assert!(client.human("device_add x\u{7}").unwrap().starts_with("Error: unknown command: 'device_add x'"));
    assert_eq!(client.human("").unwrap(), "");
    assert_eq!(client.human("quit").unwrap(), "");
    client.event("SHUTDOWN");
    drop(monitor.server);
    assert_eq!(*monitor.vm.quits.lock().unwrap(), 1);
}
