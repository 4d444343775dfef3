//! Tests measurements of the dirty rate, and limits of vCPUs' dirty rates, against QEMU's answers.

use std::sync::Mutex;

use serde_json::{Value, json};
use sterna::{RunState, SourceVm, Throttle, VcpuDirtyRate, Vm, VmError};

use super::support::{ClientExt, FakeVm, Monitor};

/// Two vCPUs with a dirty ring: one dirties 5 MB/s, the other 7 MB/s.
#[derive(Default)]
pub struct Ring {
    limits: Mutex<[Option<u64>; 2]>,
}

impl Throttle for Ring {
    fn set_cpu_throttle(&self, _percent: u8) {}
    fn can_limit_dirty_rate(&self) -> bool {
        true
    }
    fn set_dirty_limit(&self, vcpu: Option<usize>, bytes_per_second: Option<u64>) -> Result<(), VmError> {
        let mut limits = self.limits.lock().unwrap();
        for (index, limit) in limits.iter_mut().enumerate() {
            if vcpu.is_none_or(|vcpu| vcpu == index) {
                *limit = bytes_per_second;
            }
        }
        Ok(())
    }
    fn vcpu_dirty_rates(&self) -> Vec<VcpuDirtyRate> {
        let limits = self.limits.lock().unwrap();
        let rate = |(rate, limit): (u64, &Option<u64>)| VcpuDirtyRate {
            rate_bytes: rate << 20,
            limit_bytes: *limit,
        };
        [5, 7].into_iter().zip(limits.iter()).map(rate).collect()
    }
}

fn with_ring() -> Monitor {
    let monitor = Monitor::running();
    assert!(monitor.vm.throttle.set(Ring::default()).is_ok());
    monitor
}

/// Waits for the end of a measurement.
fn measured(client: &mut sterna_qmp::Client) -> Value {
    loop {
        let answer = client.ok("query-dirty-rate", json!({"calc-time-unit": "millisecond"}));
        if answer["status"] != "measuring" {
            return answer;
        }
        std::thread::yield_now();
    }
}

fn calc(milliseconds: u64) -> Value {
    json!({"calc-time": milliseconds, "calc-time-unit": "millisecond"})
}

#[test]
fn calc_dirty_rate_counts_pages_and_answers_in_qemus_shape() {
    let (monitor, mut client) = Monitor::running().client_of();
    let before = client.ok("query-dirty-rate", Value::Null);
    assert_eq!((&before["status"], &before["calc-time-unit"]), (&json!("unstarted"), &json!("second")));
    assert!(before.get("dirty-rate").is_none());

    assert_eq!(client.ok("calc-dirty-rate", calc(200)), json!({}));
    let during = client.ok("query-dirty-rate", Value::Null);
    assert!(during["status"] == "measuring" || during["status"] == "measured", "{during}");
    // Pages are marked repeatedly, because the test does not know when the measurement arms them.
    let answer = loop {
        monitor.vm.write(0, 50);
        let answer = client.ok("query-dirty-rate", json!({"calc-time-unit": "millisecond"}));
        if answer["status"] != "measuring" {
            break answer;
        }
    };

    assert_eq!(answer["status"], "measured");
    assert_eq!(answer["mode"], "dirty-bitmap");
    assert_eq!((&answer["calc-time"], &answer["calc-time-unit"]), (&json!(200), &json!("millisecond")));
    assert_eq!(answer["x-sterna-measured"]["dirty-bytes"], 50 * 4096);
    assert!(answer["dirty-rate"].is_u64() && answer["start-time"].as_u64() > Some(1_600_000_000));
    assert!(answer.get("vcpu-dirty-rate").is_none(), "there is no ring");
    assert_eq!(client.ok("query-dirty-rate", Value::Null)["calc-time"], 0, "in whole seconds");
    let text = client.human("info dirty_rate").unwrap();
    assert!(text.starts_with("Status: measured\r\n") && text.contains("(MB/s)\r\n"), "{text}");
}

#[test]
fn calc_dirty_rate_with_wrong_arguments_is_refused_with_qemus_words() {
    let (_monitor, mut client) = Monitor::running().client_of();
    for (arguments, words) in [
        (json!({"calc-time": 61}), "out of range [50ms, 60000ms]"),
        (calc(49), "out of range"),
        (json!({"calc-time": -1}), "out of range"),
        (json!({"calc-time": 1, "calc-time-unit": "hour"}), "calc-time-unit"),
        (json!({"calc-time": 1, "mode": "guess"}), "'mode' does not accept value 'guess'"),
        (json!({"calc-time": 1, "mode": "dirty-ring"}), "mode dirty-ring is not enabled"),
        (json!({"calc-time": 1, "mode": "dirty-bitmap", "sample-pages": 512}), "only in page-sampling mode"),
        (json!({"calc-time": 1, "sample-pages": 1}), "out of range[128, 16384]"),
        (json!({}), "calc-time"),
    ] {
        let refusal = client.refused("calc-dirty-rate", arguments.clone());
        assert!(refusal.contains(words), "{arguments}: {refusal}");
    }
    assert_eq!(client.ok("query-dirty-rate", Value::Null)["status"], "unstarted");
    assert_eq!(client.human("calc_dirty_rate 0").unwrap(), "Incorrect period length specified!\r\n");
}

#[test]
fn migrate_ends_a_measurement_with_what_it_has_counted() {
    let (_monitor, mut client) = Monitor::running().client_of();
    client.ok("calc-dirty-rate", json!({"calc-time": 60}));
    let refusal = client.refused("calc-dirty-rate", calc(50));
    assert!(refusal.contains("already being measured"), "{refusal}");

    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));

    let answer = client.ok("query-dirty-rate", json!({"calc-time-unit": "millisecond"}));
    assert_eq!(answer["status"], "measured");
    let took = answer["calc-time"].as_u64().unwrap();
    assert!((50..60_000).contains(&took), "{answer}");
    let refusal = client.refused("calc-dirty-rate", calc(50));
    assert!(refusal.contains("query-migrate"), "{refusal}");
}

#[test]
fn migrate_that_is_refused_leaves_a_measurement_alone() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.ok("calc-dirty-rate", json!({"calc-time": 60}));
    *monitor.engine.refuses.lock().unwrap() = true;

    client.refused("migrate", json!({"uri": "tcp:127.0.0.1:1"}));

    assert_eq!(client.ok("query-dirty-rate", Value::Null)["status"], "measuring");
    *monitor.engine.refuses.lock().unwrap() = false;
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    assert_eq!(client.ok("query-dirty-rate", Value::Null)["status"], "measured");
}

#[test]
fn calc_dirty_rate_without_a_guest_is_refused() {
    let monitor = Monitor::waiting(true);
    let refusal = monitor.client().refused("calc-dirty-rate", calc(50));

    assert!(refusal.contains("waiting for an incoming migration"), "{refusal}");
}

#[test]
fn with_a_ring_each_vcpu_has_its_rate() {
    let (_monitor, mut client) = with_ring().client_of();
    let refusal = client.refused("calc-dirty-rate", json!({"calc-time": 1, "mode": "dirty-bitmap"}));
    assert!(refusal.contains("this VM has dirty-ring"), "{refusal}");

    client.ok("calc-dirty-rate", calc(50));
    let answer = measured(&mut client);

    assert_eq!(answer["mode"], "dirty-ring");
    assert_eq!(answer["vcpu-dirty-rate"], json!([{"id": 0, "dirty-rate": 5}, {"id": 1, "dirty-rate": 7}]));
    assert!(client.human("info dirty_rate").unwrap().contains("vcpu[1], Dirty rate: 7 (MB/s)"));
}

#[test]
fn vcpu_dirty_limits_are_set_shown_and_taken_back() {
    let (_monitor, mut client) = with_ring().client_of();
    assert_eq!(client.ok("query-vcpu-dirty-limit", Value::Null), json!([]));
    assert_eq!(client.human("info vcpu_dirty_limit").unwrap(), "Dirty page limit not enabled!\r\n");

    client.ok("set-vcpu-dirty-limit", json!({"dirty-rate": 3}));
    client.ok("set-vcpu-dirty-limit", json!({"dirty-rate": 4, "cpu-index": 1}));
    client.ok("cancel-vcpu-dirty-limit", json!({"cpu-index": 0}));

    let limits = client.ok("query-vcpu-dirty-limit", Value::Null);
    assert_eq!(limits, json!([{"cpu-index": 1, "limit-rate": 4, "current-rate": 7}]));
    assert_eq!(
        client.human("info vcpu_dirty_limit").unwrap(),
        "vcpu[1], limit rate 4 (MB/s), current rate 7 (MB/s)\r\n"
    );
    let refusal = client.refused("set-vcpu-dirty-limit", json!({"dirty-rate": 4, "cpu-index": 2}));
    assert!(refusal.contains("incorrect cpu index"), "{refusal}");
    assert!(client.refused("set-vcpu-dirty-limit", json!({"dirty-rate": 0})).contains("dirty-rate"));
    assert_eq!(client.human("cancel_vcpu_dirty_limit").unwrap(), "");
    assert_eq!(client.ok("query-vcpu-dirty-limit", Value::Null), json!([]));
}

#[test]
fn dirty_limits_without_a_ring_are_refused() {
    let (_monitor, mut client) = Monitor::running().client_of();

    assert!(client.refused("set-vcpu-dirty-limit", json!({"dirty-rate": 3})).contains("dirty-ring-size"));
    assert!(client.capability("dirty-limit", true).unwrap_err().contains("dirty-ring-size"));
    client.ok("cancel-vcpu-dirty-limit", Value::Null);
    assert_eq!(client.ok("query-vcpu-dirty-limit", Value::Null), json!([]));
    let (_monitor, mut client) = with_ring().client_of();
    client.capability("dirty-limit", true).unwrap();
    assert!(client.capability("auto-converge", true).unwrap_err().contains("not compatible"));
}

#[test]
fn throttling_reaches_the_engine_and_a_running_migration() {
    let (monitor, mut client) = Monitor::running().client_of();
    client.capability("auto-converge", true).unwrap();
    client.set("cpu-throttle-initial", json!(35)).unwrap();
    client.ok("migrate", json!({"uri": "tcp:127.0.0.1:1"}));
    let migration = monitor.engine.outgoing();
    assert!(migration.capabilities.auto_converge);
    assert_eq!(migration.parameters.lock().unwrap().cpu_throttle_initial, 35);

    client.set("max-cpu-throttle", json!(60)).unwrap();
    client.set("x-sterna-non-convergence", json!("fail")).unwrap();

    let running = migration.parameters.lock().unwrap().clone();
    assert_eq!((running.max_cpu_throttle, running.non_convergence), (60, sterna::NonConvergence::Fail));
    client.set("x-sterna-non-convergence", json!("postcopy")).unwrap();
    let running = migration.parameters.lock().unwrap().clone();
    assert_eq!(running.non_convergence, sterna::NonConvergence::Postcopy);
}

#[test]
fn measuring_leaves_the_guest_as_it_was() {
    let monitor = Monitor::running();
    let vm: &FakeVm = &monitor.vm;
    let mut client = monitor.client();

    client.ok("calc-dirty-rate", calc(50));
    measured(&mut client);

    assert_eq!(vm.run_state(), RunState::Running);
    assert!(vm.ram().claim_tracking().is_some());
}
