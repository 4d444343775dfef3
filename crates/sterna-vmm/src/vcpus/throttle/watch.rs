//! Logs problems of the dirty rings for an operator. Each is logged once per tracking period instead of at
//! every check.

use sterna_ram::dirty::KvmDirtyRing;
use sterna_ram::{DirtyError, DirtySource};

/// Event counts of the rings since the machine was built.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    full_exits: u64,
    overruns: u64,
}

/// An event that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum News {
    /// The first overrun since tracking began.
    Overrun,
    /// Tracking has ended. The counts are the events during it.
    Ended(Counts),
    /// The rings cannot be emptied any more.
    Stuck,
}

/// The events that were already logged.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Counts when tracking last did not run. `None` if it has not begun since.
    begun: Option<Counts>,
    before: Counts,
    told_overrun: bool,
    is_stuck: bool,
}

impl Watch {
    /// Records the outcome of one attempt to empty the rings, and logs new events.
    pub(super) fn looked(&mut self, ring: &KvmDirtyRing, look: &Result<(), DirtyError>) {
        if let (Err(error), Some(News::Stuck)) = (look, self.stuck(look.is_err())) {
            // A sync returns the same error to its caller.
            tracing::error!(%error, "the dirty rings cannot be emptied: vCPUs with a full ring do not run");
        }
        let now = Counts { full_exits: ring.full_exits(), overruns: ring.overruns() };
        match self.counted(ring.is_running(), now) {
            Some(News::Overrun) => tracing::warn!(
                entries = ring.entries(),
                "a dirty ring overflowed: the lost pages are unknown, so all pages count as dirty after each \
                 overflow. Give the machine larger rings (--dirty-ring-size), or no rings"
            ),
            Some(News::Ended(counts)) => tracing::info!(
                source = ring.name(),
                entries = ring.entries(),
                full_exits = counts.full_exits,
                overruns = counts.overruns,
                "the dirty rings became full while writes were tracked; larger ones (--dirty-ring-size) slow the guest less"
            ),
            Some(News::Stuck) | None => {}
        }
    }

    fn stuck(&mut self, is_stuck: bool) -> Option<News> {
        let was_stuck = std::mem::replace(&mut self.is_stuck, is_stuck);
        (is_stuck && !was_stuck).then_some(News::Stuck)
    }

    fn counted(&mut self, is_running: bool, now: Counts) -> Option<News> {
        let before = std::mem::replace(&mut self.before, now);
        if !is_running {
            self.told_overrun = false;
            let begun = self.begun.take()?;
            let since = Counts {
                full_exits: now.full_exits - begun.full_exits,
                overruns: now.overruns - begun.overruns,
            };
            return (since != Counts::default()).then_some(News::Ended(since));
        }
        let begun = *self.begun.get_or_insert(before);
        let is_first = now.overruns > begun.overruns && !self.told_overrun;
        self.told_overrun |= is_first;
        is_first.then_some(News::Overrun)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(full_exits: u64, overruns: u64) -> Counts {
        Counts { full_exits, overruns }
    }

    #[test]
    fn watch_tells_of_the_first_overrun_of_each_tracking_and_of_all_at_its_end() {
        let mut watch = Watch::default();
        let mut told = Vec::new();
        for (is_running, now) in [
            (false, counts(0, 0)),
            (true, counts(3, 0)),
            (true, counts(9, 1)),
            (true, counts(20, 5)),
            (false, counts(21, 5)),
            (false, counts(21, 5)),
            (true, counts(21, 5)),
            (false, counts(21, 5)),
            (true, counts(21, 6)),
            (false, counts(21, 6)),
        ] {
            told.push(watch.counted(is_running, now));
        }

        let ended = |full_exits, overruns| Some(News::Ended(counts(full_exits, overruns)));
        let overrun = Some(News::Overrun);
        assert_eq!(told, [None, None, overrun, None, ended(21, 5), None, None, None, overrun, ended(0, 1)]);
    }

    #[test]
    fn watch_tells_once_that_the_rings_cannot_be_emptied() {
        let mut watch = Watch::default();

        let told = [false, true, true, false, true].map(|is_stuck| watch.stuck(is_stuck).is_some());

        assert_eq!(told, [false, true, false, false, true]);
    }
}
