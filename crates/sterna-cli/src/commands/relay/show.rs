//! The sessions on a terminal: a bar each, or lines at intervals.

use std::collections::HashMap;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;
use sterna_relay::frame::SessionId;
use sterna_relay::relay::{Figures, SessionStatus};

use crate::terminal::{self, Shown, Style};
use crate::units;

/// Shows the open sessions.
pub(super) struct Bars {
    style: Style,
    all: MultiProgress,
    sessions: Mutex<HashMap<SessionId, Session>>,
}

struct Session {
    bar: ProgressBar,
    began: Instant,
    /// When the next plain line is due, since `began`.
    due: Duration,
}

impl Bars {
    pub(super) fn new(shown: Shown) -> Self {
        let style = match shown.progress {
            Style::Auto if io::stderr().is_terminal() => Style::Bar,
            Style::Auto => Style::Plain,
            style => style,
        };
        let target = match style {
            Style::Bar => ProgressDrawTarget::stderr_with_hz(10),
            _ => ProgressDrawTarget::hidden(),
        };
        Self { style, all: MultiProgress::with_draw_target(target), sessions: Mutex::default() }
    }

    /// Shows the present figures. Bars of other sessions are removed.
    pub(super) fn show(&self, figures: &[Figures]) {
        let mut sessions = self.sessions.lock();
        sessions.retain(|id, session| {
            let is_open = figures.iter().any(|figures| figures.session == *id);
            if !is_open {
                session.bar.finish_and_clear();
                self.all.remove(&session.bar);
            }
            is_open
        });
        for now in figures {
            let session = sessions.entry(now.session).or_insert_with(|| self.begin(now));
            match self.style {
                Style::Plain => session.line(now),
                Style::Bar => session.draw(now),
                _ => {}
            }
        }
    }

    /// Prints a line above the bars.
    pub(super) fn note(&self, text: &str) {
        match self.style {
            Style::Bar => self.all.suspend(|| terminal::note(text)),
            _ => terminal::note(text),
        }
    }

    /// Removes the bars from the terminal.
    pub(super) fn end(&self) {
        self.show(&[]);
    }

    fn begin(&self, figures: &Figures) -> Session {
        let bar = match self.style {
            Style::Bar => self.all.add(ProgressBar::new(1)),
            _ => ProgressBar::hidden(),
        };
        let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let template = if is_plain {
            "{prefix:>10} {wide_bar} {percent:>3} %\n{msg}"
        } else {
            "{prefix:>10.bold} {wide_bar:.blue} {percent:>3} %\n{msg}"
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.progress_chars("━╸─"));
        bar.set_prefix(figures.route.to_string());
        Session { bar, began: Instant::now(), due: terminal::LINE_INTERVAL }
    }
}

impl Session {
    fn draw(&self, now: &Figures) {
        let total = now.ram_bytes.unwrap_or(0);
        self.bar.set_length(total.max(1));
        // Without the remaining bytes (multifd) the bytes that passed are the best estimate.
        let done = match now.remaining_bytes {
            Some(remaining) => total.saturating_sub(remaining),
            None => now.processed_bytes.min(total),
        };
        self.bar.set_position(done);
        self.bar.set_message(line(now));
    }

    fn line(&mut self, now: &Figures) {
        let age = self.began.elapsed();
        if age >= self.due {
            self.due = terminal::after(age);
            terminal::note(&format!("{:>4} s  {:<10}  {}", age.as_secs(), now.route.to_string(), line(now)));
        }
    }
}

/// Phase, round, rate, remaining RAM, compression ratio and reconnections in one line.
pub(super) fn line(now: &Figures) -> String {
    let mut parts = vec![match &now.phase {
        None => "no migration".to_owned(),
        Some(phase) => phase.word().to_owned(),
    }];
    if now.round > 0 {
        parts.push(format!("round {}", now.round));
    }
    match (now.status, now.lost_for) {
        (SessionStatus::Waiting, _) => {
            parts.push("waiting for the other relay: look at the destination".to_owned())
        }
        (_, Some(lost)) => parts.push(format!("no connection to the other relay for {} s", lost.as_secs())),
        _ => parts.push(units::rate(now.rate as f64)),
    }
    match now.remaining_bytes {
        Some(remaining) => parts.push(format!("{} remaining", units::bytes(remaining))),
        None => parts.push(format!("{} passed", units::bytes(now.processed_bytes))),
    }
    let ratio = now.compression_ratio();
    if ratio > 1.005 {
        parts.push(format!("compressed {ratio:.2} to 1"));
    }
    if let Some(downtime) = now.downtime {
        parts.push(format!("downtime {}", units::seconds(downtime.as_secs_f64())));
    }
    if now.reconnections > 0 {
        let plural = if now.reconnections == 1 { "" } else { "s" };
        parts.push(format!("{} reconnection{plural}", now.reconnections));
    }
    parts.join("  ·  ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn line_has_phase_round_rate_remaining_ram_ratio_and_reconnections() {
        let mut figures = samples::relay_figures();

        assert_eq!(
            line(&figures),
            "ram  ·  round 2  ·  110 MiB/s  ·  1.00 GiB remaining  ·  compressed 2.50 to 1  ·  1 reconnection"
        );
        figures.lost_for = Some(Duration::from_secs(7));
        assert!(line(&figures).contains("no connection to the other relay for 7 s"), "{}", line(&figures));
        (figures.status, figures.remaining_bytes) = (SessionStatus::Waiting, None);
        let waiting = line(&figures);
        assert!(
            waiting.contains("look at the destination") && waiting.contains("5.00 GiB passed"),
            "{waiting}"
        );
    }
}
