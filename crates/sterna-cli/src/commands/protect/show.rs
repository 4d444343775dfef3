//! The output of a protection of a QEMU: a line per second, and a line at its end.

use std::time::Duration;

use sterna_drive::protect::{ProtectionEnd, ProtectionStatistics, QemuProtection};
use sterna_qmp::Endpoint;
use sterna_standby::machines::primary::State;

use super::json::{End, Line};
use super::words::{outcome, word};
use crate::units;

/// The shortest time over which a rate is measured, in seconds.
const SHORTEST: f64 = 0.1;

/// The values of the previous line, and the notes that were printed.
#[derive(Default)]
pub(super) struct Shown {
    held: u64,
    at: Duration,
    stream_bytes: u64,
    /// Checkpoints per second between the last two lines.
    per_second: Option<f64>,
    has_noted_asking: bool,
    has_noted_waiting: bool,
    noted: Option<String>,
}

impl Shown {
    /// The next line, with rates since the previous one.
    pub(super) fn line(&mut self, is_json: bool, now: &ProtectionStatistics) -> String {
        let seconds = now.age.saturating_sub(self.at).as_secs_f64().max(1e-3);
        let per_second = now.held.saturating_sub(self.held) as f64 / seconds;
        let bytes_per_second = now.stream_bytes.saturating_sub(self.stream_bytes) as f64 / seconds;
        (self.held, self.at, self.stream_bytes) = (now.held, now.age, now.stream_bytes);
        // The first line is printed as soon as possible, so its interval may be too short for a rate.
        self.per_second = (seconds >= SHORTEST).then_some(per_second);
        if is_json {
            return format!("{}\n", Line::of_qemu(now, self.per_second).value());
        }
        let state = word(now.contact.state);
        if now.contact.state == State::Seeding {
            return format!(
                "{state:<11} {} sent, {}\n",
                units::bytes(now.stream_bytes),
                units::rate(bytes_per_second)
            );
        }
        let age =
            now.held_for.filter(|age| now.hangs && now.contact.state == State::Protected && !age.is_zero());
        if let Some(age) = age {
            return format!(
                "{state:<11} checkpoint {}, none for {}; {} waiting; {}\n",
                now.held,
                units::time(age),
                units::bytes(now.output.waiting_bytes),
                units::rate(bytes_per_second),
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

    /// Checkpoints per second between the last two lines.
    pub(super) fn per_second(&self) -> Option<f64> {
        self.per_second
    }

    /// A note about a new condition that the operator must know; each is returned once.
    pub(super) fn note(&mut self, now: &ProtectionStatistics, qmp: Option<&Endpoint>) -> Option<String> {
        if now.contact.state == State::Asking && !std::mem::replace(&mut self.has_noted_asking, true) {
            let why = now.lost_because.as_deref().unwrap_or("it does not answer");
            let decide = qmp.map_or_else(String::new, |at| {
                format!(
                    "; with the arbiter `ask`, make sure that only one side runs the guest: `sterna decide {at} \
                     source` if this side does, `destination` if the standby does"
                )
            });
            return Some(format!("the standby is lost ({why}): asking the arbiter{decide}"));
        }
        if now.trouble != self.noted {
            self.noted.clone_from(&now.trouble);
            return now.trouble.clone();
        }
        if let Some(why) = &now.waits_because
            && !std::mem::replace(&mut self.has_noted_waiting, true)
        {
            return Some(format!(
                "checkpoints cannot be buffered, so each pause includes the time on the network: QEMU's stream has an \
                 unknown format ({why})"
            ));
        }
        None
    }
}

/// The line about the end of the protection.
pub(super) fn end(is_json: bool, end: &ProtectionEnd, session: &QemuProtection) -> String {
    if is_json {
        return format!("{}\n", End::of_qemu(end, &session.statistics()).value());
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
