//! Watches a migration until its end: progress, Ctrl-C, and statistics that the monitor does not keep.

mod advice;

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error;
use serde_json::Value;
use sterna::stats::PostcopyStatistics;
use sterna::{Reconnection, Round, Sample, Statistics, Status as Stage};
use sterna_drive::{DriveError, MonitorAddress, Reconnect, Trace, Vm, Watch, Wish};

use crate::exit::{Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::{Monitor, Progress};
use crate::record::Record;
use crate::terminal::Live;
use crate::units::{self, PAGE_BYTES};
use advice::advice;

/// Shows the progress of a driver, and handles Ctrl-C.
/// The first Ctrl-C cancels. The second one detaches, if the operation can continue without this command.
pub struct Watcher<'a> {
    live: &'a Live,
    interrupts: &'a Interrupts,
    /// The requests that were answered.
    heard: usize,
    can_detach: bool,
    /// Time at which to switch to postcopy.
    postcopy_at: Option<Instant>,
    /// The last known state of lost connections.
    reconnect: Reconnect,
    /// Advice for a connection that breaks in postcopy.
    when_paused: Option<String>,
    /// Advice when nothing is sent in postcopy.
    when_stalled: Option<String>,
    /// Advice when nothing is sent in precopy.
    when_silent: Option<String>,
    /// The destination, if this command has its monitor.
    destination: Option<&'a mut Vm>,
    /// The destination's guest was held back, and gets `cont` at the switch to postcopy.
    starts_at_switch: bool,
}

impl<'a> Watcher<'a> {
    /// A watcher of a save or a restore.
    pub fn new(live: &'a Live, interrupts: &'a Interrupts) -> Self {
        Self {
            live,
            interrupts,
            heard: 0,
            can_detach: false,
            postcopy_at: None,
            reconnect: Reconnect::default(),
            when_paused: None,
            when_stalled: None,
            when_silent: None,
            destination: None,
            starts_at_switch: false,
        }
    }

    /// A watcher of a migration.
    pub fn of_migration(live: &'a Live, interrupts: &'a Interrupts) -> Self {
        Self { can_detach: true, ..Self::new(live, interrupts) }
    }

    /// Sets the advice for a connection from `source` to `address` that breaks in postcopy, or carries
    /// nothing.
    /// If this watcher has the destination's monitor, the advice names it.
    pub fn with_break(self, source: &str, address: &str, window: Duration) -> Self {
        let there = self.destination.as_ref().map(|destination| destination.at());
        let line = recover_line(source, address, there);
        let what = match window.is_zero() {
            true => format!("`{line}` continues the migration"),
            false => format!(
                "the source connects again by itself for {} after the break; after that time, `{line}` continues the \
                 migration",
                units::seconds(window.as_secs_f64())
            ),
        };
        let paused = format!(
            "the connection broke in postcopy. The guest runs at the destination, and waits when it needs a page that \
             only the source has: keep both running; {what}"
        );
        let stalled = format!(
            "the source has sent nothing for a while in postcopy: if the connection is dead, `{line} --pause` closes \
             it and connects again"
        );
        let compare = match there {
            // This command has already compared the capabilities.
            Some(_) => "",
            None => "; with `--dest-qmp SOCKET` this command compares them",
        };
        let silent = format!(
            "sterna: warning: {source} has sent nothing for a while: either the destination does not read, or the \
             connection is dead. A QEMU does not read if the capabilities of the two sides differ, such as \
             multifd{compare}"
        );
        let (when_paused, when_stalled, when_silent) = (Some(paused), Some(stalled), Some(silent));
        Self { when_paused, when_stalled, when_silent, ..self }
    }

    /// Gives the watcher the destination's monitor.
    pub fn with_destination(self, destination: Option<&'a mut Vm>, starts_at_switch: bool) -> Self {
        Self { destination, starts_at_switch, ..self }
    }

    /// Sets the time from now to the switch to postcopy.
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
        if now >= 2 {
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

    fn when_stalled(&self) -> Option<String> {
        self.when_stalled.clone()
    }

    fn when_silent(&self) -> Option<String> {
        self.when_silent.clone()
    }

    fn switched(&mut self) {
        let text = match self.destination.as_deref_mut().filter(|_| self.starts_at_switch) {
            // Not earlier, because a source that loses its connection before the switch resumes the guest.
            Some(destination) => match destination.execute("cont", Value::Null) {
                Ok(_) => "the guest runs at the destination; its remaining pages are being sent".to_owned(),
                Err(error) => format!(
                    "the guest is at the destination and does not run ({error}): this command starts it when all of \
                     its pages have arrived"
                ),
            },
            None => "the guest is at the destination; its remaining pages are being sent".to_owned(),
        };
        self.live.note(&text);
    }

    fn destination(&mut self) -> Option<&mut Vm> {
        self.destination.as_deref_mut()
    }

    fn note(&mut self, text: &str) {
        self.live.note(text);
    }
}

/// The command that recovers a postcopy whose connection broke.
fn recover_line(source: &str, address: &str, destination: Option<&str>) -> String {
    let other = destination.map_or(String::new(), |at| format!(" --dest-qmp {at}"));
    format!("sterna recover {source} {address}{other}")
}

/// Messages about the lost connections that are new in `now`.
fn news(before: &Reconnect, now: &Reconnect) -> Vec<String> {
    let mut said = Vec::new();
    if now.reconnections > before.reconnections {
        let again = units::bytes(now.resent_bytes.saturating_sub(before.resent_bytes));
        said.push(format!("connected again; {again} of pages had not arrived and are sent again"));
    }
    let is_new = before.remaining_ms.is_none() || now.reconnections > before.reconnections;
    if let Some(left) = now.remaining_ms.filter(|_| is_new) {
        let left = left.div_ceil(1000);
        said.push(format!(
            "connection lost; the guest runs at the source, and {left} s are left to connect again"
        ));
    }
    said
}

/// Settings of a migration that may switch to postcopy.
#[derive(Debug, Clone, Copy)]
pub struct PostcopyWatch<'a> {
    /// Time from the start to the switch to postcopy.
    pub after: Option<Duration>,
    /// Address of the destination.
    pub address: &'a str,
    /// The source's `x-sterna-reconnect-window`; zero: it does not reconnect.
    pub window: Duration,
    /// The destination's guest was held back, and is started at the switch to postcopy.
    pub starts_at_switch: bool,
}

/// Watches the outgoing migration of `source` until it is over, or undecided for `patience`.
/// The first Ctrl-C cancels, a second one leaves the migration running.
/// Statistics are returned however the migration ended. The error: it cannot be watched any more.
pub fn until_over(
    source: &mut Monitor,
    destination: Option<&mut Vm>,
    live: &Live,
    interrupts: &Interrupts,
    patience: Duration,
    postcopy: PostcopyWatch<'_>,
) -> Result<(Statistics, Trace), DriveError> {
    let watcher = Watcher::of_migration(live, interrupts);
    let at = source.endpoint().to_string();
    let watcher = watcher.with_postcopy_after(postcopy.after);
    let watcher = watcher.with_destination(destination, postcopy.starts_at_switch);
    let trace = sterna_drive::watch(
        source.vm(),
        &mut watcher.with_break(&at, postcopy.address, postcopy.window),
        patience,
    )?;
    let figures = match source.statistics().ok().flatten() {
        Some(figures) => figures,
        None => from_trace(&trace),
    };
    Ok((figures, trace))
}

/// The error after detaching, with the next step. `what`: the state of the migration.
pub fn detached(source: &mut Monitor, what: &str) -> Stop {
    let is_postcopy = source.progress().is_ok_and(|progress| progress.status.starts_with("postcopy-"));
    let at = source.endpoint();
    let next = match is_postcopy {
        true => format!(
            "Keep the source until it reports `completed`: `sterna info {at}` shows its state, and what to do if the \
             connection breaks."
        ),
        false => format!("`sterna info {at}` shows it, `sterna cancel {at}` ends it."),
    };
    Stop::with(Status::Detached, format!("{what}. {next}"))
}

/// Statistics built from the observed progress, for a monitor without a timeline, such as QEMU's.
fn from_trace(trace: &Trace) -> Statistics {
    let dirty_pages = |progress: &Progress| (progress.dirty_bytes_per_second / PAGE_BYTES as f64) as u64;
    let mut figures = Statistics::default();
    let mut before = Progress::default();
    let mut has_switched = false;
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
        if has_switched {
            // Pages that are sent after the switch belong to no round.
            continue;
        }
        has_switched = progress.status.starts_with("postcopy-");
        if !has_switched && progress.round > figures.rounds.last().map_or(0, |round| round.number) {
            let pages = progress.remaining_bytes / PAGE_BYTES;
            if let Some(ended) = figures.rounds.last_mut() {
                ended.took = at.saturating_sub(ended.began);
            }
            figures.rounds.push(Round { number: progress.round, began: *at, pages, ..Round::default() });
        }
        if let Some(round) = figures.rounds.last_mut() {
            round.took = at.saturating_sub(round.began);
            round.bytes += progress.transferred_bytes.saturating_sub(before.transferred_bytes);
            round.stopped = trace.stopped.is_some_and(|stopped| stopped <= round.began);
            round.unfinished = has_switched && progress.remaining_bytes > 0;
        }
        before = progress.clone();
    }
    // QEMU resets its counters when a migration fails or is cancelled.
    let counted = trace.seen.iter().rev().find(|(_, progress)| progress.total_bytes > 0);
    let end = trace.last();
    let last = counted.map_or_else(|| end.clone(), |(_, progress)| progress.clone());
    let watched = trace.seen.last().map_or(Duration::ZERO, |(at, _)| *at);
    let status = status_of(&end.status);
    let rounds = figures.rounds.last().map_or(0, |round| round.number);
    if !matches!(status, Stage::Completed)
        && let Some(round) = figures.rounds.last_mut()
    {
        round.unfinished = true;
    }
    Statistics {
        // A QEMU 7.2 reports 0 for a failed migration.
        total_time: end.total_ms.filter(|ms| *ms > 0).map_or(watched, Duration::from_millis),
        setup_time: Duration::from_millis(last.setup_ms),
        // If the migration has not completed, this value is only the expected downtime.
        downtime: end.downtime_ms.map(Duration::from_millis).filter(|_| status == Stage::Completed),
        ram_total_bytes: last.total_bytes,
        ram_remaining_bytes: last.remaining_bytes,
        transferred_bytes: last.transferred_bytes,
        multifd_bytes: last.multifd_bytes,
        precopy_bytes: last.precopy_bytes,
        downtime_bytes: last.downtime_bytes,
        postcopy_bytes: last.postcopy_bytes,
        postcopy_requests: last.postcopy_requests,
        normal_pages: last.normal_pages,
        zero_pages: last.zero_pages,
        bandwidth_bytes: last.bandwidth_bytes as u64,
        throughput_bytes: last.bandwidth_bytes as u64,
        dirty_pages_per_second: dirty_pages(&last),
        rounds_begun: if has_switched { rounds } else { last.round },
        rdma: last.rdma,
        postcopy: postcopy_of(trace),
        status,
        error: end.error,
        ..figures
    }
}

/// The switch to postcopy and the times without a connection, as observed; none without a switch.
fn postcopy_of(trace: &Trace) -> Option<PostcopyStatistics> {
    let mut postcopy: Option<PostcopyStatistics> = None;
    for (at, progress) in &trace.seen {
        let is_paused =
            progress.status == "postcopy-paused" || progress.status.starts_with("postcopy-recover");
        let is_over = progress.status == "completed";
        if postcopy.is_none() && progress.status.starts_with("postcopy-") {
            let missing_bytes = progress.remaining_bytes;
            postcopy = Some(PostcopyStatistics { at: *at, missing_bytes, ..PostcopyStatistics::default() });
        }
        let Some(postcopy) = &mut postcopy else { continue };
        match &mut postcopy.paused {
            Some(paused) if is_paused => paused.took = at.saturating_sub(paused.at),
            None if is_paused => {
                let why = progress.error.clone().unwrap_or_else(|| "the source gives no reason".to_owned());
                postcopy.paused = Some(Reconnection { at: *at, why, ..Reconnection::default() });
            }
            _ => {}
        }
        if !is_paused && let Some(paused) = postcopy.paused.take() {
            let took = at.saturating_sub(paused.at);
            postcopy.recoveries += 1;
            postcopy.paused_time += took;
            postcopy.pauses.push(Reconnection { took, ..paused });
        }
        if is_over {
            postcopy.all_sent = Some(*at);
        }
    }
    postcopy
}

/// Converts a monitor's status. The engine knows all final statuses of QEMU; others count as failed.
fn status_of(word: &str) -> Stage {
    let known: Result<_, Error> = Stage::deserialize(word.into_deserializer());
    known.unwrap_or(Stage::Failed)
}

/// The exit status or the error for the end of a migration.
pub fn end(record: &Record, source: &mut Monitor) -> Result<Status, Stop> {
    let figures = &record.statistics;
    let why = figures.error.as_deref().unwrap_or("no reason was given");
    let at = source.endpoint().clone();
    match figures.status {
        Stage::Completed => match &record.unconfirmed {
            None => Ok(Status::Done),
            Some(why) => Err(Stop::with(
                Status::Unconfirmed,
                format!(
                    "unconfirmed: the source has sent everything and stopped its guest, but no answer confirms that \
                     the guest has arrived ({why}). Check the destination. If the guest is not there, `cont` at {at} \
                     resumes it. With `--dest-qmp SOCKET` this command asks the destination."
                ),
            )),
        },
        Stage::Cancelled => Err(Stop::with(
            Status::Cancelled,
            format!("cancelled; {}.", source.where_guest_is("at the source")),
        )),
        Stage::Undecided if !source.is_sterna() => Err(Stop::with(
            Status::Undecided,
            format!(
                "undecided: {why}. The guest is paused at the source, which still waits. Find out whether the guest runs at \
                 the destination. If it does, the source can be quit; if it does not, `sterna cancel {at}` resumes it at the \
                 source."
            ),
        )),
        Stage::Undecided => Err(Stop::with(
            Status::Undecided,
            format!(
                "undecided: {why}. The source stays stopped. Find out whether the guest runs at the destination, \
                 then `sterna decide {at} destination` (or `source`).",
            ),
        )),
        Stage::PostcopyPaused => {
            Err(Stop::with(Status::Undecided, paused(&at, &record.destination, why, source.is_sterna())))
        }
        _ => {
            let advice = advice(why).unwrap_or_default();
            Err(Stop::failed(format!(
                "the migration failed; {}: {why}{advice}",
                source.where_guest_is("at the source")
            )))
        }
    }
}

/// The message about a paused postcopy, with advice.
fn paused(at: &MonitorAddress, address: &str, why: &str, is_sterna: bool) -> String {
    // QEMU has no command that releases the source's memory; only the end of the process does.
    let give_up = match is_sterna {
        true => format!("`sterna decide {at} destination` releases the source's memory"),
        false => "`quit` at the source releases its memory".to_owned(),
    };
    format!(
        "paused in postcopy: {why}. The guest runs at the destination, and waits when it needs a page that only the \
         source has: keep both running. `sterna recover {at} {address}` continues the migration, with `--dest-qmp \
         SOCKET` if the destination must listen again. When the guest has all of its memory there, or is lost, \
         {give_up}."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_time_that_a_monitor_says_is_zero_is_what_was_watched() {
        let seen = |total_ms| Progress {
            status: "completed".to_owned(),
            total_bytes: 1,
            total_ms,
            ..Progress::default()
        };
        for (said, known) in [(Some(0), 2000), (None, 2000), (Some(1500), 1500)] {
            let seen = vec![(Duration::from_secs(2), seen(said))];
            let trace = Trace { began: Instant::now(), seen, stopped: None, was_cancelled: false };

            assert_eq!(from_trace(&trace).total_time, Duration::from_millis(known), "{said:?}");
        }
    }

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

    /// A trace of a QEMU, queried every 100 ms: bytes sent, round and status.
    fn looks(seen: &[(u64, u64, &str)]) -> Trace {
        let look = |(index, (sent, round, status)): (usize, &(u64, u64, &str))| {
            let progress = Progress {
                status: (*status).into(),
                total_bytes: 100 << 20,
                remaining_bytes: (100 << 20) - sent,
                transferred_bytes: *sent,
                round: *round,
                ..Progress::default()
            };
            (Duration::from_millis(100 * index as u64), progress)
        };
        let seen = seen.iter().enumerate().map(look).collect();
        Trace { began: Instant::now(), seen, stopped: None, was_cancelled: false }
    }

    /// A guest that writes 8 MB/s. Its second round has 0.8 MB, and only one query saw it.
    #[test]
    fn rates_are_not_made_of_the_times_between_looks() {
        let mut trace = looks(&[
            (0, 1, "active"),
            (50 << 20, 1, "active"),
            (99 << 20, 2, "active"),
            (100 << 20, 3, "completed"),
        ]);
        let of = |figures: &Statistics| crate::derived::most_dirty_rate(figures);

        let figures = from_trace(&trace);

        assert_eq!(figures.rounds.iter().map(|round| round.number).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(of(&figures), None);
        trace.seen[2].1.dirty_bytes_per_second = 8e6;
        let known = of(&from_trace(&trace)).expect("what the source has measured");
        assert!((known - 8e6).abs() < 4096.0, "{known}");
        let record = crate::record::Record::new("", "", figures);
        let rows = crate::summary::rows(&record);
        assert!(rows.contains(&("dirty rate, highest".to_owned(), "not measured".to_owned())), "{rows:?}");
        assert!(
            rows.iter().all(|(name, _)| name != "bandwidth while sending" && name != "sync time"),
            "{rows:?}"
        );
    }

    #[test]
    fn rounds_that_no_look_saw_are_left_out_and_none_comes_twice() {
        let trace = looks(&[(0, 1, "active"), (10, 4, "active"), (20, 4, "active"), (30, 5, "failed")]);

        let figures = from_trace(&trace);

        let ms = Duration::from_millis;
        let rounds: Vec<_> = figures
            .rounds
            .iter()
            .map(|round| (round.number, round.began, round.took, round.unfinished))
            .collect();
        assert_eq!(
            rounds,
            [(1, ms(0), ms(100), false), (4, ms(100), ms(200), false), (5, ms(300), ms(0), true)]
        );
        assert_eq!(figures.rounds.iter().map(|round| round.bytes).sum::<u64>(), 30);
    }

    #[test]
    fn switch_to_postcopy_and_its_pauses_are_known_from_looks() {
        let trace = looks(&[
            (0, 1, "active"),
            (40 << 20, 1, "postcopy-active"),
            (40 << 20, 1, "postcopy-paused"),
            (40 << 20, 1, "postcopy-recover"),
            (60 << 20, 2, "postcopy-active"),
            (100 << 20, 2, "completed"),
        ]);

        let postcopy = from_trace(&trace).postcopy.expect("a switch");

        let ms = Duration::from_millis;
        assert_eq!(
            (postcopy.at, postcopy.all_sent, postcopy.missing_bytes),
            (ms(100), Some(ms(500)), 60 << 20)
        );
        assert_eq!((postcopy.recoveries, postcopy.paused_time, postcopy.paused), (1, ms(200), None));
        assert_eq!((postcopy.pauses[0].at, postcopy.pauses[0].took), (ms(200), ms(200)));
        // The source counts the pages after the switch as a round.
        let figures = from_trace(&trace);
        assert_eq!(figures.rounds_begun, 1);
        let rounds = figures.rounds;
        let [round] = &rounds[..] else { panic!("{rounds:?}") };
        assert_eq!(
            (round.took, round.bytes, round.unfinished, round.stopped),
            (ms(100), 40 << 20, true, false)
        );
        assert_eq!(from_trace(&looks(&[(0, 1, "active"), (9, 2, "completed")])).postcopy, None);
    }
}
