//! The news of the session's machine, and the notices that follow.

use std::time::Instant;

use super::{Live, State};
use crate::relay::options::Notice;
use crate::session::Event;

impl Live {
    /// Acts on the news of the session. Returns whether there were any.
    pub(super) fn settle(&self, state: &mut State) -> bool {
        let mut has_changed = false;
        loop {
            let events = state.session.take_events();
            if events.is_empty() {
                return has_changed;
            }
            has_changed = true;
            for event in events {
                match event {
                    Event::Send => {
                        self.to_carriers.notify_all();
                    }
                    Event::Room => {
                        self.room.notify_all();
                    }
                    Event::Deliver(_) => {
                        self.to_vmms.notify_all();
                    }
                    Event::Connect(flow) => {
                        state.connects.push_back(flow);
                        self.to_vmms.notify_all();
                    }
                    Event::Stopped(flow) => {
                        if let Some(channel) = state.vmms.get(&flow) {
                            channel.finish_reading();
                        }
                        self.room.notify_all();
                    }
                    Event::Gone(flow) => {
                        state.main.gone(flow);
                        if let Some(channel) = state.vmms.remove(&flow) {
                            channel.shutdown();
                        }
                        self.wake();
                    }
                    Event::Close(id) => {
                        if let Some(channel) = state.carriers.remove(&id) {
                            channel.shutdown();
                        }
                        state.session.carrier_down(id, self.now());
                        if state.carriers.is_empty() && state.lost.is_none() {
                            let why = "it was silent for too long".to_owned();
                            state.lost = Some((Instant::now(), why.clone()));
                            self.options.notices.send(Notice::Lost { session: self.id, why });
                        }
                        self.to_carriers.notify_all();
                    }
                    Event::Over(verdict, text) => self.peer_is_over(state, verdict, &text),
                }
            }
        }
    }

    pub(super) fn note_phase(&self, state: &mut State) {
        let now = self.now();
        let State { meter, main, .. } = state;
        meter.look(now, main);
        let Some(phase) = main.phase() else { return };
        if state.phase.as_ref() == Some(phase) {
            return;
        }
        let phase = phase.clone();
        self.share.set_first(phase.is_switchover());
        self.options.notices.send(Notice::Phase { session: self.id, phase: phase.clone() });
        state.phase = Some(phase);
    }

    pub(super) fn wake(&self) {
        self.to_carriers.notify_all();
        self.room.notify_all();
        self.to_vmms.notify_all();
    }
}
