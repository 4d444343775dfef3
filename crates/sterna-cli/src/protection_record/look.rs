//! One sample of a protection: of a QEMU, of a Sterna VM, or of a standby.

use std::time::Duration;

use serde_json::Value;
use sterna_drive::protect::ProtectionStatistics;

/// The sampled values. Counts are totals since the start of the protection.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Look {
    /// The primary's state as a word.
    pub state: String,
    /// The reason of the state, or a problem that the operator should look at.
    pub why: Option<String>,
    /// The last checkpoint that the standby holds; 0 before the first.
    pub held: u64,
    /// The age of that checkpoint.
    pub age: Option<Duration>,
    /// The last pause for a checkpoint; none before the first.
    pub pause_last: Option<Duration>,
    /// The median of the last pauses.
    pub pause_p50: Option<Duration>,
    /// The 99th percentile of the last pauses.
    pub pause_p99: Option<Duration>,
    /// The longest of the last pauses.
    pub pause_most: Option<Duration>,
    /// How long the output that was released last had waited.
    pub output_delay: Duration,
    /// The median of these waits.
    pub output_delay_p50: Duration,
    /// The 99th percentile of these waits.
    pub output_delay_p99: Duration,
    /// Pieces of output that were released.
    pub released: u64,
    /// Pieces of output that were dropped.
    pub dropped: u64,
    /// Bytes of output that wait.
    pub waiting_bytes: u64,
    /// Bytes that were sent to the standby.
    pub transferred_bytes: u64,
}

impl Look {
    /// A sample of a QEMU's protection in `state`.
    pub fn at_qemu(state: &str, now: &ProtectionStatistics) -> Self {
        let why = now.lost_because.as_ref().or(now.ended_because.as_ref()).or(now.trouble.as_ref());
        Self {
            state: state.into(),
            why: why.or(now.contact.trouble.as_ref()).cloned(),
            held: now.held,
            age: now.held_for,
            pause_last: now.pause_last,
            pause_p50: now.pause_p50,
            pause_p99: now.pause_p99,
            pause_most: now.pause_most,
            output_delay: now.output.last_delay,
            output_delay_p50: now.output.delay_p50,
            output_delay_p99: now.output.delay_p99,
            released: now.output.released,
            dropped: now.output.dropped,
            waiting_bytes: now.output.waiting_bytes,
            transferred_bytes: now.stream_bytes,
        }
    }

    /// A sample of a Sterna VM's protection, from its `x-sterna-query-protection`.
    pub fn at_sterna(report: &Value) -> Self {
        let number = |name: &str| report[name].as_u64().unwrap_or(0);
        let maybe =
            |name: &str| report[name].as_f64().and_then(|time| Duration::try_from_secs_f64(time).ok());
        let time = |name: &str| maybe(name).unwrap_or_default();
        let pause = |name: &str| maybe(name).filter(|_| number("checkpoints") > 0);
        Self {
            state: report["state"].as_str().unwrap_or("seeding").to_owned(),
            why: report["trouble"].as_str().map(str::to_owned),
            held: number("held"),
            age: maybe("checkpoint-age"),
            pause_last: pause("pause-last"),
            pause_p50: pause("pause-p50"),
            pause_p99: pause("pause-p99"),
            pause_most: pause("pause-most"),
            output_delay: time("output-delay"),
            output_delay_p50: time("output-delay-p50"),
            output_delay_p99: time("output-delay-p99"),
            released: number("output-released"),
            dropped: 0,
            waiting_bytes: number("output-waiting-bytes"),
            transferred_bytes: number("transferred-bytes"),
        }
    }

    /// A sample of a standby, from the JSON of its report. A standby measures neither pauses nor output.
    pub fn at_standby(report: &Value) -> Self {
        let number = |name: &str| report[name].as_u64().unwrap_or(0);
        // The primary's words, where the two sides are in the same state.
        let state = match report["state"].as_str().unwrap_or("seeding") {
            "following" => "protected",
            other => other,
        };
        Self {
            state: state.to_owned(),
            why: report["trouble"].as_str().map(str::to_owned),
            held: number("checkpoints"),
            age: report["age"].as_f64().and_then(|age| Duration::try_from_secs_f64(age).ok()),
            transferred_bytes: number("received-bytes"),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn look_at_a_sterna_and_at_a_standby_has_each_figure_of_its_report() {
        let report = json!({"state": "protected", "checkpoints": 9, "held": 8, "checkpoint-age": 0.05, "pause-last": 0.002,
            "pause-p50": 0.001, "pause-p99": 0.004, "pause-most": 0.006, "output-delay": 0.03, "output-delay-p50": 0.02,
            "output-delay-p99": 0.04, "output-released": 7, "output-waiting-bytes": 99, "transferred-bytes": 4096,
            "trouble": "slow"});

        let ms = Duration::from_millis;
        let look = Look::at_sterna(&report);
        assert_eq!((look.state.as_str(), look.why.as_deref(), look.held), ("protected", Some("slow"), 8));
        assert_eq!((look.age, look.pause_last, look.pause_most), (Some(ms(50)), Some(ms(2)), Some(ms(6))));
        assert_eq!(
            (look.output_delay, look.released, look.waiting_bytes, look.transferred_bytes),
            (ms(30), 7, 99, 4096)
        );

        let standby = Look::at_standby(
            &json!({"state": "following", "checkpoints": 8, "age": 0.05, "received-bytes": 4096,
            "trouble": null}),
        );
        assert_eq!((standby.state.as_str(), standby.why, standby.held), ("protected", None, 8));
        assert_eq!((standby.age, standby.pause_last, standby.transferred_bytes), (Some(ms(50)), None, 4096));

        let seeding = Look::at_sterna(
            &json!({"state": "seeding", "checkpoints": 0, "pause-last": 0.0, "checkpoint-age": null}),
        );
        assert_eq!((seeding.pause_last, seeding.age), (None, None));
    }
}
