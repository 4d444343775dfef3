//! Probes: pings to a Sterna destination that measure how far it lags behind the source.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Keepalives that wait for an answer.
///
/// A keepalive that follows a flush is a probe: the destination answers it after it has all pages of the round.
#[derive(Debug, Default)]
pub(in crate::outgoing) struct Probes {
    /// In the order of sending. For a probe: when it was written, and how many bytes had not left this host then.
    sent: VecDeque<Option<(Instant, u64)>>,
    last: Option<Instant>,
    answer: Option<(Duration, u64)>,
}

impl Probes {
    /// Whether another probe is due, `interval` after the last. At most one waits for its answer.
    pub(crate) fn is_due(&self, interval: Duration) -> bool {
        self.sent.iter().all(Option::is_none) && self.last.is_none_or(|last| last.elapsed() >= interval)
    }

    /// Records that a probe is written now.
    pub(crate) fn send(&mut self, unsent_bytes: u64) {
        let now = Instant::now();
        self.last = Some(now);
        self.sent.push_back(Some((now, unsent_bytes)));
    }

    /// Records that a keepalive that is no probe is written now.
    pub(crate) fn send_keepalive(&mut self) {
        self.sent.push_back(None);
    }

    /// Records the answer to the oldest keepalive.
    pub(crate) fn answered(&mut self) {
        if let Some(Some((sent, unsent_bytes))) = self.sent.pop_front() {
            self.answer = Some((sent.elapsed(), unsent_bytes));
        }
    }

    /// Whether all keepalives were answered: the destination has read all earlier data.
    #[cfg(feature = "postcopy")]
    pub(crate) fn are_answered(&self) -> bool {
        self.sent.is_empty()
    }

    /// Takes the last probe's answer: its time, and the unsent bytes at its writing.
    ///
    /// Unsent bytes had not left this host.
    pub(crate) fn take_answer(&mut self) -> Option<(Duration, u64)> {
        self.answer.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_belongs_to_the_ping_that_was_sent_first() {
        let mut probes = Probes::default();
        assert!(probes.is_due(Duration::ZERO));

        probes.send_keepalive();
        probes.send(7);
        assert!(!probes.is_due(Duration::ZERO), "one is on its way");

        probes.answered();
        assert_eq!(probes.take_answer(), None);
        probes.answered();
        assert_eq!(probes.take_answer().map(|(_, unsent)| unsent), Some(7));
        assert_eq!(probes.take_answer(), None);
        assert!(probes.is_due(Duration::ZERO) && !probes.is_due(Duration::from_secs(3600)));
        // An answer without a question.
        probes.answered();
        assert_eq!(probes.take_answer(), None);
    }
}
