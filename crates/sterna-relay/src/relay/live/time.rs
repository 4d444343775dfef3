//! What time brings: silent carriers, windows that end, sessions without flows.

use std::time::{Duration, Instant};

use super::{Live, LiveStatus, State};
use crate::phase::StreamState;
use crate::relay::readiness::is_hung_up;
use crate::session::Role;

/// Interval in which time is looked at.
const TICK: Duration = Duration::from_millis(50);
/// How long a session without flows stays open, for a main channel that is recovered.
const LINGER: Duration = Duration::from_secs(2);
/// How long OVER may take to be sent.
const FAREWELL: Duration = Duration::from_secs(2);
const OVER: &str = "all flows are over";
const GONE: &str = "the source's VMM has closed its connections while the other relay was away";

impl Live {
    /// Looks at the time until the session is over. One thread runs it.
    pub(in crate::relay) fn keep_time(&self) {
        loop {
            std::thread::sleep(TICK);
            let mut state = self.lock();
            let now = self.now();
            let (passed, _) = self.passed(&state.session.counters());
            state.meter.note(now, passed);
            state.session.tick(now);
            self.settle(&mut state);
            if let Some(over_at) = state.over_at {
                if over_at.elapsed() > FAREWELL || state.carriers.is_empty() {
                    let carriers: Vec<_> = state.carriers.keys().copied().collect();
                    carriers.into_iter().for_each(|id| _ = state.close_carrier(id));
                    self.connector.notify_all();
                    return;
                }
                continue;
            }
            if state.status == LiveStatus::Waiting {
                match state.main.flow() {
                    None => {
                        let in_order = state.main.state() == StreamState::Answered;
                        self.close(&mut state, "the migration is over", in_order);
                    }
                    // The destination's VMM may have closed after its answer, which still has to arrive.
                    Some(flow) if self.role == Role::Dialer && self.is_hung_up(&state, flow) => {
                        self.close(&mut state, "the VMM has closed the connection", false);
                    }
                    Some(_) => {}
                }
            }
            let lost = state.lost.as_ref().filter(|_| state.status == LiveStatus::Running);
            if let Some((since, why)) = lost
                && since.elapsed() > self.options.reconnect_window
            {
                let window = self.options.reconnect_window.as_secs_f64();
                let why =
                    format!("the other relay was not reached for {window} s (--reconnect-window): {why}");
                self.give_up(&mut state, &why);
            }
            self.look_for_the_end(&mut state);
            self.settle(&mut state);
        }
    }

    /// Ends a session whose flows are over, or whose VMMs have gone while there is no carrier.
    fn look_for_the_end(&self, state: &mut State) {
        if state.status != LiveStatus::Running {
            return;
        }
        let is_lost = state.lost.is_some();
        let is_answered = state.main.state() == StreamState::Answered;
        if state.session.open_flows() > 0 {
            state.idle_since = None;
            // A source that has its answer needs nothing more, and its destination neither. A source without an answer
            // has failed. Other VMMs may close their connections before their bytes have arrived.
            let may_end = is_answered || (self.role == Role::Dialer && state.main.has_main());
            let have_gone =
                !state.vmms.is_empty() && state.vmms.keys().all(|flow| self.is_hung_up(state, *flow));
            if is_lost && may_end && have_gone {
                let why = if is_answered { OVER } else { GONE };
                self.close(state, why, is_answered);
            }
            return;
        }
        let since = *state.idle_since.get_or_insert_with(Instant::now);
        if since.elapsed() <= LINGER {
            return;
        }
        // The acceptor waits for the dialer's OVER, unless it cannot arrive any more.
        if self.role == Role::Dialer || (is_lost && is_answered) {
            self.close(state, OVER, true);
        }
    }

    pub(super) fn is_hung_up(&self, state: &State, flow: u32) -> bool {
        state.vmms.get(&flow).is_none_or(|place| is_hung_up(&place.channel))
    }
}
