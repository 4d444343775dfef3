//! What a protection looks like: a line a second, and its end.

use std::time::Duration;

use serde_json::{Value, json};
use sterna::replica::machines::primary::{Outcome, State};
use sterna_qmp::Endpoint;
use sterna_qmp::drive::protect::{ProtectionEnd, ProtectionStatistics, QemuProtection};

use crate::units;

/// What the lines before have shown.
#[derive(Default)]
pub(super) struct Shown {
    held: u64,
    at: Duration,
    stream_bytes: u64,
    has_noted_asking: bool,
    noted: Option<String>,
}

impl Shown {
    /// The next line.
    pub(super) fn line(&mut self, is_json: bool, now: &ProtectionStatistics) -> String {
        let seconds = now.age.saturating_sub(self.at).as_secs_f64().max(1e-3);
        let per_second = now.held.saturating_sub(self.held) as f64 / seconds;
        let bytes_per_second = now.stream_bytes.saturating_sub(self.stream_bytes) as f64 / seconds;
        (self.held, self.at, self.stream_bytes) = (now.held, now.age, now.stream_bytes);
        if is_json {
            return format!("{}\n", value(now, per_second));
        }
        let state = word(now.contact.state);
        if now.contact.state == State::Seeding {
            return format!(
                "{state:<11} {} sent, {}\n",
                units::bytes(now.stream_bytes),
                units::rate(bytes_per_second)
            );
        }
        let time = |time: Option<Duration>| time.map_or_else(|| "-".to_owned(), units::time);
        let output = now.output;
        format!(
            "{state:<11} checkpoint {}, {per_second:.0}/s; pause {} p50, {} p99; output {} late, {} waits; {}{}\n",
            now.held,
            time(now.pause_p50),
            time(now.pause_p99),
            units::time(output.last_delay),
            units::bytes(output.waiting_bytes),
            units::rate(bytes_per_second),
            if output.dropped > 0 { format!("; {} packets dropped", output.dropped) } else { String::new() }
        )
    }

    /// What has become worth a sentence.
    pub(super) fn note(&mut self, now: &ProtectionStatistics, qmp: Option<&Endpoint>) -> Option<String> {
        if now.contact.state == State::Asking && !std::mem::replace(&mut self.has_noted_asking, true) {
            let why = now.lost_because.as_deref().unwrap_or("it does not answer");
            let decide = qmp.map_or_else(String::new, |at| {
                format!(
                    "; with the arbiter `ask`, make sure that only one side runs the guest: `sterna decide {at} source` if \
                     it is this one, `destination` if it is the standby"
                )
            });
            return Some(format!("the standby is lost ({why}): the arbiter is asked{decide}"));
        }
        if now.trouble != self.noted {
            self.noted.clone_from(&now.trouble);
            return now.trouble.clone();
        }
        None
    }
}

/// All of it as JSON.
pub(super) fn value(now: &ProtectionStatistics, per_second: f64) -> Value {
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    json!({
        "schema": "sterna-protect",
        "version": 1,
        "state": word(now.contact.state),
        "checkpoint": now.held,
        "checkpoints_per_second": per_second,
        "guest_stopped": now.is_guest_stopped,
        "pauses": now.pauses,
        "pause_p50": seconds(now.pause_p50),
        "pause_p99": seconds(now.pause_p99),
        "output_delay": now.output.last_delay.as_secs_f64(),
        "output_delay_p50": now.output.delay_p50.as_secs_f64(),
        "output_delay_p99": now.output.delay_p99.as_secs_f64(),
        "output_waiting_packets": now.output.waiting,
        "output_waiting_bytes": now.output.waiting_bytes,
        "output_released_packets": now.output.released,
        "output_dropped_packets": now.output.dropped,
        "stream_bytes": now.stream_bytes,
        "age": now.age.as_secs_f64(),
        "lost_because": now.lost_because,
        "trouble": now.trouble.as_ref().or(now.contact.trouble.as_ref()),
    })
}

/// The end as JSON.
pub(super) fn end_value(end: &ProtectionEnd, session: &QemuProtection) -> Value {
    let now = session.statistics();
    json!({
        "schema": "sterna-protect",
        "version": 1,
        "state": outcome(end.outcome),
        "runs_here": end.runs_here,
        "checkpoint": now.held,
        "output_released_packets": now.output.released,
        "stream_bytes": now.stream_bytes,
        "age": now.age.as_secs_f64(),
        "left": end.left,
        "lost_because": now.lost_because,
    })
}

/// The end.
pub(super) fn end(is_json: bool, end: &ProtectionEnd, session: &QemuProtection) -> String {
    if is_json {
        return format!("{}\n", end_value(end, session));
    }
    let now = session.statistics();
    format!(
        "{:<11} after {}, checkpoint {}; {} in all\n",
        outcome(end.outcome),
        units::seconds(now.age.as_secs_f64()),
        now.held,
        units::bytes(now.stream_bytes)
    )
}

fn word(state: State) -> &'static str {
    match state {
        State::Seeding => "seeding",
        State::Protected => "protected",
        State::Ending => "ending",
        State::HandingOver => "handing over",
        State::Given => "given",
        State::Asking => "asking",
        State::Alone => "alone",
        State::HandedOver => "handed over",
        State::Lost => "lost",
        State::Failed => "failed",
    }
}

fn outcome(outcome: Outcome) -> &'static str {
    word(match outcome {
        Outcome::Alone(_) => State::Alone,
        Outcome::HandedOver => State::HandedOver,
        Outcome::Lost => State::Lost,
        Outcome::Failed(_) => State::Failed,
    })
}
