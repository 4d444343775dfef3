//! Waits for the end of a migration.

use std::time::{Duration, Instant};

use serde_json::Value;
use sterna_qmp::ClientError;

use super::convergence::Convergence;
use super::error::DriveError;
use super::progress::Progress;
use super::stall::Stall;
use super::vm::Vm;

/// Interval between two queries when no event arrives.
const LOOK: Duration = Duration::from_millis(100);
/// How long a QEMU's monitor is released between two queries, while a postcopy is paused or stalled.
const LENT: Duration = Duration::from_secs(1);
/// How long the monitor may take to answer after that. Then another client is using it.
const TAKEN_BACK: Duration = Duration::from_millis(500);
/// Interval between two queries of the operator's wish.
const BLINK: Duration = Duration::from_millis(20);
/// How long a QEMU that has sent everything may wait for the destination before a message is printed.
const CONFIRMATION_NOTE: Duration = Duration::from_secs(3);

/// The operator's wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// Continue to watch.
    Continue,
    /// Cancel the migration. Returned once for each request.
    Cancel,
    /// Switch to postcopy: the guest starts at the destination before its pages are there. Returned once.
    StartPostcopy,
    /// Stop watching, and leave the migration unchanged.
    Detach,
}

/// The program that watches a migration.
pub trait Watch {
    /// Shows the progress.
    fn show(&mut self, progress: &Progress);
    /// The operator's wish. Called about fifty times a second.
    fn wish(&mut self) -> Wish;
    /// The effect of another Ctrl-C, as the end of a sentence. Empty if there is no other effect.
    fn hint(&self) -> &'static str {
        ""
    }
    /// Advice about a postcopy whose connection broke, as a sentence. Printed once for each break.
    fn when_paused(&self) -> Option<String> {
        None
    }
    /// Advice about a postcopy whose source has stalled, as a sentence. Printed once for each stall.
    fn when_stalled(&self) -> Option<String> {
        None
    }
    /// Advice about a source that has stalled in precopy, as a sentence. Printed once.
    fn when_silent(&self) -> Option<String> {
        None
    }
    /// Called when the migration was switched to postcopy. From now on the source never runs the guest again.
    fn switched(&mut self) {}
    /// The destination's monitor, if this program is connected to it. It is released while a postcopy is paused,
    /// because another client may need it.
    fn destination(&mut self) -> Option<&mut Vm> {
        None
    }
    /// Prints a message that does not affect the migration.
    fn note(&mut self, text: &str);
}

/// The observed progress of a migration. It replaces the timeline, which QEMU's monitor does not have.
#[derive(Debug, Clone)]
pub struct Trace {
    /// Time when watching began.
    pub began: Instant,
    /// (time since `began`, progress) of all samples, in order. The last one is the end.
    pub seen: Vec<(Duration, Progress)>,
    /// Time since `began` at which the guest's stop was noticed.
    pub stopped: Option<Duration>,
    /// Whether the operator cancelled.
    pub was_cancelled: bool,
}

impl Trace {
    /// Whether the migration was switched to postcopy.
    pub fn has_switched(&self) -> bool {
        self.seen.iter().any(|(_, progress)| progress.status == "postcopy-active")
    }

    /// The last sample.
    pub fn last(&self) -> Progress {
        self.seen.last().map(|(_, progress)| progress.clone()).unwrap_or_default()
    }
}

/// Watches the migration away from `vm` until it is over, or undecided (in postcopy: paused) for `patience`.
/// A QEMU also counts as undecided if it has sent everything, has stopped its guest, and gets no answer from the
/// destination.
///
/// Changes are noticed immediately if the capability `events` is on, else within 100 ms.
pub fn watch(vm: &mut Vm, watcher: &mut dyn Watch, patience: Duration) -> Result<Trace, DriveError> {
    let mut trace = Trace { began: Instant::now(), seen: Vec::new(), stopped: None, was_cancelled: false };
    let mut undecided_since: Option<Instant> = None;
    let (mut told_paused, mut told_broken, mut told_waiting) = (false, false, false);
    let (mut has_switched, mut convergence) = (false, Convergence::default());
    let (mut stall, mut told_stalled, mut told_silent) = (Stall::default(), false, false);
    let mut told_loading = false;
    loop {
        let progress = match vm.progress() {
            // QEMU answers no command while it writes a stopped guest's last bytes to a slow reader.
            Err(DriveError::Monitor { error: ClientError::TimedOut { .. }, .. }) => {
                pause(vm, watcher, &mut trace)?;
                continue;
            }
            other => other?,
        };
        watcher.show(&progress);
        if progress.missing_bytes > 0 && !std::mem::replace(&mut told_loading, true) {
            watcher.note(&loads_first(vm, progress.missing_bytes));
        }
        let is_over = progress.is_over();
        // The guest may already run at the destination, and the missing confirmation may never arrive.
        let is_unanswered = !vm.is_sterna() && is_unanswered(&trace, &progress);
        let is_undecided =
            ["undecided", "postcopy-paused"].contains(&progress.status.as_str()) || is_unanswered;
        let is_recovering = progress.status.starts_with("postcopy-recover");
        let is_paused = progress.status == "postcopy-paused";
        let goes_on = progress.status == "postcopy-active";
        let waits_for_word = progress.status == "pre-switchover";
        // A Sterna detects a dead connection by itself, and its monitor serves several clients.
        let is_silent = !vm.is_sterna() && stall.has_stalled(trace.began.elapsed(), &progress);
        let is_stalled = is_silent && goes_on;
        // A Sterna detects this by itself, and reports it in an event.
        if !vm.is_sterna()
            && convergence.stands_still(trace.began.elapsed(), &progress)
            && let Some(text) = convergence.warning(vm, &progress)?
        {
            watcher.note(&format!("sterna: warning: {text}"));
        }
        trace.seen.push((trace.began.elapsed(), progress));
        if is_over {
            break;
        }
        if waits_for_word && !told_paused {
            told_paused = true;
            watcher.note(&format!(
                "{}: the guest is stopped before the switchover (capability pause-before-switchover); \
                 `migrate-continue` with state pre-switchover continues",
                vm.at()
            ));
        }
        if is_paused
            && !told_broken
            && let Some(text) = watcher.when_paused()
        {
            watcher.note(&text);
        }
        if goes_on && !std::mem::replace(&mut has_switched, true) {
            watcher.switched();
        }
        if told_broken && goes_on {
            watcher.note("connected again in postcopy; the missing pages are being sent");
        }
        // A source whose guest is stopped only waits for the destination, so its silence is normal.
        if is_silent
            && !goes_on
            && trace.stopped.is_none()
            && !std::mem::replace(&mut told_silent, true)
            && let Some(text) = watcher.when_silent()
        {
            watcher.note(&text);
        }
        if is_stalled
            && !told_stalled
            && let Some(text) = watcher.when_stalled()
        {
            watcher.note(&text);
        }
        if told_stalled && goes_on && !is_stalled {
            watcher.note("the source sends again in postcopy");
        }
        told_stalled = is_stalled || (told_stalled && !goes_on);
        // Attempts to recover belong to the same break.
        told_broken = is_paused || (told_broken && is_recovering);
        if is_undecided {
            let waited = undecided_since.get_or_insert_with(Instant::now).elapsed();
            if is_unanswered && waited >= CONFIRMATION_NOTE.min(patience) && !told_waiting {
                told_waiting = true;
                watcher.note(&format!(
                    "{}: everything is sent and the guest is paused, but the destination has not confirmed the \
                     guest's arrival yet; Ctrl-C cancels, and the guest resumes here",
                    vm.at()
                ));
            }
            if waited >= patience {
                break;
            }
        } else {
            undecided_since = None;
        }
        if is_paused || is_stalled {
            lend(vm, watcher, &mut trace)?;
        } else {
            pause(vm, watcher, &mut trace)?;
        }
    }
    Ok(trace)
}

/// The note about memory that is loaded before anything is sent.
pub(crate) fn loads_first(vm: &Vm, missing_bytes: u64) -> String {
    format!(
        "{}: the guest was restored before its memory was loaded: the last {} MiB are loaded first, at full speed",
        vm.at(),
        missing_bytes.div_ceil(1 << 20)
    )
}

/// Releases the monitors for a while. A QEMU's monitor serves one client at a time, and `sterna recover` needs it to
/// recover the postcopy.
fn lend(vm: &mut Vm, watcher: &mut dyn Watch, trace: &mut Trace) -> Result<(), DriveError> {
    if vm.is_sterna() {
        return pause(vm, watcher, trace);
    }
    vm.let_go();
    if let Some(destination) = watcher.destination() {
        destination.let_go();
    }
    let until = Instant::now() + LENT;
    let mut is_cancelled = false;
    while !is_cancelled && Instant::now() < until {
        match watcher.wish() {
            Wish::Continue | Wish::StartPostcopy => std::thread::sleep(BLINK),
            Wish::Cancel => is_cancelled = true,
            Wish::Detach => return Err(detached(trace)),
        }
    }
    loop {
        match vm.come_back(TAKEN_BACK) {
            Ok(()) => break,
            Err(ClientError::TimedOut { .. }) => match watcher.wish() {
                Wish::Continue | Wish::StartPostcopy => {}
                Wish::Cancel => {
                    watcher.note("another client uses the source's monitor; Ctrl-C again detaches")
                }
                Wish::Detach => return Err(detached(trace)),
            },
            Err(ClientError::Connect { .. }) => {
                return Err(vm.error(ClientError::Closed { during: "a pause in postcopy".to_owned() }));
            }
            Err(error) => return Err(vm.error(error)),
        }
    }
    if is_cancelled {
        trace.was_cancelled = true;
        return cancel(vm, watcher);
    }
    Ok(())
}

fn detached(trace: &Trace) -> DriveError {
    let what = match trace.was_cancelled {
        // In postcopy a source refuses to cancel.
        _ if trace.has_switched() => {
            "the guest is at the destination in postcopy, and its remaining pages are being \
                                      sent"
        }
        true => {
            "the source was asked to cancel, and keeps the guest unless it has handed the guest over already"
        }
        false => "the migration continues",
    };
    DriveError::Detached(format!("detached; {what}"))
}

/// Whether a QEMU only waits for the destination. Everything is sent, the guest is stopped, and no byte was sent
/// since the previous sample.
fn is_unanswered(trace: &Trace, progress: &Progress) -> bool {
    let is_handing_over =
        progress.status == "device" || progress.remaining_bytes == 0 && progress.status == "active";
    let is_silent = |(_, before): &(Duration, Progress)| {
        before.status == progress.status && before.transferred_bytes == progress.transferred_bytes
    };
    trace.stopped.is_some() && is_handing_over && trace.seen.last().is_some_and(is_silent)
}

/// Waits until the next query is due: at an event, at an operator's wish, or after `LOOK`.
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
                Ok(_) => watcher.note(
                    "switching to postcopy: the guest stops at the source and starts at the destination",
                ),
                Err(error) if error.is_disconnect() => return Err(error),
                Err(error) => watcher.note(&error.to_string()),
            },
            Wish::Detach => return Err(detached(trace)),
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        if let Some(event) = vm.next_event(left.min(BLINK))? {
            if event.name == "STOP" {
                trace.stopped = Some(trace.began.elapsed());
            }
            if event.name == "X_STERNA_WARNING"
                && let Some(text) = event.data["warning"].as_str()
            {
                watcher.note(&format!("sterna: warning: {text}"));
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
        Ok(_) => watcher.note(&format!("cancelling: the guest continues to run at the source{hint}")),
        Err(error) if error.is_disconnect() => return Err(error),
        Err(error) => watcher.note(&format!("{error}{hint}")),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_that_detaches_says_which_side_has_the_guest() {
        let text = |status: &str, was_cancelled| {
            let seen = vec![(Duration::ZERO, Progress { status: status.to_owned(), ..Progress::default() })];
            detached(&Trace { began: Instant::now(), seen, stopped: None, was_cancelled }).to_string()
        };

        assert!(text("active", true).contains("the source was asked to cancel"));
        assert!(text("active", false).contains("the migration continues"));
        // In postcopy a source refuses to cancel.
        for was_cancelled in [true, false] {
            assert!(text("postcopy-active", was_cancelled).contains("the guest is at the destination"));
        }
    }
}
