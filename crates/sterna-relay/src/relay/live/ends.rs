//! The end of a session: who may close what, and what the operator reads.

use std::time::Instant;

use super::{Live, LiveStatus, State};
use crate::frame::{ResetReason, Verdict};
use crate::phase::{Closing, Heard, StreamState};
use crate::relay::options::Notice;
use crate::session::Role;

impl Live {
    /// The other relay has said how its session ended, in the answer to a hello.
    pub(in crate::relay) fn heard(&self, heard: Heard, why: &str) {
        let mut state = self.lock();
        let closing = state.main.heard(heard);
        self.act(&mut state, closing, why);
        self.settle(&mut state);
    }

    /// Ends the session if the migration permits it.
    pub(in crate::relay) fn stop(&self, why: &str) {
        let mut state = self.lock();
        self.give_up(&mut state, why);
        self.settle(&mut state);
    }

    pub(super) fn give_up(&self, state: &mut State, why: &str) {
        let closing = state.main.give_up();
        self.act(state, closing, why);
    }

    pub(super) fn act(&self, state: &mut State, closing: Closing, why: &str) {
        match closing {
            Closing::Close | Closing::Nothing => self.close(state, why, false),
            Closing::Wait if state.status == LiveStatus::Running => {
                state.status = LiveStatus::Waiting;
                let advice = format!("{why}. {}", self.advice());
                self.options.notices.send(Notice::Waiting { session: self.id, advice });
            }
            Closing::Wait => {}
        }
    }

    fn advice(&self) -> &'static str {
        match self.role {
            Role::Dialer => {
                "The end of the guest's stream was sent, so the destination may run the guest. The source's VMM is kept \
                 waiting, and its guest stays stopped. Look at the destination: if the guest runs there, end the source's \
                 VMM. If it does not and never will, cancel the migration at the source, which resumes its guest"
            }
            Role::Acceptor => {
                "The end of the guest's stream was passed on, so the guest may run here, and the source does not know it. \
                 Keep this relay running until the other one has reached it. If the other relay does not come back and the \
                 guest runs here, end the source's VMM"
            }
        }
    }

    pub(super) fn close(&self, state: &mut State, why: &str, in_order: bool) {
        if state.status == LiveStatus::Over {
            return;
        }
        state.status = LiveStatus::Over;
        state.over_at = Some(Instant::now());
        self.cancel.cancel();
        for flow in state.vmms.keys().copied().collect::<Vec<_>>() {
            state.session.reset(flow, ResetReason::SessionOver);
        }
        let verdict = state.main.verdict();
        state.session.end(verdict, why);
        state.vmms.drain().for_each(|(_, place)| place.close());
        self.connector.notify_all();
        let how = match state.main.state() {
            StreamState::Postcopy if !in_order => format!(
                "{why}. Both VMMs have paused the postcopy migration: when the network is back, run migrate-recover at the \
                 destination and migrate with resume at the source, through this relay"
            ),
            StreamState::Open | StreamState::Closed if !in_order && self.role == Role::Dialer => {
                format!("{why}. The guest runs at the source")
            }
            _ => why.to_owned(),
        };
        if state.packing.known().is_some() {
            let mut figures = state.packing.figures();
            figures.misses = state.session.counters().misses;
            self.options.notices.send(Notice::Compressed { session: self.id, figures });
        }
        let figures = Box::new(self.figures_of(state));
        self.options.notices.send(Notice::Ended { session: self.id, how, in_order, figures });
    }

    pub(super) fn peer_is_over(&self, state: &mut State, verdict: Verdict, text: &str) {
        let why = format!("the other relay has ended the session: {text}");
        match self.role {
            Role::Dialer => {
                let heard = if verdict == Verdict::Never { Heard::Never } else { Heard::Passed };
                let closing = state.main.heard(heard);
                self.act(state, closing, &why);
            }
            // The dialer ends a session only when its VMM's connections are closed, or may be closed.
            Role::Acceptor => {
                let in_order = state.session.open_flows() == 0;
                state.main.give_up();
                self.close(state, &why, in_order);
            }
        }
    }
}
