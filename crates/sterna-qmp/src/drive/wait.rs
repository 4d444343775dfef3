//! Waiting for a migration's end.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::error::DriveError;
use super::progress::Progress;
use super::vm::Vm;
use crate::client::ClientError;

/// Between two looks, when no event comes.
const LOOK: Duration = Duration::from_millis(100);
/// Between two questions for the operator's wish.
const BLINK: Duration = Duration::from_millis(20);

/// What an operator wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// To go on.
    Continue,
    /// To cancel; heard once for each time it is answered.
    Cancel,
    /// That the guest goes on at the destination before its pages are there; asked for once.
    StartPostcopy,
    /// To look no longer and leave the migration alone.
    Detach,
}

/// Who watches.
pub trait Watch {
    /// Shows how far it is.
    fn show(&mut self, progress: &Progress);
    /// What the operator wants. Asked about fifty times a second.
    fn wish(&mut self) -> Wish;
    /// What a further Ctrl-C would do, as the end of a sentence; empty if nothing else.
    fn hint(&self) -> &'static str {
        ""
    }
    /// What to do about a postcopy whose connection broke, as a sentence; said once for each break.
    fn when_paused(&self) -> Option<String> {
        None
    }
    /// Tells something in passing.
    fn note(&mut self, text: &str);
}

/// What was seen of a migration from outside: all there is where the monitor keeps no timeline, as QEMU's.
#[derive(Debug, Clone)]
pub struct Trace {
    /// When watching began.
    pub began: Instant,
    /// When and how it stood, in order. The last is the end.
    pub seen: Vec<(Duration, Progress)>,
    /// When the guest's stop was heard of, since `began`.
    pub stopped: Option<Duration>,
    /// Whether the operator cancelled.
    pub was_cancelled: bool,
}

impl Trace {
    /// How it stood when last seen.
    pub fn last(&self) -> Progress {
        self.seen.last().map(|(_, progress)| progress.clone()).unwrap_or_default()
    }
}

/// Watches the migration away from `vm` until it is over, or undecided (in postcopy: paused) for `patience`.
///
/// Changes are noticed at once if the capability `events` is on, else within a tenth of a second.
pub fn watch(vm: &mut Vm, watcher: &mut dyn Watch, patience: Duration) -> Result<Trace, DriveError> {
    let mut trace = Trace { began: Instant::now(), seen: Vec::new(), stopped: None, was_cancelled: false };
    let mut undecided_since: Option<Instant> = None;
    let (mut told_paused, mut told_broken) = (false, false);
    loop {
        let progress = match vm.progress() {
            // QEMU answers nobody while it writes a stopped guest's last bytes to a slow reader.
            Err(DriveError::Monitor { error: ClientError::TimedOut { .. }, .. }) => {
                pause(vm, watcher, &mut trace)?;
                continue;
            }
            other => other?,
        };
        watcher.show(&progress);
        let is_over = progress.is_over();
        // The guest may run on without this command, and what it waits for may never come.
        let is_undecided = ["undecided", "postcopy-paused"].contains(&progress.status.as_str());
        let is_recovering = progress.status.starts_with("postcopy-recover");
        let is_paused = progress.status == "postcopy-paused";
        let goes_on = progress.status == "postcopy-active";
        let waits_for_word = progress.status == "pre-switchover";
        trace.seen.push((trace.began.elapsed(), progress));
        if is_over {
            break;
        }
        if waits_for_word && !told_paused {
            told_paused = true;
            watcher.note(&format!(
                "{}: the guest is stopped and waits (capability pause-before-switchover); give \
                 `migrate-continue` with state pre-switchover to go on",
                vm.at()
            ));
        }
        if is_paused
            && !told_broken
            && let Some(text) = watcher.when_paused()
        {
            watcher.note(&text);
        }
        if told_broken && goes_on {
            watcher.note("connected again in postcopy; the pages that are missing follow");
        }
        // Attempts to recover are of the same break.
        told_broken = is_paused || (told_broken && is_recovering);
        if is_undecided {
            if undecided_since.get_or_insert_with(Instant::now).elapsed() >= patience {
                break;
            }
        } else {
            undecided_since = None;
        }
        pause(vm, watcher, &mut trace)?;
    }
    Ok(trace)
}

/// Until the next look: an event, an operator's wish, or the time.
fn pause(vm: &mut Vm, watcher: &mut dyn Watch, trace: &mut Trace) -> Result<(), DriveError> {
    let until = Instant::now() + LOOK;
    loop {
        match watcher.wish() {
            Wish::Continue => {}
            Wish::Cancel => {
                trace.was_cancelled = true;
                return cancel(vm, watcher);
            }
            Wish::StartPostcopy => match vm.execute("migrate-start-postcopy", Value::Null) {
                Ok(_) => watcher.note("the guest goes on at the destination; its pages follow"),
                Err(error) if error.is_disconnect() => return Err(error),
                Err(error) => watcher.note(&error.to_string()),
            },
            Wish::Detach => {
                let what = match trace.was_cancelled {
                    true => {
                        "the source was told to cancel, and keeps the guest unless it has been handed over already"
                    }
                    false => "the migration goes on",
                };
                return Err(DriveError::Detached(format!("detached; {what}")));
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        if let Some(event) = vm.next_event(left.min(BLINK))? {
            if event.name == "STOP" {
                trace.stopped = Some(trace.began.elapsed());
            }
            if event.name == "MIGRATION" {
                return Ok(());
            }
        }
    }
}

fn cancel(vm: &mut Vm, watcher: &mut dyn Watch) -> Result<(), DriveError> {
    let hint = watcher.hint();
    match vm.execute("migrate_cancel", Value::Null) {
        Ok(_) => watcher.note(&format!("cancelling: the guest stays at the source{hint}")),
        Err(error) if error.is_disconnect() => return Err(error),
        Err(error) => watcher.note(&format!("{error}{hint}")),
    }
    Ok(())
}
