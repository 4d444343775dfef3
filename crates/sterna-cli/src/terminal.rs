//! What the user sees: figures on standard output, the rest on standard error.
//!
//! Colour and motion only on a terminal and never when `NO_COLOR` is set ([`anstream`] takes colours out);
//! elsewhere plain lines, and few.

use std::io::{IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use owo_colors::OwoColorize;
use sterna_transport::PageFile;

use crate::exit::Stop;
use crate::monitor::Progress;
use crate::units;

/// Prints to standard output. A reader that has gone away is no error of ours.
pub fn print(text: &str) {
    let mut out = anstream::stdout().lock();
    let _ = out.write_all(text.as_bytes());
    if !text.ends_with('\n') {
        let _ = out.write_all(b"\n");
    }
    let _ = out.flush();
}

/// Prints a line for people to standard error.
pub fn note(text: &str) {
    let _ = writeln!(anstream::stderr().lock(), "{text}");
}

/// Prints the sentence with which a command ends early.
pub fn complain(stop: &Stop) {
    let head = format!("{}:", stop.status.head());
    let _ = writeln!(anstream::stderr().lock(), "{} {}", head.red().bold(), stop.message);
}

/// Tells of files for `place` that a run left aside when it was killed: they hold a guest's memory.
pub fn note_stale(place: &Path) {
    for left in PageFile::stale_staging_files(place) {
        note(&stale(&left));
    }
}

/// What to do about a file that a run which was killed left behind.
pub fn stale(left: &Path) -> String {
    let changed = std::fs::metadata(left).and_then(|metadata| metadata.modified()).ok();
    let ago = changed.and_then(|changed| changed.elapsed().ok());
    let ago = ago.map_or(String::new(), |ago| format!(" {} ago", units::seconds(ago.as_secs_f64())));
    format!(
        "sterna: warning: {} was left by a killed run{ago} and contains a guest's memory: remove it if \
         `sterna verify` does not call it sound, or if it is not needed",
        left.display()
    )
}

/// The verdict's word, coloured where colours are shown.
pub fn verdict(good: bool, text: &str) -> String {
    if good { text.green().bold().to_string() } else { text.red().bold().to_string() }
}

/// A migration under way: a bar on a terminal, nothing elsewhere.
pub struct Live {
    bar: ProgressBar,
}

impl Live {
    /// Begins to show; `quiet` never shows.
    pub fn new(quiet: bool) -> Self {
        let shown = !quiet && std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(
            Some(1),
            if shown { ProgressDrawTarget::stderr_with_hz(10) } else { ProgressDrawTarget::hidden() },
        );
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let template = if plain {
            "{prefix:>10} {wide_bar} {percent:>3} %\n{msg}"
        } else {
            "{prefix:>10.bold} {wide_bar:.blue} {percent:>3} %\n{msg}"
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.progress_chars("━╸─"));
        Self { bar }
    }

    /// Shows how far it is.
    pub fn show(&self, progress: &Progress) {
        let total = progress.total_bytes.max(1);
        self.bar.set_length(total);
        self.bar.set_position(total.saturating_sub(progress.remaining_bytes));
        self.bar.set_prefix(progress.status.clone());
        self.bar.set_message(line(progress));
    }

    /// Prints a line above the bar.
    pub fn note(&self, text: &str) {
        if self.bar.is_hidden() { note(text) } else { self.bar.suspend(|| note(text)) }
    }

    /// Takes the bar away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.end();
    }
}

fn line(progress: &Progress) -> String {
    if progress.total_bytes == 0 {
        return String::new();
    }
    if let Some(left) = progress.reconnect.and_then(|reconnect| reconnect.remaining_ms) {
        return format!(
            "connection lost, {} s left of the window  ·  {} remaining",
            left.div_ceil(1000),
            units::bytes(progress.remaining_bytes)
        );
    }
    let mut parts = vec![
        format!("round {}", progress.round.max(1)),
        units::rate(progress.bandwidth_bytes),
        format!("{} remaining", units::bytes(progress.remaining_bytes)),
        format!("dirty rate {}", units::rate(progress.dirty_bytes_per_second)),
    ];
    if let Some(downtime) = progress.downtime_ms {
        parts.push(format!("expected downtime {downtime} ms"));
    }
    parts.join("  ·  ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_qmp::drive::Reconnect;

    #[test]
    fn line_says_how_long_a_lost_connection_is_waited_for() {
        let reconnect = Some(Reconnect { remaining_ms: Some(58_100), ..Reconnect::default() });
        let progress =
            Progress { total_bytes: 4 << 30, remaining_bytes: 1 << 30, reconnect, ..Progress::default() };

        assert_eq!(line(&progress), "connection lost, 59 s left of the window  ·  1.00 GiB remaining");
    }

    #[test]
    fn line_shows_rate_remaining_dirty_rate_and_expected_downtime() {
        let progress = Progress {
            total_bytes: 4 << 30,
            remaining_bytes: 1 << 30,
            bandwidth_bytes: f64::from(1 << 30),
            dirty_bytes_per_second: f64::from(200 << 20),
            downtime_ms: Some(45),
            round: 2,
            ..Progress::default()
        };

        assert_eq!(
            line(&progress),
            "round 2  ·  1.00 GiB/s  ·  1.00 GiB remaining  ·  dirty rate 200 MiB/s  ·  expected downtime 45 ms"
        );
    }
}
