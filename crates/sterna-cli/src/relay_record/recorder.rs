//! Builds a record from the figures of a session. Its memory is bounded, independent of the session's length.

use std::time::Instant;

use sterna_relay::relay::Figures;

use super::format::{Change, Part, RelayRecord, SCHEMA, VERSION, units};
use crate::course::{self, PartLength, add_change, seconds, whole_micros};

/// A record under construction.
#[derive(Debug)]
pub struct RelayRecorder {
    record: RelayRecord,
    began: Instant,
    length: PartLength,
    last: Option<Figures>,
}

impl RelayRecorder {
    /// A recorder for a session that begins now.
    pub fn begin() -> Self {
        Self {
            record: RelayRecord::default(),
            began: Instant::now(),
            length: PartLength::default(),
            last: None,
        }
    }

    /// Takes the present figures.
    pub fn look(&mut self, now: &Figures) {
        self.look_at(now.age.as_secs_f64(), now);
    }

    /// Notes a change that happens now.
    pub fn change(&mut self, what: &str) {
        let change = Change { at_seconds: seconds(self.began.elapsed()), what: what.to_owned() };
        add_change(&mut self.record.changes, change);
    }

    /// The record of a session that has ended with these figures.
    pub fn end(mut self, figures: &Figures, how: &str, in_order: bool) -> RelayRecord {
        self.look(figures);
        self.record.in_order = in_order;
        self.finish(how)
    }

    /// The record of a session that the command's end cuts off. `None`: the session had no figures yet.
    pub fn cut_off(self, why: &str) -> Option<RelayRecord> {
        self.last.is_some().then(|| self.finish(why))
    }

    fn finish(mut self, how: &str) -> RelayRecord {
        how.clone_into(&mut self.record.end);
        self.record
    }

    fn look_at(&mut self, at: f64, now: &Figures) {
        let before = self.last.as_ref().map_or(0, |last| last.processed_bytes);
        let seen = Part {
            processed_bytes: now.processed_bytes.saturating_sub(before),
            remaining_bytes: now.remaining_bytes,
            dirty_rate_bytes: now.dirty_rate,
            is_lost: now.lost_for.is_some(),
            ..Part::default()
        };
        self.length.add(&mut self.record.parts, at, seen);
        let (parts, changes) =
            (std::mem::take(&mut self.record.parts), std::mem::take(&mut self.record.changes));
        self.record = RelayRecord {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            units: units(),
            session: now.session.to_string(),
            route: now.route.to_string(),
            role: now.role_word().to_owned(),
            peer: now.peer.clone(),
            phase: now.phase_word().to_owned(),
            rounds: now.round,
            total_seconds: whole_micros(at),
            downtime_seconds: now.downtime.map(seconds),
            ram_bytes: now.ram_bytes,
            processed_bytes: now.processed_bytes,
            answered_bytes: now.answered_bytes,
            sent_bytes: now.sent_bytes,
            sent_payload_bytes: now.sent_payload_bytes,
            resent_bytes: now.resent_bytes,
            lost_carriers: now.lost_carriers,
            reconnections: now.reconnections,
            end: String::new(),
            in_order: false,
            parts,
            changes,
        };
        self.last = Some(now.clone());
    }
}

impl course::Part for Part {
    fn at_seconds(&self) -> f64 {
        self.at_seconds
    }

    fn placed(self, at: f64, took: f64) -> Self {
        Self { at_seconds: at, took_seconds: took, ..self }
    }

    fn merge(&mut self, later: &Self) {
        self.processed_bytes += later.processed_bytes;
        self.remaining_bytes = later.remaining_bytes;
        self.dirty_rate_bytes = later.dirty_rate_bytes.or(self.dirty_rate_bytes);
        self.is_lost |= later.is_lost;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::course::{CHANGES, PARTS};
    use crate::samples;

    #[test]
    fn record_of_a_long_session_keeps_every_byte_in_few_parts() {
        let mut recorder = RelayRecorder::begin();
        let mut figures = samples::relay_figures();
        figures.processed_bytes = 0;
        for tenth in 0..20_000_u32 {
            figures.age = Duration::from_millis(100) * tenth;
            figures.processed_bytes += 1000;
            figures.lost_for = (tenth == 12_345).then_some(Duration::from_secs(1));
            recorder.look(&figures);
        }
        (0..1000).for_each(|at| recorder.change(&format!("change {at}")));

        let record = recorder.end(&figures, "the end", true);

        assert!(record.parts.len() <= PARTS && record.changes.len() <= CHANGES);
        assert_eq!(record.parts.iter().map(|part| part.processed_bytes).sum::<u64>(), 20_000_000);
        assert_eq!(record.parts.iter().filter(|part| part.is_lost).count(), 1);
        assert_eq!((record.changes[0].what.as_str(), record.end.as_str()), ("change 0", "the end"));
        assert_eq!(record.changes.last().map(|change| change.what.as_str()), Some("change 999"));
        assert!(
            record
                .parts
                .windows(2)
                .all(|pair| pair[0].at_seconds + pair[0].took_seconds <= pair[1].at_seconds + 1e-6)
        );
    }

    #[test]
    fn record_of_a_session_that_is_cut_off_has_its_last_figures() {
        let mut recorder = RelayRecorder::begin();
        recorder.look(&samples::relay_figures());

        let record = recorder.cut_off("ended").unwrap();

        assert_eq!((record.processed_bytes, record.in_order, record.end.as_str()), (5 << 30, false, "ended"));
        assert!(RelayRecorder::begin().cut_off("ended").is_none());
    }
}
