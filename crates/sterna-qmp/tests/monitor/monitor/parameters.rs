//! Tests the limits of every parameter's range, that changes are all or nothing, and which parameters are frozen.

use std::time::Duration;

use serde_json::{Map, Value, json};
use sterna::{Compression, Status, ZeroPageDetection};
use sterna_qmp::migration::{Change, PARAMETERS, ParameterSet, Range, parameter};

use super::support::{ClientExt, Monitor};

/// (name, accepted values, refused values).
type Edges = (&'static str, Vec<Value>, Vec<Value>);

fn range(name: &'static str, least: u64, greatest: u64) -> Edges {
    let mut refused = vec![json!(-1), json!("1"), json!(1.5), Value::Null, json!(true)];
    if least > 0 {
        refused.push(json!(least - 1));
    }
    if greatest < u64::MAX {
        refused.push(json!(greatest + 1));
    }
    (name, vec![json!(least), json!(greatest)], refused)
}

fn words(name: &'static str, taken: &[&str]) -> Edges {
    let taken = taken.iter().map(|word| json!(word)).collect();
    (name, taken, vec![json!("bogus"), json!(""), json!(1), Value::Null])
}

/// The edges that are listed here, and for all other parameters those of their row in the table.
fn edges() -> Vec<Edges> {
    let known = known_edges();
    let others = PARAMETERS.iter().filter(|spec| !known.iter().any(|(name, ..)| *name == spec.name));
    let others: Vec<Edges> = others.map(|spec| edges_of(spec.name, spec.range)).collect();
    known.into_iter().chain(others).collect()
}

fn edges_of(name: &'static str, values: Range) -> Edges {
    match values {
        Range::Integer { least, greatest } => range(name, least, greatest),
        Range::PowerOfTwo { least, greatest } => {
            let (taken, refused) = (vec![json!(least), json!(greatest)], vec![json!(least + 1), json!(0)]);
            (name, taken, refused)
        }
        Range::Limit { least } => (name, vec![json!(0), json!(least)], vec![json!(least - 1), json!(-1)]),
        Range::Boolean => (name, vec![json!(true), json!(false)], vec![json!("on"), json!(1)]),
        Range::Word(taken) => words(name, taken),
        Range::Text => (name, vec![json!(""), json!("text"), Value::Null], vec![json!(1), json!("a\nb")]),
    }
}

fn known_edges() -> Vec<Edges> {
    vec![
        range("announce-initial", 0, 100_000),
        range("announce-max", 0, 100_000),
        range("announce-rounds", 0, 1000),
        range("announce-step", 1, 10_000),
        range("throttle-trigger-threshold", 1, 100),
        range("cpu-throttle-initial", 1, 99),
        range("cpu-throttle-increment", 1, 99),
        ("cpu-throttle-tailslow", vec![json!(true), json!(false)], vec![json!(1), json!("on")]),
        // The lower limit is the value of cpu-throttle-initial, 20.
        range("max-cpu-throttle", 20, 99),
        ("tls-creds", vec![json!(""), json!("tls0"), Value::Null], vec![json!("x".repeat(256)), json!(1)]),
        ("tls-hostname", vec![json!(""), json!("host"), Value::Null], vec![json!("a\nb"), json!(1)]),
        ("tls-authz", vec![json!(""), json!("authz"), Value::Null], vec![json!("a\u{0}"), json!(false)]),
        range("max-bandwidth", 0, u64::MAX),
        range("avail-switchover-bandwidth", 0, u64::MAX),
        range("downtime-limit", 0, 2_000_000),
        // With 0, a QEMU's main loop spins.
        range("x-checkpoint-delay", 1, u64::from(u32::MAX)),
        range("multifd-channels", 1, 255),
        words("multifd-compression", &["none", "zlib", "zstd"]),
        range("multifd-zlib-level", 0, 9),
        range("multifd-qatzip-level", 1, 9),
        range("multifd-zstd-level", 0, 20),
        ("xbzrle-cache-size", vec![json!(4096), json!(1 << 30)], vec![json!(2048), json!(4097), json!(0)]),
        range("max-postcopy-bandwidth", 0, u64::MAX),
        range("x-vcpu-dirty-limit-period", 1, 1000),
        range("vcpu-dirty-limit", 1, u64::MAX),
        (
            "mode",
            vec![json!("normal"), json!("cpr-transfer")],
            vec![json!("cpr-reboot"), json!("cpr-exec"), json!("x"), json!(0)],
        ),
        words("zero-page-detection", &["none", "legacy", "multifd"]),
        ("direct-io", vec![json!(false), json!(true)], vec![json!("off"), json!(1)]),
        (
            "x-rdma-chunk-size",
            vec![json!(1 << 20), json!(1 << 21), json!(1 << 30)],
            vec![
                json!(1 << 19),
                json!((1 << 20) + 1),
                json!(3 << 20),
                json!(1u64 << 31),
                json!(0),
                json!(-1),
            ],
        ),
        words("x-sterna-non-convergence", &["keep-going", "fail", "switchover", "postcopy"]),
        range("x-sterna-postcopy-after", 0, 86_400_000),
        range("x-sterna-postcopy-after-rounds", 0, u32::MAX.into()),
        ("x-sterna-replace-file", vec![json!(true), json!(false)], vec![json!("off")]),
        ("x-sterna-cpr-allow-root", vec![json!(false), json!(true)], vec![json!("on"), json!(1)]),
        words("x-sterna-status-question", &["auto", "operator"]),
        range("x-sterna-device-queue-size", 1 << 16, 1 << 40),
        range("x-sterna-checkpoint-buffer-size", 4096, 1 << 40),
        words("x-sterna-checkpoint-mode", &["interval", "output", "load"]),
        range("x-sterna-output-delay", 1, 3_600_000),
        range("x-sterna-checkpoint-overhead", 1, 90),
        range("x-sterna-checkpoints-in-flight", 1, 4),
        words("x-sterna-checkpoint-copy", &["auto", "copy", "copy-on-write"]),
        range("x-sterna-checkpoint-journal-size", 4096, 1 << 40),
        (
            "x-sterna-rdma-pinned-limit",
            vec![json!(0), json!(1 << 20), json!(64 << 20), json!(u64::MAX)],
            vec![json!(1), json!((1 << 20) - 1), json!(-1), json!("64M")],
        ),
        range("x-sterna-reconnect-window", 0, 3_600_000),
        range("x-sterna-setup-limit", 100, 3_600_000),
        range("x-sterna-stall-limit", 100, 3_600_000),
        range("x-sterna-prepare-limit", 100, 3_600_000),
        range("x-sterna-acknowledge-limit", 100, 3_600_000),
    ]
}

fn one(name: &str, value: &Value) -> Map<String, Value> {
    Map::from_iter([(name.to_owned(), value.clone())])
}

#[test]
fn every_parameter_at_its_edges_is_taken_and_beyond_is_refused() {
    for (name, taken, refused) in edges() {
        for value in taken {
            let mut set = ParameterSet::default();
            set.set(&one(name, &value), false).unwrap_or_else(|error| panic!("{name} = {value}: {error}"));
            let expected = if value.is_null() { json!("") } else { value };
            assert_eq!(set.get(name), Some(&expected));
        }
        for value in refused {
            let mut set = ParameterSet::default();
            let error = set.set(&one(name, &value), false).expect_err(&format!("{name} = {value}"));
            assert!(error.desc.contains(name), "{error} names {name}");
            assert_eq!(set, ParameterSet::default(), "{name} = {value} changed something");
        }
    }
}

#[test]
fn defaults_are_those_of_qemu_11() {
    let mut client = Monitor::running().client_of();
    let shown = client.1.ok("query-migrate-parameters", Value::Null);
    let expected = json!({
        "announce-initial": 50, "announce-max": 550, "announce-rounds": 5, "announce-step": 100,
        "throttle-trigger-threshold": 50, "cpu-throttle-initial": 20, "cpu-throttle-increment": 10,
        "cpu-throttle-tailslow": false, "max-cpu-throttle": 99, "tls-creds": "", "tls-hostname": "",
        "tls-authz": "", "max-bandwidth": 134_217_728, "avail-switchover-bandwidth": 0,
        "downtime-limit": 300, "x-checkpoint-delay": 20_000, "multifd-channels": 2,
        "multifd-compression": "none", "multifd-zlib-level": 1, "multifd-qatzip-level": 1,
        "multifd-zstd-level": 1, "xbzrle-cache-size": 67_108_864, "max-postcopy-bandwidth": 0,
        "x-vcpu-dirty-limit-period": 1000, "vcpu-dirty-limit": 1, "mode": "normal",
        "zero-page-detection": "multifd", "direct-io": false, "x-rdma-chunk-size": 1_048_576,
        "x-sterna-non-convergence": "keep-going", "x-sterna-replace-file": false,
        "x-sterna-postcopy-after": 0, "x-sterna-postcopy-after-rounds": 0, "x-sterna-cpr-allow-root": false,
        "x-sterna-status-question": "auto",
        "x-sterna-device-queue-size": 64 << 20, "x-sterna-checkpoint-buffer-size": 256 << 20,
        "x-sterna-checkpoint-mode": "interval", "x-sterna-output-delay": 10, "x-sterna-checkpoint-overhead": 10,
        "x-sterna-checkpoints-in-flight": 1, "x-sterna-checkpoint-copy": "auto",
        "x-sterna-checkpoint-journal-size": 1 << 30, "x-sterna-rdma-pinned-limit": 0, "x-sterna-reconnect-window": 0, "x-sterna-setup-limit": 30_000, "x-sterna-stall-limit": 30_000, "x-sterna-prepare-limit": 60_000,
        "x-sterna-acknowledge-limit": 30_000,
    });
    for (name, value) in shown.as_object().unwrap() {
        // Defaults of Sterna's later parameters are only in docs/qmp.md.
        if let Some(expected) =
            expected.get(name).or_else(|| (!name.starts_with("x-sterna-")).then_some(&Value::Null))
        {
            assert_eq!(value, expected, "{name}");
        }
    }
    assert!(expected.as_object().unwrap().keys().all(|name| shown.get(name).is_some()));
    // The library limits no bandwidth.
    let max_bandwidth_bytes = 128 << 20;
    let expected = sterna::Parameters { max_bandwidth_bytes, ..sterna::Parameters::default() };
    assert_eq!(ParameterSet::default().to_engine(), expected);
}

impl Monitor {
    /// A client, together with the monitor, so that the monitor is not dropped.
    pub fn client_of(self) -> (Self, sterna_qmp::Client) {
        let client = self.client();
        (self, client)
    }
}

#[test]
fn set_with_one_bad_value_changes_nothing() {
    let (_monitor, mut client) = Monitor::running().client_of();
    let before = client.ok("query-migrate-parameters", Value::Null);
    for bad in [
        json!({"downtime-limit": 500, "multifd-channels": 0}),
        json!({"downtime-limit": 500, "no-such": 1}),
        json!({"cpu-throttle-initial": 50, "max-cpu-throttle": 40}),
    ] {
        client.refused("migrate-set-parameters", bad);
        assert_eq!(client.ok("query-migrate-parameters", Value::Null), before);
    }
}

#[test]
fn unknown_parameter_is_unexpected() {
    let (_monitor, mut client) = Monitor::running().client_of();
    assert_eq!(
        client.set("compress-level", json!(1)).unwrap_err(),
        "Parameter 'compress-level' is unexpected"
    );
}

#[test]
fn every_parameter_reaches_the_engine() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok(
        "migrate-set-parameters",
        json!({
            "max-bandwidth": 7, "downtime-limit": 8, "avail-switchover-bandwidth": 9, "multifd-channels": 10,
            "multifd-compression": "zstd", "multifd-zlib-level": 3, "multifd-zstd-level": 4,
            "zero-page-detection": "legacy", "x-rdma-chunk-size": 2 << 20, "x-sterna-setup-limit": 101,
            "x-sterna-rdma-pinned-limit": 3 << 20, "x-sterna-reconnect-window": 105,
            "x-sterna-stall-limit": 102, "x-sterna-device-queue-size": 104 << 10, "x-sterna-prepare-limit": 103, "x-sterna-acknowledge-limit": 104,
            "direct-io": true, "x-sterna-replace-file": true, "x-sterna-postcopy-after": 106,
            "x-sterna-postcopy-after-rounds": 107,
        }),
    );
    client.ok("migrate", json!({"uri": "unix:/nowhere"}));
    let parameters = monitor.engine.outgoing().parameters.lock().unwrap().clone();
    let expected = sterna::Parameters {
        tls: None,
        max_bandwidth_bytes: 7,
        downtime_limit: Duration::from_millis(8),
        reconnect_window: Duration::from_millis(105),
        postcopy_after: Duration::from_millis(106),
        postcopy_after_rounds: 107,
        avail_switchover_bandwidth_bytes: 9,
        multifd_channels: 10,
        multifd_compression: Compression::Zstd,
        multifd_zlib_level: 3,
        multifd_zstd_level: 4,
        zero_page_detection: ZeroPageDetection::Legacy,
        direct_io: sterna::Direct::Wanted,
        replace_file: true,
        max_queued_stream_bytes: 104 << 10,
        rdma: sterna::RdmaParameters {
            chunk: sterna::ChunkSize::new(2 << 20).unwrap(),
            pinned_limit_bytes: Some(3 << 20),
            ..sterna::RdmaParameters::default()
        },
        limits: sterna::WaitLimits {
            setup: Duration::from_millis(101),
            stall: Duration::from_millis(102),
            switchover: sterna::WaitLimits::default().switchover,
            prepare: Duration::from_millis(103),
            acknowledge: Duration::from_millis(104),
            ..sterna::WaitLimits::default()
        },
        ..sterna::Parameters::default()
    };
    assert_eq!(parameters, expected);
}

#[test]
fn set_while_migrating_takes_live_ones_and_refuses_frozen_ones() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    monitor.engine.outgoing().set(Status::Active);
    client.set("max-bandwidth", json!(1000)).unwrap();
    client.set("downtime-limit", json!(1)).unwrap();
    client.set("avail-switchover-bandwidth", json!(2000)).unwrap();
    let running = monitor.engine.outgoing().parameters.lock().unwrap().clone();
    assert_eq!(running.max_bandwidth_bytes, 1000);
    assert_eq!(running.downtime_limit, Duration::from_millis(1));
    assert_eq!(running.avail_switchover_bandwidth_bytes, 2000);
    for (name, value) in [
        ("multifd-channels", json!(3)),
        ("multifd-compression", json!("zlib")),
        ("multifd-zlib-level", json!(2)),
        ("multifd-zstd-level", json!(2)),
        ("zero-page-detection", json!("none")),
        ("x-rdma-chunk-size", json!(2 << 20)),
        ("x-sterna-rdma-pinned-limit", json!(2 << 20)),
    ] {
        let refusal = client.set(name, value.clone()).unwrap_err();
        assert!(refusal.contains("migrate_cancel"), "{refusal}");
        client
            .set(name, ParameterSet::default().get(name).unwrap().clone())
            .expect("its own value is no change");
    }
    client.ok("migrate_cancel", Value::Null);
    client.set("x-rdma-chunk-size", json!(2 << 20)).unwrap();
    client.set("multifd-channels", json!(3)).unwrap();
}

/// Compares the table with the parameters that the engine applies to a running migration.
#[test]
fn parameter_is_live_if_and_only_if_the_engine_follows_it() {
    for (name, taken, _) in edges() {
        let spec = parameter(name).unwrap();
        let with = |value: &Value| {
            let mut set = ParameterSet::default();
            set.set(&one(name, value), false).unwrap();
            set.to_engine()
        };
        let running = ParameterSet::default().to_engine();
        let changed = taken.iter().map(with).find(|changed| *changed != running);
        // The other parameters belong to the monitor only.
        let Some(changed) = changed else { continue };
        let mut followed = running;
        followed.take_live(&changed);
        assert_eq!(followed == changed, spec.change == Change::Live, "{name}");
    }
}

#[test]
fn table_ranges_hold_their_own_defaults() {
    for spec in PARAMETERS {
        spec.check(&spec.default_value()).unwrap_or_else(|error| panic!("{error}"));
        if let Range::PowerOfTwo { least, greatest } = spec.range {
            assert!(least.is_power_of_two() && greatest.is_power_of_two());
        }
    }
}
