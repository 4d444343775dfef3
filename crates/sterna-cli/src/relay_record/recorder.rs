//! Builds a record from the figures of a session. Its memory is bounded, independent of the session's length.

use std::time::Instant;

use sterna_relay::relay::Figures;

use super::format::{Change, Part, RelayRecord, SCHEMA, VERSION, units};

/// Initial length of a part, seconds. If there are too many parts, each two are merged.
const FIRST_PART: f64 = 0.1;
/// Maximum number of parts, and of changes.
const PARTS: usize = 1024;
const CHANGES: usize = 256;

/// A record under construction.
#[derive(Debug)]
pub struct RelayRecorder {
    record: RelayRecord,
    began: Instant,
    part: f64,
    last: Option<Figures>,
}

impl RelayRecorder {
    /// A recorder for a session that begins now.
    pub fn begin() -> Self {
        Self { record: RelayRecord::default(), began: Instant::now(), part: FIRST_PART, last: None }
    }

    /// Takes the present figures.
    pub fn look(&mut self, now: &Figures) {
        self.look_at(now.age.as_secs_f64(), now);
    }

    /// Notes a change that happens now.
    pub fn change(&mut self, what: &str) {
        let at_seconds = whole_micros(self.began.elapsed().as_secs_f64());
        let changes = &mut self.record.changes;
        if changes.len() >= CHANGES {
            // The first and the last changes stay.
            changes.remove(CHANGES / 2);
        }
        changes.push(Change { at_seconds, what: what.to_owned() });
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
        let length = self.part;
        let begin = whole_micros((at / length).floor() * length);
        match self.record.parts.last_mut().filter(|last| begin < last.at_seconds + length / 2.0) {
            Some(last) => last.take(&seen),
            None => self.record.parts.push(Part { at_seconds: begin, took_seconds: length, ..seen }),
        }
        if self.record.parts.len() > PARTS {
            self.thin_out();
        }
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
            downtime_seconds: now.downtime.map(|time| whole_micros(time.as_secs_f64())),
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

    /// Merges each two parts into one of twice the length.
    fn thin_out(&mut self) {
        self.part *= 2.0;
        let length = self.part;
        let mut parts: Vec<Part> = Vec::with_capacity(PARTS);
        for part in self.record.parts.drain(..) {
            let begin = whole_micros((part.at_seconds / length + 1e-6).floor() * length);
            match parts.last_mut().filter(|last| begin < last.at_seconds + length / 2.0) {
                Some(last) => last.take(&part),
                None => parts.push(Part { at_seconds: begin, took_seconds: length, ..part }),
            }
        }
        self.record.parts = parts;
    }
}

impl Part {
    /// Adds what was seen later in the same part.
    fn take(&mut self, later: &Part) {
        self.processed_bytes += later.processed_bytes;
        self.remaining_bytes = later.remaining_bytes;
        self.dirty_rate_bytes = later.dirty_rate_bytes.or(self.dirty_rate_bytes);
        self.is_lost |= later.is_lost;
    }
}

fn whole_micros(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
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
