//! The news of the session's machine, and the notices that follow.

use std::time::Instant;

use super::{Live, State};
use crate::relay::options::Notice;
use crate::session::Event;

impl Live {
    /// Acts on the news of the session. Returns whether there were any.
    pub(super) fn settle(&self, state: &mut State) -> bool {
        let (mut has_changed, mut sends, mut has_room) = (false, false, false);
        loop {
            let events = state.session.take_events();
            if events.is_empty() {
                break;
            }
            has_changed = true;
            for event in events {
                match event {
                    Event::Send => sends = true,
                    Event::Room => has_room = true,
                    Event::Deliver(flow) => state.wake_delivery(flow),
                    Event::Connect(flow) => {
                        state.connects.push_back(flow);
                        self.connector.notify_all();
                    }
                    Event::Stopped(flow) => {
                        if let Some(place) = state.vmms.get(&flow) {
                            place.channel.finish_reading();
                            place.room.notify_all();
                        }
                    }
                    Event::Gone(flow) => {
                        state.main.gone(flow);
                        if let Some(place) = state.vmms.remove(&flow) {
                            place.close();
                        }
                    }
                    Event::Close(id) => {
                        state.close_carrier(id);
                        state.session.carrier_down(id, self.now());
                        if state.carriers.is_empty() && state.lost.is_none() {
                            let why = "it was silent for too long".to_owned();
                            state.lost = Some((Instant::now(), why.clone()));
                            self.options.notices.send(Notice::Lost { session: self.id, why });
                        }
                    }
                    Event::Over(verdict, text) => {
                        self.peer_is_over(state, verdict, &text);
                        has_room = true;
                    }
                }
            }
        }
        if sends {
            self.wake_carriers(state);
        }
        if has_room {
            self.wake_for_room(state);
        }
        has_changed
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
}
