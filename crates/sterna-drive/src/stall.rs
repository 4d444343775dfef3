//! Detects a source that has stopped sending. In postcopy its connection may be dead; in precopy the destination may
//! be waiting for other channels.

use std::time::Duration;

use super::progress::Progress;

/// Time without sent bytes after which a source is stalled. A bandwidth limit causes pauses of 100 ms.
const STALLED_AFTER: Duration = Duration::from_secs(5);

/// The sent bytes at successive samples.
#[derive(Debug, Default)]
pub(super) struct Stall {
    /// (time, bytes, status): since this time the total of sent bytes and the status have not changed.
    since: Option<(Duration, u64, String)>,
}

impl Stall {
    /// Evaluates a sample. True if nothing was sent for five seconds in the status `active` or `postcopy-active`.
    pub(super) fn has_stalled(&mut self, now: Duration, progress: &Progress) -> bool {
        if !matches!(progress.status.as_str(), "active" | "postcopy-active") {
            self.since = None;
            return false;
        }
        let sent = progress.transferred_bytes;
        let seen = match &mut self.since {
            Some(seen) if seen.1 == sent && seen.2 == progress.status => seen,
            other => other.insert((now, sent, progress.status.clone())),
        };
        now.saturating_sub(seen.0) >= STALLED_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_is_stalled_after_five_seconds_of_one_status_in_which_no_byte_is_sent() {
        let mut stall = Stall::default();
        let mut look = |seconds, status: &str, transferred_bytes| {
            let status = status.to_owned();
            let progress = Progress { status, transferred_bytes, ..Progress::default() };
            stall.has_stalled(Duration::from_secs(seconds), &progress)
        };

        assert!(!look(0, "setup", 7) && !look(6, "active", 7) && look(11, "active", 7));
        assert!(!look(12, "postcopy-active", 7) && !look(16, "postcopy-active", 7));
        assert!(!look(17, "postcopy-active", 8), "it has sent");
        assert!(look(22, "postcopy-active", 8) && look(30, "postcopy-active", 8));
        assert!(!look(31, "postcopy-paused", 8), "another word names that");
        assert!(!look(32, "postcopy-active", 8) && look(37, "postcopy-active", 8));
        assert!(!look(38, "postcopy-active", 9));
    }
}
