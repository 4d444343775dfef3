//! Measures page faults while background pages fill the link.

use std::time::Duration;

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::link::Link;
use sterna_benches::machines::{Lab, Side};
use sterna_benches::raw::{self, Raw};
use sterna_benches::words::Gaps;

use crate::pair::{Moved, Pair};
use crate::{Args, SIDES, lab, median};

/// Time for which the guest's work is measured before it moves.
const BEFORE: Duration = Duration::from_millis(500);

/// Results of all moves of one side over one link.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) side: Side,
    /// Bandwidth in MB/s. `None`: the loopback without a limit.
    pub(crate) link: Option<u64>,
    /// Number of multifd channels. 0: the main channel and the preempt channel.
    pub(crate) channels: u8,
    /// Pages that were requested, total of all moves.
    pub(crate) faults: u64,
    /// Median and 99th percentile of the faults' duration, in seconds, as the guest measured it.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// Mean duration as the destination reports it, in seconds, if it does.
    pub(crate) said: Option<f64>,
    /// The values from here on are medians of the moves. In seconds.
    pub(crate) downtime: f64,
    pub(crate) until_last_page: f64,
    /// Bytes per second from the guest's stop to the last page. `raw` has the rate of a plain copy.
    pub(crate) rate: f64,
    pub(crate) raw: Raw,
    /// Pages per second that the guest wrote until the last page, and before the move.
    pub(crate) work: f64,
    pub(crate) work_before: f64,
}

struct Move {
    moved: Moved,
    before: f64,
    requests: u64,
    bytes: u64,
}

/// Measures both sides, which alternate.
pub(crate) fn measure(args: &Args, link: Option<u64>, channels: u8) -> Result<Vec<Row>, Failure> {
    let made = link.map(Link::new).transpose()?;
    let namespace = made.as_ref().map(Link::name);
    let (bytes, lab) = (args.ram << 20, lab(args, namespace)?);
    let mut moves = SIDES.map(|_| Vec::new());
    let mut raws = Vec::new();
    for _ in 0..args.runs.max(1) {
        raws.push(raw::measure(namespace, bytes)?);
        for (side, moves) in SIDES.into_iter().zip(&mut moves) {
            moves.push(once(&lab, side, bytes, channels).map_err(|why| format!("{}: {why}", side.word()))?);
        }
    }
    let raw = Raw {
        bytes_per_second: median(raws.iter().map(|raw| raw.bytes_per_second)),
        round_trip: Duration::from_secs_f64(median(raws.iter().map(|raw| raw.round_trip.as_secs_f64()))),
    };
    Ok(SIDES.into_iter().zip(&moves).map(|(side, moves)| row(side, link, channels, moves, raw)).collect())
}

fn once(lab: &Lab, side: Side, bytes: u64, channels: u8) -> Result<Move, Failure> {
    let mut pair = Pair::begin(lab, side, bytes, channels)?;
    pair.words.set_full_speed()?;
    let first = pair.words.gaps()?;
    std::thread::sleep(BEFORE);
    let before = pair.words.gaps()?.since(&first).pages() as f64 / BEFORE.as_secs_f64();
    pair.migrate()?;
    let moved = pair.switch()?;
    // The guest prints a line after it has checked every page.
    pair.destination.wait_for_ticks(1)?;
    let (requests, bytes) = (moved.counted("postcopy-requests")?, moved.counted("postcopy-bytes")?);
    Ok(Move { moved, before, requests, bytes })
}

fn row(side: Side, link: Option<u64>, channels: u8, moves: &[Move], raw: Raw) -> Row {
    let gaps = moves.iter().fold(Gaps::default(), |gaps, one| gaps.with(&one.moved.gaps()));
    let faults = moves.iter().map(|one| one.requests).sum();
    // The longest time of each move is its downtime, so it is left out.
    let share = |share| gaps.share_of_longest(moves.len() as u64, faults, share);
    let said = moves.iter().filter_map(|one| one.moved.destination["postcopy-latency"].as_f64());
    let said: Vec<f64> = said.map(|nanoseconds| nanoseconds / 1e9).collect();
    let of = |figure: fn(&Move) -> f64| median(moves.iter().map(figure));
    Row {
        side,
        link,
        channels,
        faults,
        p50: share(0.5),
        p99: share(0.99),
        said: (!said.is_empty()).then(|| median(said.iter().copied())),
        downtime: of(|one| one.moved.downtime()),
        until_last_page: of(|one| one.moved.until_last_page()),
        rate: of(|one| one.bytes as f64 / one.moved.until_last_page()),
        raw,
        work: of(|one| one.moved.pages_per_second()),
        work_before: of(|one| one.before),
    }
}

impl Row {
    /// The row as a value for `--json`.
    pub(crate) fn value(&self) -> Value {
        json!({
            "side": self.side.word(),
            "link_mb": self.link,
            "channels": self.channels,
            "faults": self.faults,
            "fault_p50_us": self.p50 * 1e6,
            "fault_p99_us": self.p99 * 1e6,
            "fault_mean_said_us": self.said.map(|said| said * 1e6),
            "downtime_ms": self.downtime * 1e3,
            "until_last_page_s": self.until_last_page,
            "bytes_per_second": self.rate,
            "raw_bytes_per_second": self.raw.bytes_per_second,
            "raw_round_trip_us": self.raw.round_trip.as_secs_f64() * 1e6,
            "guest_pages_per_second": self.work,
            "guest_pages_per_second_before": self.work_before,
        })
    }
}
