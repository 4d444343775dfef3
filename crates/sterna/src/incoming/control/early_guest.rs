//! Postcopy on the control thread: a guest that runs while pages are missing, and the handling of a lost
//! connection.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_proto::destination::{Action, Destination, Event as Fed};
use sterna_wire::return_path::ReturnMessage;

use super::Control;
use crate::driver::{Driver, Waited};
use crate::error::BadPage;
use crate::incoming::arriving::LastWord;
use crate::incoming::loader::following;
use crate::incoming::postcopy;
use crate::threads::ThreadRole;

/// How long a source may take to read the last message of a connection.
const LAST_WORD: Duration = Duration::from_secs(1);

impl Control {
    /// The guest was started, or taken over paused: tells the source, which continues to send pages.
    pub(super) fn say_started(&mut self) {
        if let Err(error) = postcopy::has_started(&self.shared) {
            tracing::debug!(%error, "return path");
        }
    }

    /// EOF was read: waits for pages that are still on their way on the preempt channel.
    pub(super) fn finish_pages(&mut self, driver: &Driver<Destination>) {
        if !driver.inspect(|machine| machine.is_still_due(Action::FinishPages)) {
            return;
        }
        let Some(arriving) = self.shared.postcopy.arriving().map(Arc::clone) else { return };
        let stall = self.shared.params.limits.stall;
        let mut seen = (arriving.left(), Instant::now());
        loop {
            match driver.wait(postcopy::LOOK, || (arriving.left() == 0).then_some(())) {
                Waited::Got(()) => break,
                Waited::Interrupted => return driver.put_back(Action::FinishPages),
                Waited::TimedOut => {}
            }
            let left = arriving.left();
            if left != seen.0 {
                seen = (left, Instant::now());
            } else if seen.1.elapsed() >= stall {
                self.shared.note_error(BadPage::Missing { left }.into());
                return self.shared.report(Fed::PagesFailed);
            }
        }
        self.shared.postcopy.let_go();
        self.shared.report(Fed::PagesComplete);
    }

    /// The connection is lost. Threads that wait for a page keep waiting. If all pages had arrived, only the
    /// end of the stream was lost.
    pub(super) fn keep_waiting(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.rounds.stop();
        self.say_last_word();
        self.shared.places.end();
        self.shared.postcopy.shut_preempt();
        self.join();
        self.shared.postcopy.forget_channels();
        // No thread places pages any more. Reported before `ChannelsClosed`, so that no recovery can begin in
        // between.
        if self.shared.postcopy.arriving().is_some_and(|arriving| arriving.left() == 0) {
            self.shared.postcopy.let_go();
            self.shared.report(Fed::PagesComplete);
        }
        self.shared.report(Fed::ChannelsClosed);
    }

    /// Tells a Sterna source if it must not reconnect by itself.
    fn say_last_word(&mut self) {
        let Some(word) = self.shared.postcopy.last_word() else { return };
        if self.shared.secret.lock().is_none() {
            return;
        }
        if let Some(main) = self.shared.places.main() {
            // A source that does not read must not block this thread.
            main.set_own_stall_limit(Some(LAST_WORD));
        }
        self.send(&ReturnMessage::Shut(word.code()));
    }

    /// Why the missing pages do not arrive.
    pub(super) fn why_pages_do_not_come(&self) -> String {
        let why = self.shared.error().map_or_else(|| "reason unknown".to_owned(), |error| error.to_string());
        match self.shared.postcopy.last_word() {
            Some(LastWord::Paused) => {
                "an operator ended the connection to the source (migrate-pause)".to_owned()
            }
            Some(LastWord::PageFailed) => format!(
                "a page of the guest could not be placed for the second time ({why}), so the source does not connect again by \
                 itself"
            ),
            None => format!("the connection to the source broke ({why})"),
        }
    }

    /// The source has reconnected. It asks which pages are here, and sends the others.
    pub(super) fn recover(&mut self) {
        let Some(main) = self.shared.places.main() else { return };
        self.shared.forget_error();
        let was_final = self.shared.postcopy.last_word().is_some();
        self.shared.postcopy.set_paused(false);
        if let Some(arriving) = self.shared.postcopy.arriving() {
            if was_final {
                // The source must not reconnect by itself in this case. Therefore an operator has requested the
                // connection.
                arriving.forget_failures();
            }
            arriving.begin_recovery();
        }
        self.shared.rounds.begin_recovery();
        self.shared.stopping.store(false, Ordering::Release);
        let shared = Arc::clone(&self.shared);
        self.start(ThreadRole::Loader, move || following::recover(&shared, &main));
    }

    /// Pages arrive again. If the message cannot be sent, this connection is lost as well.
    pub(super) fn say_resumed(&mut self) {
        if let Err(error) = postcopy::recovery::say_resumed(&self.shared) {
            self.shared.fail(error);
        }
    }
}
