//! From samples and rounds to values over time.
//!
//! Samples come about ten a second; the first round's beginning and the last one's end are added to them. A
//! migration that is over sooner than a few of them is drawn from its rounds instead, each as one step. What
//! was dirtied is known when a round ends, so it is drawn as that round's mean.

use std::time::Duration;

use sterna::{Round, Sample, Statistics};

use crate::derived::dirtied_in;
use crate::units::PAGE_BYTES;

/// A value that held from one instant to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Seconds since the start.
    pub from: f64,
    /// Seconds since the start; after `from`.
    pub to: f64,
    /// Sent in it, bytes per second.
    pub sent_rate: f64,
    /// Dirtied in it, bytes per second.
    pub dirty_rate: f64,
    /// Left to send at its end, bytes.
    pub remaining: f64,
}

/// Below this many samples the rounds say more.
const FEW: usize = 6;

/// Spans in order of time.
pub fn spans(figures: &Statistics) -> Vec<Span> {
    if figures.samples.len() < FEW { from_rounds(figures) } else { from_samples(figures) }
}

/// When the picture ends: the last thing that happened.
pub fn end(figures: &Statistics) -> f64 {
    let rounds = figures.rounds.iter().map(ended);
    let samples = figures.samples.iter().map(|sample| sample.at);
    rounds.chain(samples).fold(figures.total_time, Duration::max).as_secs_f64()
}

fn ended(round: &Round) -> Duration {
    round.began + round.took
}

fn from_samples(figures: &Statistics) -> Vec<Span> {
    let samples = with_ends(figures);
    let mut spans = Vec::with_capacity(samples.len());
    for pair in samples.windows(2) {
        let (before, after) = (&pair[0], &pair[1]);
        if after.at <= before.at {
            continue;
        }
        let (from, to) = (before.at.as_secs_f64(), after.at.as_secs_f64());
        let sent = after.transferred_bytes.saturating_sub(before.transferred_bytes);
        let measured = after.dirty_pages_per_second as f64 * PAGE_BYTES as f64;
        spans.push(Span {
            from,
            to,
            sent_rate: sent as f64 / (to - from),
            dirty_rate: dirty_rate_at(figures, (from + to) / 2.0).unwrap_or(measured),
            remaining: after.remaining_bytes as f64,
        });
    }
    spans
}

/// The samples between where the first round began and where the last one ended.
fn with_ends(figures: &Statistics) -> Vec<Sample> {
    let mut samples = figures.samples.clone();
    let (Some(first), Some(last)) = (figures.rounds.first(), figures.rounds.last()) else { return samples };
    if samples.first().is_some_and(|sample| first.began < sample.at) {
        let began = Sample { at: first.began, remaining_bytes: figures.ram_total_bytes, ..Sample::default() };
        samples.insert(0, began);
    }
    let ended = ended(last);
    if samples.last().is_some_and(|sample| sample.at < ended) {
        samples.push(Sample {
            at: ended,
            transferred_bytes: figures.transferred_bytes,
            remaining_bytes: figures.ram_remaining_bytes,
            dirty_pages_per_second: 0,
        });
    }
    samples
}

/// Bytes per second dirtied in the finished round that was under way at `at`.
fn dirty_rate_at(figures: &Statistics, at: f64) -> Option<f64> {
    let round = |round: &Round| (round.began.as_secs_f64()..ended(round).as_secs_f64()).contains(&at);
    let index = figures.rounds.iter().position(round)?;
    Some(dirtied_in(figures, index) as f64 * PAGE_BYTES as f64 / figures.rounds[index].took.as_secs_f64())
}

fn from_rounds(figures: &Statistics) -> Vec<Span> {
    let mut spans = Vec::with_capacity(figures.rounds.len());
    for (index, round) in figures.rounds.iter().enumerate().filter(|(_, round)| !round.took.is_zero()) {
        let bytes_per_second = |bytes: u64| bytes as f64 / round.took.as_secs_f64();
        let dirtied = dirtied_in(figures, index).saturating_mul(PAGE_BYTES);
        spans.push(Span {
            from: round.began.as_secs_f64(),
            to: ended(round).as_secs_f64(),
            sent_rate: bytes_per_second(round.bytes),
            dirty_rate: bytes_per_second(dirtied),
            remaining: dirtied as f64,
        });
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn spans_of_samples_are_differences_over_time() {
        let sample =
            |at, transferred_bytes| Sample { at: seconds(at), transferred_bytes, ..Sample::default() };
        let samples = (0..8).map(|n| sample(f64::from(n) * 0.5, n as u64 * 100)).collect();

        let spans = spans(&Statistics { samples, ..Statistics::default() });

        assert_eq!(spans.len(), 7);
        assert!(spans.iter().all(|span| span.sent_rate == 200.0));
    }

    #[test]
    fn spans_of_samples_reach_over_all_rounds_and_know_what_was_dirtied() {
        let sample =
            |at, transferred_bytes| Sample { at: seconds(at), transferred_bytes, ..Sample::default() };
        let samples = (1..8).map(|n| sample(f64::from(n), n as u64 * 100)).collect();
        let rounds =
            vec![Round { began: seconds(0.5), took: seconds(9.5), dirtied_pages: 19, ..Round::default() }];
        let figures = Statistics { samples, rounds, transferred_bytes: 1000, ..Statistics::default() };

        let spans = spans(&figures);

        assert_eq!((spans[0].from, spans[spans.len() - 1].to), (0.5, 10.0));
        assert_eq!(spans[spans.len() - 1].sent_rate, 100.0);
        assert!(spans.iter().all(|span| span.dirty_rate == 2.0 * 4096.0));
    }

    #[test]
    fn spans_of_a_short_migration_come_from_its_rounds() {
        let rounds = vec![Round {
            began: seconds(1.0),
            took: seconds(2.0),
            bytes: 50,
            dirtied_pages: 1,
            ..Round::default()
        }];

        let spans = spans(&Statistics { rounds, ..Statistics::default() });

        let expected = Span { from: 1.0, to: 3.0, sent_rate: 25.0, dirty_rate: 2048.0, remaining: 4096.0 };
        assert_eq!(spans, [expected]);
    }

    #[test]
    fn spans_of_samples_that_go_backwards_stay_sane() {
        let sample =
            |at, transferred_bytes| Sample { at: seconds(at), transferred_bytes, ..Sample::default() };
        let samples = [3.0, 2.0, 2.0, 4.0, 1.0, 5.0].map(|at| sample(at, 9)).to_vec();

        let spans = spans(&Statistics { samples, ..Statistics::default() });

        assert!(spans.iter().all(|span| span.to > span.from && span.sent_rate >= 0.0));
    }
}
