//! Converts samples and rounds to values over time.
//!
//! Samples are taken about ten times a second. The start of the first round and the end of the last one are
//! added to them. A migration with only a few samples is drawn from its rounds instead, each as one step. The
//! amount of dirtied memory is known at the end of a round. It is therefore drawn as the round's mean, and
//! left out if it was not measured.

use std::time::Duration;

use sterna::stats::PostcopyStatistics;
use sterna::{Reconnection, Round, Sample, Statistics};

use crate::derived::dirty_rate_in;
use crate::units::PAGE_BYTES;

/// Values that are constant over a span of time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Start of the span, seconds since the start of the migration.
    pub from: f64,
    /// End of the span, seconds since the start of the migration; after `from`.
    pub to: f64,
    /// Bytes sent per second.
    pub sent_rate: f64,
    /// Bytes dirtied per second; none if they were not measured.
    pub dirty_rate: Option<f64>,
    /// Remaining bytes at the end of the span.
    pub remaining: f64,
}

/// A time without a connection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outage<'a> {
    /// Start of the outage, seconds since the start of the migration.
    pub from: f64,
    /// End of the outage, seconds since the start of the migration.
    pub to: f64,
    /// The engine's record of the outage.
    pub lost: &'a Reconnection,
}

/// With fewer samples, rounds show the course better.
const FEW: usize = 6;
/// Samples closer than this (seconds with a connection) are merged. A rate over a shorter time shows only the
/// effect of socket buffers.
const LEAST: f64 = 0.05;

/// Spans in order of time.
pub fn spans(figures: &Statistics) -> Vec<Span> {
    if figures.samples.len() < FEW { from_rounds(figures) } else { from_samples(figures) }
}

/// Times without a connection, in order of their start, in precopy and in postcopy.
pub fn outages(figures: &Statistics) -> Vec<Outage<'_>> {
    let postcopy = figures.postcopy.iter().flat_map(pauses);
    let all = figures.reconnections.iter().chain(postcopy);
    let mut outages: Vec<_> = all
        .map(|lost| {
            let from = lost.at.as_secs_f64();
            Outage { from, to: from + lost.took.as_secs_f64(), lost }
        })
        .collect();
    outages.sort_by(|a, b| a.from.total_cmp(&b.from));
    outages
}

/// The outages of a postcopy, including the one that still lasts.
pub fn pauses(postcopy: &PostcopyStatistics) -> impl Iterator<Item = &Reconnection> {
    postcopy.pauses.iter().chain(&postcopy.paused)
}

/// End of the picture, seconds: the latest event of the record.
pub fn end(figures: &Statistics) -> f64 {
    let rounds = figures.rounds.iter().map(ended);
    let samples = figures.samples.iter().map(|sample| sample.at);
    let postcopy =
        figures.postcopy.iter().flat_map(|postcopy| [Some(postcopy.at), postcopy.all_sent]).flatten();
    let last = rounds.chain(samples).chain(postcopy).fold(figures.total_time, Duration::max).as_secs_f64();
    outages(figures).iter().map(|outage| outage.to).fold(last, f64::max)
}

fn ended(round: &Round) -> Duration {
    round.began.saturating_add(round.took)
}

fn from_samples(figures: &Statistics) -> Vec<Span> {
    let samples = with_ends(figures);
    let outages = outages(figures);
    let mut cuts: Vec<f64> = outages.iter().flat_map(|outage| [outage.from, outage.to]).collect();
    cuts.extend(figures.postcopy.iter().map(|postcopy| postcopy.at.as_secs_f64()));
    cuts.sort_by(f64::total_cmp);
    let is_out = |at: f64| outages.iter().any(|outage| (outage.from..outage.to).contains(&at));
    let mut spans = Vec::with_capacity(samples.len());
    for (before, after) in pairs(&samples, &outages) {
        let (from, to) = (before.at.as_secs_f64(), after.at.as_secs_f64());
        let inside = cuts.iter().copied().filter(|cut| (from..to).contains(cut) && *cut > from);
        let ends: Vec<f64> = std::iter::once(from).chain(inside).chain([to]).collect();
        let pieces: Vec<_> = ends.windows(2).filter(|ends| ends[1] > ends[0]).collect();
        let middle = |piece: &[f64]| (piece[0] + piece[1]) / 2.0;
        let connected: f64 =
            pieces.iter().filter(|piece| !is_out(middle(piece))).map(|piece| piece[1] - piece[0]).sum();
        let sent = after.transferred_bytes.saturating_sub(before.transferred_bytes) as f64;
        let (mut remaining, end) = (before.remaining_bytes as f64, after.remaining_bytes as f64);
        let change = end - remaining;
        for (index, piece) in pieces.iter().enumerate() {
            let at = middle(piece);
            // Nothing is sent without a connection. All of the change belongs to the time before or after the
            // outage.
            let share = match (is_out(at), connected > 0.0) {
                (false, _) => (piece[1] - piece[0]) / connected,
                (true, true) => 0.0,
                (true, false) => (piece[1] - piece[0]) / (to - from),
            };
            remaining = if index + 1 == pieces.len() { end } else { remaining + change * share };
            spans.push(Span {
                from: piece[0],
                to: piece[1],
                sent_rate: sent * share / (piece[1] - piece[0]),
                dirty_rate: if is_out(at) { None } else { dirty_rate_at(figures, at, after) },
                remaining,
            });
        }
    }
    spans
}

/// Neighbouring samples with enough time between them.
fn pairs<'a>(samples: &'a [Sample], outages: &[Outage<'_>]) -> Vec<(&'a Sample, &'a Sample)> {
    let connected = |from: &Sample, to: &Sample| {
        let (from, to) = (from.at.as_secs_f64(), to.at.as_secs_f64());
        let out =
            outages.iter().map(|outage| (outage.to.min(to) - outage.from.max(from)).max(0.0)).sum::<f64>();
        to - from - out
    };
    let mut pairs: Vec<(&Sample, &Sample)> = Vec::with_capacity(samples.len());
    let Some((mut before, rest)) = samples.split_first() else { return pairs };
    for after in rest {
        if connected(before, after) >= LEAST {
            pairs.push((before, after));
            before = after;
        }
    }
    // The time after the last pair is too short for a pair of its own.
    match (samples.last().filter(|last| last.at > before.at), pairs.last_mut()) {
        (Some(last), Some(pair)) => pair.1 = last,
        (Some(last), None) => pairs.push((before, last)),
        _ => {}
    }
    pairs
}

/// The samples between the start of the first round and the end of the last one.
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

/// Bytes per second that the guest dirtied at the time `at`.
/// The rate of the finished round that ran then, else the last measurement at `sample`. None if neither is
/// known. None after the switch to postcopy, because the guest then writes at the destination.
fn dirty_rate_at(figures: &Statistics, at: f64, sample: &Sample) -> Option<f64> {
    if figures.postcopy.as_ref().is_some_and(|postcopy| at >= postcopy.at.as_secs_f64()) {
        return None;
    }
    let round = |round: &Round| (round.began.as_secs_f64()..ended(round).as_secs_f64()).contains(&at);
    let index = figures.rounds.iter().position(round);
    let measured = (sample.dirty_pages_per_second > 0)
        .then_some(sample.dirty_pages_per_second as f64 * PAGE_BYTES as f64);
    index.and_then(|index| dirty_rate_in(figures, index)).or(measured)
}

fn from_rounds(figures: &Statistics) -> Vec<Span> {
    let rounds = figures.rounds.iter().enumerate().filter(|(_, round)| !round.took.is_zero());
    rounds
        .map(|(index, round)| Span {
            from: round.began.as_secs_f64(),
            to: ended(round).as_secs_f64(),
            sent_rate: round.bytes as f64 / round.took.as_secs_f64(),
            dirty_rate: dirty_rate_in(figures, index),
            remaining: left_after(figures, index) as f64,
        })
        .collect()
}

/// Remaining bytes at the end of the round at `index`.
fn left_after(figures: &Statistics, index: usize) -> u64 {
    let next = figures.rounds.get(index + 1).map(|next| next.pages);
    match next.or(Some(figures.rounds[index].dirtied_pages).filter(|pages| *pages > 0)) {
        Some(pages) => pages.saturating_mul(PAGE_BYTES),
        None => figures.ram_remaining_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// A round of the engine whose dirty pages were found after `found_after` seconds.
    fn timed(found_after: f64) -> Round {
        Round { dirtied_time: seconds(found_after), ..Round::default() }
    }

    fn reconnection(at: f64, took: f64) -> Reconnection {
        Reconnection { at: seconds(at), took: seconds(took), ..Reconnection::default() }
    }

    /// 100 bytes per second from 0 to 8 s. No dirtied memory was measured.
    fn steady() -> Statistics {
        let sample = |n: u32| Sample {
            at: seconds(n.into()),
            transferred_bytes: u64::from(n) * 100,
            remaining_bytes: 1000 - u64::from(n) * 100,
            ..Sample::default()
        };
        Statistics { samples: (0..=8).map(sample).collect(), ..Statistics::default() }
    }

    #[test]
    fn dirty_rate_that_was_not_measured_is_a_gap() {
        let mut figures = steady();
        assert!(spans(&figures).iter().all(|span| span.dirty_rate.is_none()));

        // A QEMU's round, and a round that a lost connection interrupted.
        let seen = Round { took: seconds(4.0), dirtied_pages: 100, ..Round::default() };
        let unfinished = Round { unfinished: true, began: seconds(4.0), ..seen };
        figures.rounds = vec![seen, unfinished];
        assert!(spans(&figures).iter().all(|span| span.dirty_rate.is_none()));

        figures.samples[6].dirty_pages_per_second = 5;
        let known: Vec<_> = spans(&figures).iter().map(|span| span.dirty_rate).collect();
        assert_eq!((known[4], known[5], known[6]), (None, Some(5.0 * 4096.0), None));
    }

    #[test]
    fn nothing_is_sent_in_an_outage_and_all_of_it_outside() {
        let figures = Statistics { reconnections: vec![reconnection(2.5, 1.0)], ..steady() };

        let spans = spans(&figures);

        let between = |from, to| {
            let span = spans.iter().find(|span| (span.from, span.to) == (from, to));
            span.map(|span| (span.sent_rate, span.remaining))
        };
        assert_eq!(between(2.0, 2.5), Some((200.0, 700.0)));
        assert_eq!(between(2.5, 3.0), Some((0.0, 700.0)));
        assert_eq!(between(3.0, 3.5), Some((0.0, 700.0)));
        assert_eq!(between(3.5, 4.0), Some((200.0, 600.0)));
        assert_eq!(between(4.0, 5.0), Some((100.0, 500.0)));
        let sent: f64 = spans.iter().map(|span| span.sent_rate * (span.to - span.from)).sum();
        assert!((sent - 800.0).abs() < 1e-6, "{sent}");
        assert_eq!(
            outages(&figures).iter().map(|outage| (outage.from, outage.to)).collect::<Vec<_>>(),
            [(2.5, 3.5)]
        );
    }

    /// One sample is taken when the connection is lost, and one when it is restored.
    #[test]
    fn samples_at_the_edges_of_an_outage_make_no_spikes() {
        let mut figures = steady();
        for (at, transferred_bytes) in [(2.499, 290), (3.501, 300)] {
            let sample = Sample { at: seconds(at), transferred_bytes, ..Sample::default() };
            figures.samples.push(sample);
        }
        figures.samples.sort_by_key(|sample| sample.at);
        figures.samples.retain(|sample| sample.at != seconds(3.0));
        figures.reconnections = vec![reconnection(2.5, 1.0)];

        let spans = spans(&figures);

        assert!(spans.iter().all(|span| span.sent_rate <= 220.0), "{spans:?}");
        let sent: f64 = spans.iter().map(|span| span.sent_rate * (span.to - span.from)).sum();
        assert!((sent - 800.0).abs() < 1e-6, "{sent}");
    }

    #[test]
    fn guest_in_postcopy_dirties_nothing_at_the_source() {
        let mut figures = steady();
        figures.samples.iter_mut().for_each(|sample| sample.dirty_pages_per_second = 7);
        let postcopy = PostcopyStatistics {
            at: seconds(4.25),
            all_sent: Some(seconds(9.0)),
            pauses: vec![reconnection(6.0, 1.0)],
            paused: Some(reconnection(8.0, 4.0)),
            ..PostcopyStatistics::default()
        };
        figures.postcopy = Some(postcopy);

        let spans = spans(&figures);

        assert!(spans.iter().all(|span| span.dirty_rate.is_some() == (span.to <= 4.25)), "{spans:?}");
        assert_eq!(outages(&figures).len(), 2);
        assert_eq!(end(&figures), 12.0);
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
        let rounds = vec![Round { began: seconds(0.5), took: seconds(9.5), dirtied_pages: 19, ..timed(9.5) }];
        let figures = Statistics { samples, rounds, transferred_bytes: 1000, ..Statistics::default() };

        let spans = spans(&figures);

        assert_eq!((spans[0].from, spans[spans.len() - 1].to), (0.5, 10.0));
        assert_eq!(spans[spans.len() - 1].sent_rate, 100.0);
        assert!(spans.iter().all(|span| span.dirty_rate == Some(2.0 * 4096.0)));
    }

    #[test]
    fn spans_of_a_short_migration_come_from_its_rounds() {
        let rounds = vec![Round {
            began: seconds(1.0),
            took: seconds(2.0),
            bytes: 50,
            dirtied_pages: 1,
            ..timed(2.0)
        }];

        let spans = spans(&Statistics { rounds, ..Statistics::default() });

        let expected =
            Span { from: 1.0, to: 3.0, sent_rate: 25.0, dirty_rate: Some(2048.0), remaining: 4096.0 };
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
