//! The end of the command: which sessions it waits for, and for how long.

use std::time::{Duration, Instant};

use sterna_relay::relay::{Figures, SessionStatus};

use super::relays::Relays;
use super::show::{self, Bars};
use crate::service::Notifier;

/// Interval between two lines about what the command waits for.
const LINE: Duration = Duration::from_secs(10);
/// Interval between two reports to systemd.
const STATUS: Duration = Duration::from_secs(5);

/// What follows the operator's signals.
pub(super) struct Ending<'a> {
    drain: Option<Duration>,
    notifier: &'a Notifier,
    /// When the first signal came, and when the next line is due.
    since: Option<(Instant, Instant)>,
    has_ended_all: bool,
    status_at: Instant,
    status: String,
}

impl<'a> Ending<'a> {
    pub(super) fn new(drain: Option<Duration>, notifier: &'a Notifier) -> Self {
        let status_at = Instant::now();
        Self { drain, notifier, since: None, has_ended_all: false, status_at, status: String::new() }
    }

    /// The signal with this number, from 1, has come.
    pub(super) fn interrupted(&mut self, count: usize, relays: &Relays, bars: &Bars) {
        relays.close();
        let figures = relays.figures();
        if self.since.is_none() {
            let now = Instant::now();
            self.since = Some((now, now + LINE));
            self.notifier.stopping(&status(&figures));
            if !figures.is_empty() {
                let until = match self.drain {
                    Some(drain) => format!("at most {} s (--drain)", drain.as_secs()),
                    None => "without limit. Interrupt it again to end what is open".to_owned(),
                };
                bars.note(&format!(
                    "sterna: {} open: the relay begins no more, and waits {until}",
                    sessions(figures.len())
                ));
                self.say(&figures, bars);
            }
        }
        if count > 1 && !figures.is_empty() {
            self.end_all("the operator has ended the relay", relays, bars);
        }
    }

    /// Acts on the time that has passed.
    pub(super) fn look(&mut self, figures: &[Figures], relays: &Relays, bars: &Bars) {
        let now = Instant::now();
        if let Some((since, due)) = self.since {
            let is_over = self.drain.is_some_and(|drain| now >= since + drain);
            if is_over && !self.has_ended_all && !figures.is_empty() {
                self.end_all("the time to end the relay is over (--drain)", relays, bars);
            }
            if now >= due && !figures.is_empty() {
                self.since = Some((since, now + LINE));
                self.say(figures, bars);
            }
        }
        let status = status(figures);
        if now >= self.status_at && status != self.status {
            self.status_at = now + STATUS;
            self.notifier.status(&status);
            self.status = status;
        }
    }

    fn end_all(&mut self, why: &str, relays: &Relays, bars: &Bars) {
        self.has_ended_all = true;
        relays.end_all(why);
        bars.note(
            "sterna: open sessions are ended, except those whose destination may have the guest. A third interrupt ends the \
             relay at any price",
        );
    }

    fn say(&self, figures: &[Figures], bars: &Bars) {
        for session in figures {
            bars.note(&format!("sterna: waiting for {}", waited_for(session)));
        }
    }
}

/// One line for `systemctl status`.
pub(super) fn status(figures: &[Figures]) -> String {
    match figures {
        [] => "no session is open".to_owned(),
        [one] => waited_for(one),
        several => {
            let rate: u64 = several.iter().map(|session| session.rate).sum();
            format!("{} open, {}", sessions(several.len()), crate::units::rate(rate as f64))
        }
    }
}

fn sessions(count: usize) -> String {
    if count == 1 { "1 session is".to_owned() } else { format!("{count} sessions are") }
}

/// A session, and what it waits for.
fn waited_for(session: &Figures) -> String {
    let what = match session.status {
        SessionStatus::Waiting => {
            "its destination may have the guest, and the relays have lost each other: look at the destination"
                .to_owned()
        }
        _ => show::line(session),
    };
    format!("session {}, route {}: {what}", session.session, session.route)
}
