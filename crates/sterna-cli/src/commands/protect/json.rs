//! The output of `sterna protect --json`, in the same form for a QEMU and for a Sterna VM. Times are in
//! seconds; `null` means unknown.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use sterna_drive::protect::{ProtectionEnd, ProtectionStatistics};

use super::words;

/// The line about a running protection.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    #[serde(flatten)]
    schema: Schema,
    state: String,
    checkpoint: u64,
    checkpoints_per_second: Option<f64>,
    checkpoint_age: Option<f64>,
    guest_stopped: Option<bool>,
    pauses: u64,
    pause_p50: Option<f64>,
    pause_p99: Option<f64>,
    output_delay: Option<f64>,
    output_delay_p50: Option<f64>,
    output_delay_p99: Option<f64>,
    output_waiting_packets: Option<u64>,
    output_waiting_bytes: Option<u64>,
    output_released_packets: Option<u64>,
    output_dropped_packets: Option<u64>,
    stream_bytes: u64,
    /// Bytes of the checkpoint that QEMU has completed and the standby has not received in full.
    kept_bytes: Option<u64>,
    age: f64,
    lost_because: Option<String>,
    trouble: Option<String>,
}

/// The line about a protection that has ended.
#[derive(Debug, Serialize)]
pub(super) struct End {
    #[serde(flatten)]
    schema: Schema,
    state: String,
    runs_here: bool,
    checkpoint: u64,
    output_released_packets: Option<u64>,
    stream_bytes: u64,
    age: f64,
    left: Vec<String>,
    lost_because: Option<String>,
}

#[derive(Debug, Serialize)]
struct Schema {
    schema: &'static str,
    version: u32,
}

const SCHEMA: Schema = Schema { schema: "sterna-protect", version: 1 };

impl Line {
    /// The line for a QEMU. `per_second`: checkpoints per second, if measured.
    pub(super) fn of_qemu(now: &ProtectionStatistics, per_second: Option<f64>) -> Self {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        let delay = |time: Duration| seconds(Some(time).filter(|_| now.output.released > 0));
        Self {
            schema: SCHEMA,
            state: words::word(now.contact.state).to_owned(),
            checkpoint: now.held,
            checkpoints_per_second: per_second,
            checkpoint_age: seconds(now.held_for),
            guest_stopped: Some(now.is_guest_stopped),
            pauses: now.pauses,
            pause_p50: seconds(now.pause_p50),
            pause_p99: seconds(now.pause_p99),
            output_delay: delay(now.output.last_delay),
            output_delay_p50: delay(now.output.delay_p50),
            output_delay_p99: delay(now.output.delay_p99),
            output_waiting_packets: Some(now.output.waiting),
            output_waiting_bytes: Some(now.output.waiting_bytes),
            output_released_packets: Some(now.output.released),
            output_dropped_packets: Some(now.output.dropped),
            stream_bytes: now.stream_bytes,
            kept_bytes: Some(now.kept_bytes),
            age: now.age.as_secs_f64(),
            lost_because: now.lost_because.clone(),
            trouble: now.trouble.clone().or_else(|| now.contact.trouble.clone()),
        }
    }

    /// The line for a Sterna VM, from its `x-sterna-query-protection`. Its gate counts no packets.
    pub(super) fn of_sterna(report: &Value, per_second: Option<f64>, age: Duration) -> Self {
        let number = |name: &str| report[name].as_u64().unwrap_or(0);
        let is_checkpointed = number("checkpoints") > 0;
        let seconds = |name: &str| report[name].as_f64().filter(|_| is_checkpointed);
        Self {
            schema: SCHEMA,
            state: report["state"].as_str().unwrap_or("seeding").to_owned(),
            checkpoint: number("held"),
            checkpoints_per_second: per_second,
            checkpoint_age: report["checkpoint-age"].as_f64(),
            guest_stopped: None,
            pauses: number("checkpoints"),
            pause_p50: seconds("pause-p50"),
            pause_p99: seconds("pause-p99"),
            output_delay: seconds("output-delay"),
            output_delay_p50: seconds("output-delay-p50"),
            output_delay_p99: seconds("output-delay-p99"),
            output_waiting_packets: None,
            output_waiting_bytes: report["output-waiting-bytes"].as_u64(),
            output_released_packets: None,
            output_dropped_packets: None,
            stream_bytes: number("transferred-bytes"),
            kept_bytes: None,
            age: age.as_secs_f64(),
            lost_because: None,
            trouble: report["trouble"].as_str().map(str::to_owned),
        }
    }

    pub(super) fn value(&self) -> Value {
        to_value(self)
    }
}

impl End {
    /// The line for a QEMU.
    pub(super) fn of_qemu(end: &ProtectionEnd, now: &ProtectionStatistics) -> Self {
        Self {
            schema: SCHEMA,
            state: words::outcome(end.outcome).to_owned(),
            runs_here: end.runs_here,
            checkpoint: now.held,
            output_released_packets: Some(now.output.released),
            stream_bytes: now.stream_bytes,
            age: now.age.as_secs_f64(),
            left: end.left.clone(),
            lost_because: now.lost_because.clone(),
        }
    }

    /// The line for a Sterna VM, from its last `x-sterna-query-protection`.
    pub(super) fn of_sterna(report: &Value, outcome: &str, runs_here: bool, age: Duration) -> Self {
        Self {
            schema: SCHEMA,
            state: outcome.to_owned(),
            runs_here,
            checkpoint: report["held"].as_u64().unwrap_or(0),
            output_released_packets: None,
            stream_bytes: report["transferred-bytes"].as_u64().unwrap_or(0),
            age: age.as_secs_f64(),
            left: Vec::new(),
            lost_because: report["trouble"].as_str().map(str::to_owned),
        }
    }

    pub(super) fn value(&self) -> Value {
        to_value(self)
    }
}

fn to_value(line: &impl Serialize) -> Value {
    serde_json::to_value(line).expect("numbers, words and nothing else")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn line_of_a_sterna_vm_has_its_figures_under_the_names_of_a_qemus() {
        let report = json!({
            "state": "protected", "checkpoints": 7, "held": 6, "pause-p50": 0.002, "pause-p99": 0.005,
            "output-delay": 0.03, "output-delay-p50": 0.02, "output-delay-p99": 0.04, "output-waiting-bytes": 99,
            "transferred-bytes": 4096, "checkpoint-age": 0.25, "trouble": null,
        });
        let line = Line::of_sterna(&report, Some(3.5), Duration::from_secs(2)).value();

        let known = [
            ("schema", json!("sterna-protect")),
            ("state", json!("protected")),
            ("checkpoint", json!(6)),
            ("checkpoints_per_second", json!(3.5)),
            ("checkpoint_age", json!(0.25)),
            ("pauses", json!(7)),
            ("pause_p50", json!(0.002)),
            ("pause_p99", json!(0.005)),
            ("output_delay", json!(0.03)),
            ("output_delay_p50", json!(0.02)),
            ("output_delay_p99", json!(0.04)),
            ("output_waiting_bytes", json!(99)),
            ("output_waiting_packets", Value::Null),
            ("stream_bytes", json!(4096)),
            ("age", json!(2.0)),
        ];
        for (name, value) in known {
            assert_eq!(line[name], value, "{name}");
        }
    }

    #[test]
    fn nothing_is_zero_that_was_not_measured() {
        let report = json!({"state": "seeding", "checkpoints": 0, "pause-p50": 0.0, "output-delay": 0.0});
        let line = Line::of_sterna(&report, None, Duration::from_secs(1)).value();

        for name in ["checkpoints_per_second", "checkpoint_age", "pause_p50", "output_delay"] {
            assert_eq!(line[name], Value::Null, "{name}");
        }
    }
}
