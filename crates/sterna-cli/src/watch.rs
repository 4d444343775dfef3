//! Watching a migration until its end: progress, Ctrl-C, and the figures where the monitor has none.

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error;
use sterna::{Round, Sample, Statistics, Status as Stage};
use sterna_qmp::drive::{self, DriveError, Reconnect, Trace, Watch, Wish};

use crate::exit::{Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::{Monitor, Progress};
use crate::terminal::Live;
use crate::units::{self, PAGE_BYTES};

/// The bar and Ctrl-C as a driver sees them: the first Ctrl-C cancels, the second detaches, where there is something to
/// leave alone.
pub struct Watcher<'a> {
    live: &'a Live,
    interrupts: &'a Interrupts,
    first: usize,
    heard: usize,
    can_detach: bool,
    /// When the guest shall go on at the destination before its pages are there.
    postcopy_at: Option<Instant>,
    /// What was last seen of lost connections.
    reconnect: Reconnect,
    /// What to do when the connection breaks in postcopy.
    when_paused: Option<String>,
}

impl<'a> Watcher<'a> {
    /// Of a save or a restore. What is pressed from now on counts.
    pub fn new(live: &'a Live, interrupts: &'a Interrupts) -> Self {
        let first = interrupts.count();
        Self {
            live,
            interrupts,
            first,
            heard: first,
            can_detach: false,
            postcopy_at: None,
            reconnect: Reconnect::default(),
            when_paused: None,
        }
    }

    /// Of a migration. What was pressed since there were `first` counts, too.
    pub fn of_migration(live: &'a Live, interrupts: &'a Interrupts, first: usize) -> Self {
        Self { can_detach: true, first, heard: first, ..Self::new(live, interrupts) }
    }

    /// What to say when the connection of a migration from `source` to `address` breaks in postcopy.
    pub fn with_break(self, source: &str, address: &str, window: Duration) -> Self {
        let what = match window.is_zero() {
            true => format!("to go on, `sterna recover {source} {address}`"),
            false => format!(
                "the source connects again by itself for {} from the break on; after that, `sterna recover {source} {address}`",
                units::seconds(window.as_secs_f64())
            ),
        };
        let text = format!(
            "the connection broke in postcopy: the guest runs at the destination and waits when it needs a page that is only \
             at the source, so keep both; {what}"
        );
        Self { when_paused: Some(text), ..self }
    }

    /// After so long the guest shall go on at the destination before its pages are there.
    pub fn with_postcopy_after(self, after: Option<Duration>) -> Self {
        Self { postcopy_at: after.map(|after| Instant::now() + after), ..self }
    }
}

impl Watch for Watcher<'_> {
    fn show(&mut self, progress: &Progress) {
        self.live.show(progress);
        let now = progress.reconnect.unwrap_or_default();
        for text in news(&std::mem::replace(&mut self.reconnect, now), &now) {
            self.live.note(&text);
        }
    }

    fn wish(&mut self) -> Wish {
        let now = self.interrupts.count();
        if now >= self.first + 2 {
            return Wish::Detach;
        }
        if now > self.heard {
            self.heard = now;
            return Wish::Cancel;
        }
        if self.postcopy_at.take_if(|at| Instant::now() >= *at).is_some() {
            return Wish::StartPostcopy;
        }
        Wish::Continue
    }

    fn hint(&self) -> &'static str {
        if self.can_detach { " (Ctrl-C again detaches)" } else { "" }
    }

    fn when_paused(&self) -> Option<String> {
        self.when_paused.clone()
    }

    fn note(&mut self, text: &str) {
        self.live.note(text);
    }
}

/// What is to be said of lost connections, of which this was known before.
fn news(before: &Reconnect, now: &Reconnect) -> Vec<String> {
    let mut said = Vec::new();
    if now.reconnections > before.reconnections {
        let again = units::bytes(now.resent_bytes.saturating_sub(before.resent_bytes));
        said.push(format!("connected again; {again} of pages had not arrived and are sent once more"));
    }
    let is_new = before.remaining_ms.is_none() || now.reconnections > before.reconnections;
    if let Some(left) = now.remaining_ms.filter(|_| is_new) {
        let left = left.div_ceil(1000);
        said.push(format!(
            "connection lost; the guest runs on at the source, and {left} s are left to connect again"
        ));
    }
    said
}

/// What matters to a watcher of a migration that may go on in postcopy.
#[derive(Debug, Clone, Copy)]
pub struct PostcopyWatch<'a> {
    /// After so long the guest shall go on at the destination.
    pub after: Option<Duration>,
    /// Where the destination is.
    pub address: &'a str,
    /// `x-sterna-reconnect-window`.
    pub window: Duration,
}

/// Watches the migration away from `source` until it is over, or undecided for `patience`.
///
/// Ctrl-C cancels, a second one goes away and leaves the migration alone; `first` is how often it had been pressed
/// before. The figures come back however it ended; the error is for migrations that nobody can watch any longer.
pub fn until_over(
    source: &mut Monitor,
    live: &Live,
    interrupts: &Interrupts,
    first: usize,
    patience: Duration,
    postcopy: PostcopyWatch<'_>,
) -> Result<(Statistics, Trace), DriveError> {
    let watcher = Watcher::of_migration(live, interrupts, first);
    let at = source.endpoint().to_string();
    let watcher = watcher.with_postcopy_after(postcopy.after);
    let trace =
        drive::watch(source.vm(), &mut watcher.with_break(&at, postcopy.address, postcopy.window), patience)?;
    let figures = match source.statistics().ok().flatten() {
        Some(figures) => figures,
        None => from_trace(&trace),
    };
    Ok((figures, trace))
}

/// The error for a command that nobody watches any more, with what to do next. `what`: what becomes of the migration.
pub fn detached(source: &Monitor, what: &str) -> Stop {
    let at = source.endpoint();
    Stop::with(
        Status::Detached,
        format!("{what}. `sterna info {at}` shows it, `sterna cancel {at}` ends it."),
    )
}

/// Figures put together from what was seen: what remains where the monitor keeps no timeline, as QEMU's.
fn from_trace(trace: &Trace) -> Statistics {
    let dirty_pages = |progress: &Progress| (progress.dirty_bytes_per_second / PAGE_BYTES as f64) as u64;
    let mut figures = Statistics::default();
    let mut before = Progress::default();
    for (at, progress) in &trace.seen {
        if progress.total_bytes == 0 {
            continue;
        }
        figures.samples.push(Sample {
            at: *at,
            transferred_bytes: progress.transferred_bytes,
            remaining_bytes: progress.remaining_bytes,
            dirty_pages_per_second: dirty_pages(progress),
        });
        if progress.round > figures.rounds.len() as u64 {
            let pages = progress.remaining_bytes / PAGE_BYTES;
            if let Some(ended) = figures.rounds.last_mut() {
                ended.dirtied_pages = pages;
            }
            figures.rounds.push(Round { number: progress.round, began: *at, pages, ..Round::default() });
        }
        if let Some(round) = figures.rounds.last_mut() {
            round.took = at.saturating_sub(round.began);
            round.bytes += progress.transferred_bytes.saturating_sub(before.transferred_bytes);
            round.stopped = trace.stopped.is_some_and(|stopped| stopped <= round.began);
        }
        before = progress.clone();
    }
    // QEMU forgets its counts when a migration fails or is cancelled.
    let counted = trace.seen.iter().rev().find(|(_, progress)| progress.total_bytes > 0);
    let end = trace.last();
    let last = counted.map_or_else(|| end.clone(), |(_, progress)| progress.clone());
    let watched = trace.seen.last().map_or(Duration::ZERO, |(at, _)| *at);
    Statistics {
        total_time: end.total_ms.map_or(watched, Duration::from_millis),
        setup_time: Duration::from_millis(last.setup_ms),
        downtime: end.downtime_ms.map(Duration::from_millis),
        ram_total_bytes: last.total_bytes,
        ram_remaining_bytes: last.remaining_bytes,
        transferred_bytes: last.transferred_bytes,
        multifd_bytes: last.multifd_bytes,
        precopy_bytes: last.precopy_bytes,
        downtime_bytes: last.downtime_bytes,
        normal_pages: last.normal_pages,
        zero_pages: last.zero_pages,
        bandwidth_bytes: last.bandwidth_bytes as u64,
        throughput_bytes: last.bandwidth_bytes as u64,
        dirty_pages_per_second: dirty_pages(&last),
        rounds_begun: last.round,
        rdma: last.rdma,
        status: status_of(&end.status),
        error: end.error,
        ..figures
    }
}

/// The status of a monitor's word. Of a migration that is over, QEMU has no words that the engine lacks.
fn status_of(word: &str) -> Stage {
    let known: Result<_, Error> = Stage::deserialize(word.into_deserializer());
    known.unwrap_or(Stage::Failed)
}

/// What a migration's end means for the command that ran it.
pub fn end(figures: &Statistics, source: &Monitor) -> Result<Status, Stop> {
    let why = figures.error.as_deref().unwrap_or("no reason was given");
    match figures.status {
        Stage::Completed => Ok(Status::Done),
        Stage::Cancelled => Err(Stop::with(Status::Cancelled, "cancelled; the guest runs on at the source.")),
        Stage::Undecided => Err(Stop::with(
            Status::Undecided,
            format!(
                "undecided: {why}. The source stays stopped. Find out whether the guest runs at the destination, \
                 then `sterna decide {} destination` (or `source`).",
                source.endpoint()
            ),
        )),
        Stage::PostcopyPaused => Err(Stop::with(
            Status::Undecided,
            format!(
                "paused in postcopy: {why}. The guest runs at the destination and waits when it needs a page that is only at \
                 the source: keep both. To go on, `sterna recover {} ADDRESS`, with `--dest-qmp` if the destination shall listen anew. When the \
                 guest is complete there, or lost, `sterna decide {} destination` gives the \
                 source's memory up.",
                source.endpoint(),
                source.endpoint()
            ),
        )),
        _ => Err(Stop::failed(format!("the migration failed and the guest runs on at the source: {why}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_loss_and_each_new_connection_is_told_once() {
        let none = Reconnect::default();
        let lost = Reconnect { remaining_ms: Some(4_500), ..none };
        let later = Reconnect { remaining_ms: Some(3_000), ..none };
        let back = Reconnect { reconnections: 1, resent_bytes: 2 << 20, remaining_ms: None };
        let again = Reconnect { reconnections: 2, remaining_ms: Some(5_000), ..back };

        let told = news(&none, &lost);
        assert!(
            told.len() == 1 && told[0].contains("connection lost") && told[0].contains("5 s"),
            "{told:?}"
        );
        assert!(news(&lost, &later).is_empty() && news(&none, &none).is_empty());
        let told = news(&later, &back);
        assert!(told.len() == 1 && told[0].contains("connected again; 2.00 MiB"), "{told:?}");
        assert_eq!(news(&lost, &again).len(), 2, "between two looks");
    }
}
