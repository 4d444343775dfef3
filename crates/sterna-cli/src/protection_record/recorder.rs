//! Builds a record from samples of a protection. Its memory is bounded, independent of the protection's
//! length.

use std::time::{Duration, Instant};

use super::format::{Change, GuestAt, Part, ProtectionRecord};
use super::look::Look;
use crate::board::Board;
use crate::course::{self, PartLength, add_change, seconds};

/// A record under construction.
#[derive(Debug)]
pub struct Recorder {
    record: ProtectionRecord,
    began: Instant,
    length: PartLength,
    last: Look,
    /// Where metrics read the last look.
    board: Option<Board<Look>>,
}

impl Recorder {
    /// A recorder for a protection that begins now.
    pub fn new(primary: &str, standby: &str, checkpoint_delay: Duration) -> Self {
        Self {
            record: ProtectionRecord::new(primary, standby, checkpoint_delay.as_secs_f64()),
            began: Instant::now(),
            length: PartLength::default(),
            last: Look::default(),
            board: None,
        }
    }

    /// A recorder for a protection whose primary has just connected to this standby.
    pub fn at_standby(standby: &str) -> Self {
        let mut this = Self::new("", standby, Duration::ZERO);
        this.record.recorded_by = Some(GuestAt::Standby);
        this
    }

    /// Adds a sample that was taken now.
    pub fn look(&mut self, look: Look) {
        self.look_at(self.began.elapsed(), look);
    }

    /// Also shows each sample on this board.
    pub fn show_on(&mut self, board: Board<Look>) {
        self.board = Some(board);
    }

    fn look_at(&mut self, at: Duration, look: Look) {
        if let Some(board) = &self.board {
            board.set(look.clone());
        }
        let at = seconds(at);
        if look.state != self.last.state {
            self.change(at, &look);
        }
        let became_held = look.held.saturating_sub(self.last.held);
        if look.held > 0 {
            self.record.seeding_seconds.get_or_insert(at);
        }
        let has_paused = became_held > 0 || look.pause_last != self.last.pause_last;
        let left = look.released.saturating_sub(self.last.released);
        let seen = Part {
            checkpoints: became_held,
            pause_seconds: look.pause_last.filter(|_| has_paused).map(seconds),
            age_seconds: look.age.map(seconds),
            output_delay_seconds: (left > 0).then(|| seconds(look.output_delay)),
            waiting_bytes: look.waiting_bytes,
            dropped: look.dropped.saturating_sub(self.last.dropped),
            sent_bytes: look.transferred_bytes.saturating_sub(self.last.transferred_bytes),
            ..Part::default()
        };
        self.length.add(&mut self.record.parts, at, seen);
        let record = &mut self.record;
        record.total_seconds = at;
        record.state.clone_from(&look.state);
        record.checkpoints = record.checkpoints.max(look.held);
        record.transferred_bytes = record.transferred_bytes.max(look.transferred_bytes);
        record.output_released = record.output_released.max(look.released);
        record.output_dropped = record.output_dropped.max(look.dropped);
        record.pause_p50_seconds = look.pause_p50.map(seconds).or(record.pause_p50_seconds);
        record.pause_p99_seconds = look.pause_p99.map(seconds).or(record.pause_p99_seconds);
        let longest = look.pause_most.max(look.pause_last).map(seconds);
        record.pause_longest_seconds =
            [record.pause_longest_seconds, longest].into_iter().flatten().reduce(f64::max);
        if look.released > 0 {
            record.output_delay_p50_seconds = Some(seconds(look.output_delay_p50));
            record.output_delay_p99_seconds = Some(seconds(look.output_delay_p99));
        }
        self.last = look;
    }

    fn change(&mut self, at: f64, look: &Look) {
        let why = look.why.clone().filter(|_| !matches!(&*look.state, "seeding" | "protected"));
        let change = Change { at_seconds: at, state: look.state.clone(), checkpoint: look.held, why };
        add_change(&mut self.record.changes, change);
    }

    /// Records the last state (if it differs), where the guest runs, and how the protection ended.
    pub fn end(&mut self, state: Option<&str>, guest_at: Option<GuestAt>, end: &str) {
        if let Some(state) = state.filter(|state| *state != self.last.state) {
            let look = Look { state: state.into(), why: None, ..self.last.clone() };
            self.look(look);
        }
        self.record.guest_at = guest_at;
        self.record.end = Some(end.to_owned());
    }

    /// Whether a sample was added since the protection began.
    pub fn has_begun(&self) -> bool {
        !self.record.parts.is_empty()
    }

    /// The record so far.
    pub fn record(&self) -> &ProtectionRecord {
        &self.record
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
        let most = |a: Option<f64>, b: Option<f64>| [a, b].into_iter().flatten().reduce(f64::max);
        self.checkpoints += later.checkpoints;
        self.pause_seconds = most(self.pause_seconds, later.pause_seconds);
        self.age_seconds = most(self.age_seconds, later.age_seconds);
        self.output_delay_seconds = most(self.output_delay_seconds, later.output_delay_seconds);
        self.waiting_bytes = self.waiting_bytes.max(later.waiting_bytes);
        self.dropped += later.dropped;
        self.sent_bytes += later.sent_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::course::{CHANGES, PARTS};

    fn recorder() -> Recorder {
        Recorder::new("a", "b", Duration::from_millis(50))
    }

    /// From 1 s on, a checkpoint every 50 ms with 1000 bytes and a pause of 2 ms.
    /// Every tenth has a pause of 7 ms.
    fn look(number: u64) -> Look {
        let ms = Duration::from_millis;
        Look {
            state: "protected".into(),
            held: number,
            age: Some(ms(49)),
            pause_last: Some(ms(if number.is_multiple_of(10) { 7 } else { 2 })),
            pause_most: Some(ms(7)),
            pause_p50: Some(ms(2)),
            output_delay: ms(30),
            released: number / 2,
            waiting_bytes: 10 + number,
            transferred_bytes: 5_000_000 + number * 1000,
            ..Look::default()
        }
    }

    #[test]
    fn record_has_the_known_course() {
        let mut recorder = recorder();
        recorder.look_at(Duration::ZERO, Look { state: "seeding".into(), ..Look::default() });
        for number in 1..=100 {
            recorder.look_at(Duration::from_millis(1000 + number * 50), look(number));
        }

        let record = recorder.record();

        assert_eq!(
            (record.checkpoints, record.transferred_bytes, record.output_released),
            (100, 5_100_000, 50)
        );
        assert_eq!((record.seeding_seconds, record.total_seconds), (Some(1.05), 6.0));
        assert_eq!((record.pause_longest_seconds, record.pause_p50_seconds), (Some(0.007), Some(0.002)));
        let sum = |of: fn(&Part) -> u64| record.parts.iter().map(of).sum::<u64>();
        assert_eq!((sum(|part| part.checkpoints), sum(|part| part.sent_bytes)), (100, 5_100_000));
        let pauses: Vec<_> = record.parts.iter().filter_map(|part| part.pause_seconds).collect();
        assert_eq!(pauses.iter().filter(|pause| **pause == 0.007).count(), 10, "{pauses:?}");
        assert!(pauses.iter().all(|pause| [0.002, 0.007].contains(pause)), "{pauses:?}");
        assert!(record.parts.iter().skip(1).all(|part| part.age_seconds == Some(0.049)));
        assert!(record.parts.iter().filter_map(|part| part.output_delay_seconds).all(|delay| delay == 0.03));
        let states: Vec<_> = record.changes.iter().map(|change| change.state.as_str()).collect();
        assert_eq!(states, ["seeding", "protected"]);
    }

    #[test]
    fn record_of_a_day_is_bounded_and_loses_nothing() {
        let mut recorder = recorder();
        for number in 1..=86_400 {
            recorder.look_at(Duration::from_secs(number), look(number));
        }

        let record = recorder.record();

        assert!(record.parts.len() <= PARTS, "{}", record.parts.len());
        assert_eq!(record.parts.iter().map(|part| part.checkpoints).sum::<u64>(), 86_400);
        let in_order = |pair: &[Part]| pair[0].at_seconds + pair[0].took_seconds <= pair[1].at_seconds + 1e-6;
        assert!(record.parts.windows(2).all(in_order));
        assert!(record.parts.iter().all(|part| part.pause_seconds == Some(0.007)));
    }

    #[test]
    fn end_is_a_change_of_the_state_and_very_many_changes_are_bounded() {
        let mut recorder = recorder();
        for number in 0..1000 {
            let state = if number % 2 == 0 { "protected" } else { "asking" };
            let why = Some("no answer".to_owned());
            recorder
                .look_at(Duration::from_secs(number), Look { state: state.into(), why, ..Look::default() });
        }
        recorder.end(Some("alone"), Some(GuestAt::Primary), "the claim is won");

        let record = recorder.record();

        assert_eq!((record.changes.len(), record.guest_at), (CHANGES, Some(GuestAt::Primary)));
        assert_eq!(record.changes[0].at_seconds, 0.0);
        assert_eq!(record.changes[1].why.as_deref(), Some("no answer"));
        assert_eq!((record.state.as_str(), record.end.as_deref()), ("alone", Some("the claim is won")));
        assert_eq!(record.changes.last().map(|change| change.state.as_str()), Some("alone"));
    }
}
