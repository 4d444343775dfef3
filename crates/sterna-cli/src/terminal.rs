//! Output for the user: results on standard output, everything else on standard error.
//!
//! Colour and motion are used only on a terminal, and never if `NO_COLOR` is set ([`anstream`] removes
//! colours). Without a terminal, progress is shown as a few plain lines.

use std::borrow::Cow;
use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use owo_colors::OwoColorize;
use sterna_transport::PageFile;

use crate::exit::Stop;
use crate::units;
use sterna_drive::Progress;

/// The first error of writing to standard output.
static OUTPUT_ERROR: OnceLock<io::Error> = OnceLock::new();

/// Prints to standard output. An error is kept for [`output_error`].
pub fn print(text: &str) {
    let mut out = anstream::stdout().lock();
    let end: &[u8] = if text.ends_with('\n') { b"" } else { b"\n" };
    let printed = out.write_all(text.as_bytes()).and_then(|()| out.write_all(end)).and_then(|()| out.flush());
    // A reader that stops early, such as `head`, is no error.
    if let Err(error) = printed
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _ = OUTPUT_ERROR.set(error);
    }
}

/// The first error of writing to standard output; none if everything was written.
pub fn output_error() -> Option<&'static io::Error> {
    OUTPUT_ERROR.get()
}

/// Prints a line for people to standard error.
pub fn note(text: &str) {
    let _ = writeln!(anstream::stderr().lock(), "{}", in_plain_words(text));
}

/// Prints the reason why a command ends early.
pub fn complain(stop: &Stop) {
    let head = format!("{}:", stop.status.head());
    let message = with_options(&stop.message);
    let _ = writeln!(anstream::stderr().lock(), "{} {}", head.red().bold(), in_plain_words(&message));
}

/// Replaces a library's general advice by the name of this command's option.
fn with_options(text: &str) -> String {
    text.replace("choose another name, or ask to replace it", "choose another name, or use `--force`")
}

/// The engine's reasons in a form for operators. With `STERNA_LOG`, nothing is left out.
pub fn in_plain_words(text: &str) -> Cow<'_, str> {
    let has_log = std::env::var_os("STERNA_LOG").is_some_and(|value| !value.is_empty());
    if has_log { Cow::Borrowed(text) } else { without_bytes(text) }
}

/// Removes the byte positions at which connections were closed. They show where in the stream the engine was,
/// which does not help an operator.
fn without_bytes(text: &str) -> Cow<'_, str> {
    const HEAD: &str = "the peer closed at byte ";
    const TAIL: &str = " bytes too early";
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(HEAD) {
        let Some((numbers, more)) = after.split_once(TAIL) else { break };
        if !numbers.chars().all(|c| c.is_ascii_digit() || matches!(c, ',' | ' ')) {
            break;
        }
        plain += before;
        plain += "the other side closed the connection";
        rest = more;
    }
    let text = if plain.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(plain + rest) };
    let text = without_place(text, "closed the return path", " after ", " bytes");
    without_place(text, "closed the main channel early", ": ", " of it")
}

/// Removes the position that follows `what`: from `from` to its number, and `tail` after it.
fn without_place<'a>(text: Cow<'a, str>, what: &str, from: &str, tail: &str) -> Cow<'a, str> {
    let Some(at) = text.find(what).map(|at| at + what.len()).filter(|at| text[*at..].starts_with(from))
    else {
        return text;
    };
    let place = &text[at..];
    let Some(number) = place.find(|c: char| c.is_ascii_digit()) else { return text };
    let after = place[number..].trim_start_matches(|c: char| c.is_ascii_digit());
    let rest = after.strip_prefix(tail).unwrap_or(after);
    Cow::Owned(format!("{}{rest}", &text[..at]))
}

/// Warns of staging files for `place` that killed commands have left. They contain a guest's memory.
pub fn note_stale(place: &Path) {
    for left in PageFile::stale_staging_files(place) {
        note(&stale(&left));
    }
}

/// The warning about a staging file that a killed command has left.
pub fn stale(left: &Path) -> String {
    let changed = std::fs::metadata(left).and_then(|metadata| metadata.modified()).ok();
    let ago = changed.and_then(|changed| changed.elapsed().ok());
    let ago = ago.map_or(String::new(), |ago| format!(" {} ago", units::seconds(ago.as_secs_f64())));
    format!(
        "sterna: warning: a killed command left {}{ago}, which contains a guest's memory: remove it if `sterna \
         verify` does not call it sound, or if it is not needed",
        left.display()
    )
}

/// The result word, in colour if colours are shown.
pub fn verdict(good: bool, text: &str) -> String {
    if good { text.green().bold().to_string() } else { text.red().bold().to_string() }
}

/// How progress is shown.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Shown {
    /// How progress is shown on standard error
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Style::Auto)]
    pub progress: Style,
}

/// A form in which progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Style {
    /// With --json none, else bar on a terminal, and plain elsewhere.
    #[default]
    Auto,
    /// Plain lines: every 5 s, after the first minute every 30 s.
    Plain,
    /// Progress bar.
    Bar,
    /// No progress.
    None,
}

/// Shows a running migration: as a bar, as plain lines, or not at all.
pub struct Live {
    bar: ProgressBar,
    began: Instant,
    /// When the next plain line is due, since `began`; none if no lines are printed.
    due: Cell<Option<Duration>>,
}

impl Live {
    /// Begins the display. `is_json`: the command prints JSON, so progress is shown only on request.
    pub fn new(shown: Shown, is_json: bool) -> Self {
        let style = match shown.progress {
            Style::Auto if is_json => Style::None,
            Style::Auto if io::stderr().is_terminal() => Style::Bar,
            Style::Auto => Style::Plain,
            style => style,
        };
        let bar = ProgressBar::with_draw_target(
            Some(1),
            match style {
                Style::Bar => ProgressDrawTarget::stderr_with_hz(10),
                _ => ProgressDrawTarget::hidden(),
            },
        );
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let template = if plain {
            "{prefix:>10} {wide_bar} {percent:>3} %\n{msg}"
        } else {
            "{prefix:>10.bold} {wide_bar:.blue} {percent:>3} %\n{msg}"
        };
        let style_of_bar =
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style_of_bar.progress_chars("━╸─"));
        let due = (style == Style::Plain).then_some(LINE_INTERVAL);
        Self { bar, began: Instant::now(), due: Cell::new(due) }
    }

    /// Shows the current progress.
    pub fn show(&self, progress: &Progress) {
        if let Some(due) = self.due.get() {
            let now = self.began.elapsed();
            if now >= due {
                self.due.set(Some(after(now)));
                note(&plain_line(now, progress));
            }
            return;
        }
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

    /// As [`note`](Self::note), for other threads.
    pub fn notes(&self) -> impl Fn(&str) + Send + Sync + 'static {
        let bar = self.bar.clone();
        move |text| if bar.is_hidden() { note(text) } else { bar.suspend(|| note(text)) }
    }

    /// Removes the bar from the terminal.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.end();
    }
}

/// Interval between two plain lines in the first minute; the later interval follows.
pub(crate) const LINE_INTERVAL: Duration = Duration::from_secs(5);
const LATER_LINE_INTERVAL: Duration = Duration::from_secs(30);

/// When the line after one at `now` is due.
pub(crate) fn after(now: Duration) -> Duration {
    now + if now < Duration::from_secs(60) { LINE_INTERVAL } else { LATER_LINE_INTERVAL }
}

fn plain_line(now: Duration, progress: &Progress) -> String {
    let text = format!("{:>4} s  {:<10}  {}", now.as_secs(), progress.status, line(progress));
    text.trim_end().to_owned()
}

fn line(progress: &Progress) -> String {
    if progress.missing_bytes > 0 {
        return format!("{} of the guest's memory are loaded first", units::bytes(progress.missing_bytes));
    }
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
    ];
    // The rate is not measured before the end of the first round.
    if progress.round > 1 || progress.dirty_bytes_per_second > 0.0 {
        parts.push(format!("dirty rate {}", units::rate(progress.dirty_bytes_per_second)));
    }
    if let Some(downtime) = progress.downtime_ms {
        parts.push(format!("expected downtime {downtime} ms"));
    }
    parts.join("  ·  ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_drive::Reconnect;

    #[test]
    fn file_that_exists_points_to_the_option() {
        let error = sterna_transport::TransportError::FileExists { file: "a".to_owned() };

        assert_eq!(with_options(&error.to_string()), "a exists: choose another name, or use `--force`");
    }

    #[test]
    fn reason_of_the_engine_loses_its_bytes_and_keeps_the_rest() {
        for (text, plain) in [
            (
                "main channel: the peer closed at byte 6442, 52 bytes too early; the guest runs on",
                "main channel: the other side closed the connection; the guest runs on",
            ),
            (
                "the peer closed at byte 0, 8 bytes too early, the peer closed at byte 1, 7 bytes too early",
                "the other side closed the connection, the other side closed the connection",
            ),
            ("the peer closed at byte x, 8 bytes too early", "the peer closed at byte x, 8 bytes too early"),
            ("the peer closed at byte 7", "the peer closed at byte 7"),
            (
                "the destination closed the return path after 40 bytes: Broken pipe; more",
                "the destination closed the return path: Broken pipe; more",
            ),
            (
                "the source closed the main channel early: element, byte 4250393",
                "the source closed the main channel early",
            ),
            (
                "the source closed the main channel early: footer, byte 7 of it. More",
                "the source closed the main channel early. More",
            ),
            ("it closed the return path: byte 7", "it closed the return path: byte 7"),
            (
                "image: the file ends at byte 9, 8 bytes too early",
                "image: the file ends at byte 9, 8 bytes too early",
            ),
        ] {
            assert_eq!(without_bytes(text), plain);
        }
    }

    #[test]
    fn line_says_how_long_a_lost_connection_is_waited_for() {
        let reconnect = Some(Reconnect { remaining_ms: Some(58_100), ..Reconnect::default() });
        let progress =
            Progress { total_bytes: 4 << 30, remaining_bytes: 1 << 30, reconnect, ..Progress::default() };

        assert_eq!(line(&progress), "connection lost, 59 s left of the window  ·  1.00 GiB remaining");
    }

    #[test]
    fn plain_line_has_the_time_and_the_status_even_before_a_byte_is_known() {
        let waiting = Progress { status: "setup".into(), ..Progress::default() };
        let active = Progress { status: "active".into(), total_bytes: 4 << 30, ..Progress::default() };

        assert_eq!(plain_line(Duration::from_millis(5100), &waiting), "   5 s  setup");
        let line = plain_line(Duration::from_secs(65), &active);
        assert!(line.starts_with("  65 s  active      round 1  ·  "), "{line}");
    }

    #[test]
    fn plain_lines_become_rarer_after_a_minute() {
        assert_eq!(after(Duration::from_secs(5)), Duration::from_secs(10));
        assert_eq!(after(Duration::from_secs(60)), Duration::from_secs(90));
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
        let first = Progress { round: 1, dirty_bytes_per_second: 0.0, ..progress };
        assert!(!line(&first).contains("dirty rate"), "{}", line(&first));
    }
}
