//! Compares a guest that writes faster than the link carries with a nearly idle one.

use std::time::Duration;

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::link::Link;
use sterna_benches::machines::{Lab, Side};

use crate::pair::{Moved, Pair};
use crate::{Args, PAGE_BYTES, SIDES, lab, median};

/// Time for which the guest's work is measured before it moves.
const BEFORE: Duration = Duration::from_secs(1);
/// Write rate of the guest, in multiples of the link's bandwidth.
const TIMES: u64 = 4;

/// Results of one side with both guests.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) side: Side,
    /// Bandwidth of the link in MB/s.
    pub(crate) link: u64,
    /// Bytes per second that the guest wrote before the move.
    pub(crate) written: f64,
    /// Number of precopies that ended within their time limit.
    pub(crate) precopies_ended: usize,
    pub(crate) moves: usize,
    /// Medians, in seconds.
    pub(crate) downtime: f64,
    pub(crate) until_last_page: f64,
    /// Median downtime of the nearly idle guest, in seconds.
    pub(crate) idle_downtime: f64,
}

/// Measures both sides, which alternate.
pub(crate) fn measure(args: &Args) -> Result<Vec<Row>, Failure> {
    let link = Link::new(args.writer_link)?;
    let lab = lab(args, Some(link.name()))?;
    let mut writers = SIDES.map(|_| Vec::new());
    let mut idle = SIDES.map(|_| Vec::new());
    for _ in 0..args.runs.max(1) {
        for (index, side) in SIDES.into_iter().enumerate() {
            let named = |why| format!("{}, a guest that writes: {why}", side.word());
            writers[index].push(writer(&lab, args, side).map_err(named)?);
            let named = |why| format!("{}, a guest that stands: {why}", side.word());
            idle[index].push(idler(&lab, args, side).map_err(named)?.downtime());
        }
    }
    let rows = SIDES.into_iter().enumerate().map(|(index, side)| {
        let of = |figure: fn(&Writer) -> f64| median(writers[index].iter().map(figure));
        Row {
            side,
            link: args.writer_link,
            written: of(|one| one.written),
            precopies_ended: writers[index].iter().filter(|one| one.moved.is_none()).count(),
            moves: writers[index].len(),
            downtime: of(|one| one.moved.as_ref().map_or(f64::NAN, Moved::downtime)),
            until_last_page: of(|one| one.moved.as_ref().map_or(f64::NAN, Moved::until_last_page)),
            idle_downtime: median(idle[index].iter().copied()),
        }
    });
    Ok(rows.collect())
}

struct Writer {
    written: f64,
    /// `None`: the precopy ended, so there was no switch.
    moved: Option<Moved>,
}

/// Moves the writing guest: precopy first, then the switch to postcopy.
fn writer(lab: &Lab, args: &Args, side: Side) -> Result<Writer, Failure> {
    let mut pair = Pair::begin(lab, side, args.writer_ram << 20, 0)?;
    pair.words.set_pace(TIMES * args.writer_link * 1_000_000 / PAGE_BYTES)?;
    let first = pair.words.gaps()?;
    std::thread::sleep(BEFORE);
    let pages = pair.words.gaps()?.since(&first).pages();
    let written = (pages * PAGE_BYTES) as f64 / BEFORE.as_secs_f64();
    pair.migrate()?;
    if pair.ends_within(Duration::from_secs(args.patience))? {
        return Ok(Writer { written, moved: None });
    }
    let moved = Some(pair.switch()?);
    pair.destination.wait_for_ticks(1)?;
    Ok(Writer { written, moved })
}

fn idler(lab: &Lab, args: &Args, side: Side) -> Result<Moved, Failure> {
    let mut pair = Pair::begin(lab, side, args.writer_ram << 20, 0)?;
    pair.words.set_pace(1)?;
    pair.migrate()?;
    pair.switch()
}

impl Row {
    /// The row as a value for `--json`.
    pub(crate) fn value(&self) -> Value {
        json!({
            "side": self.side.word(),
            "link_mb": self.link,
            "written_bytes_per_second": self.written,
            "moves": self.moves,
            "precopies_ended": self.precopies_ended,
            "downtime_ms": self.downtime * 1e3,
            "until_last_page_s": self.until_last_page,
            "idle_downtime_ms": self.idle_downtime * 1e3,
        })
    }
}
