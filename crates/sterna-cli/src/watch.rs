//! Watching a migration until its end: progress, Ctrl-C, and the figures where the monitor has none.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::exit::{Status, Stop};
use crate::figures::{Figures, Round, Sample};
use crate::interrupts::Interrupts;
use crate::monitor::{Monitor, Progress};
use crate::terminal::Live;
use crate::units::PAGE_BYTES;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// Watches the migration away from `source` until it is over, or undecided for `patience`.
///
/// Ctrl-C cancels, a second one goes away and leaves the migration alone. The figures come back however it
/// ended; the error is for migrations that nobody can watch any longer.
pub fn until_over(
    source: &mut Monitor,
    live: &Live,
    interrupts: &Interrupts,
    patience: Duration,
) -> Result<Figures, Stop> {
    let mut log = Log::new();
    let mut seen = interrupts.count();
    let first = seen;
    let mut undecided_since: Option<Instant> = None;
    loop {
        let progress = source.progress()?;
        log.add(&progress);
        live.show(&progress);
        if progress.is_over() {
            break;
        }
        if progress.status == "undecided" {
            let since = *undecided_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= patience {
                break;
            }
        } else {
            undecided_since = None;
        }
        interrupts.sleep(LOOK, seen);
        let now = interrupts.count();
        if now >= first + 2 {
            return Err(Stop::with(
                Status::Detached,
                format!(
                    "detached; the migration goes on. `sterna info {}` shows it, `sterna cancel {}` ends it.",
                    source.endpoint(),
                    source.endpoint()
                ),
            ));
        }
        if now > seen {
            cancel(source, live);
        }
        seen = now;
    }
    Ok(match source.figures()? {
        Some(figures) => figures,
        None => log.figures(),
    })
}

fn cancel(source: &mut Monitor, live: &Live) {
    match source.try_execute("migrate_cancel", Value::Null) {
        Ok(_) => live.note("cancelling: the guest runs on at the source (Ctrl-C again detaches)"),
        Err(error) => live.note(&format!("{} (Ctrl-C again detaches)", source.stop(&error))),
    }
}

/// Figures put together from what was seen: what remains where the monitor keeps no timeline, as QEMU's.
struct Log {
    began: Instant,
    last: Progress,
    samples: Vec<Sample>,
    rounds: Vec<Round>,
}

impl Log {
    fn new() -> Self {
        Self { began: Instant::now(), last: Progress::default(), samples: Vec::new(), rounds: Vec::new() }
    }

    fn add(&mut self, progress: &Progress) {
        let at = self.began.elapsed().as_secs_f64();
        self.samples.push(Sample {
            at,
            transferred_bytes: progress.transferred_bytes,
            remaining_bytes: progress.remaining_bytes,
            dirty_pages_per_second: (progress.dirty_bytes_per_second / PAGE_BYTES as f64) as u64,
        });
        if progress.round > self.rounds.len() as u64 {
            self.rounds.push(Round { number: progress.round, began: at, ..Round::default() });
        }
        if let Some(round) = self.rounds.last_mut() {
            round.took = at - round.began;
            round.bytes += progress.transferred_bytes.saturating_sub(self.last.transferred_bytes);
        }
        self.last = progress.clone();
    }

    fn figures(self) -> Figures {
        let last = self.last;
        Figures {
            status: last.status,
            error: last.error,
            total_time: self.began.elapsed().as_secs_f64(),
            downtime: last.downtime_ms.map(|ms| ms as f64 / 1e3),
            ram_total_bytes: last.total_bytes,
            ram_remaining_bytes: last.remaining_bytes,
            transferred_bytes: last.transferred_bytes,
            bandwidth_bytes: last.bandwidth_bytes as u64,
            dirty_pages_per_second: (last.dirty_bytes_per_second / PAGE_BYTES as f64) as u64,
            rounds_begun: last.round,
            rounds: self.rounds,
            samples: self.samples,
            ..Figures::default()
        }
    }
}

/// What a migration's end means for the command that ran it.
pub fn end(figures: &Figures, source: &Monitor) -> Result<Status, Stop> {
    let why = figures.error.as_deref().unwrap_or("no reason was given");
    match figures.status.as_str() {
        "completed" => Ok(Status::Done),
        "cancelled" => Err(Stop::with(Status::Cancelled, "cancelled; the guest runs on at the source.")),
        "undecided" => Err(Stop::with(
            Status::Undecided,
            format!(
                "undecided: {why}. The source stays stopped. Find out whether the guest runs at the destination, \
                 then `sterna decide {} destination` (or `source`).",
                source.endpoint()
            ),
        )),
        _ => Err(Stop::failed(format!("the migration failed and the guest runs on at the source: {why}"))),
    }
}
