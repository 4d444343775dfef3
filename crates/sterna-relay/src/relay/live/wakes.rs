//! Wakes the threads that have work, and no others.

use super::{Live, State};
use crate::session::CarrierId;

/// From so many flows on that wait for room, each is woken without a look at its room.
const MANY: usize = 16;

impl State {
    /// Removes a carrier, and ends its connection. False: it is not there.
    pub(super) fn close_carrier(&mut self, id: CarrierId) -> bool {
        let place = self.carriers.remove(&id);
        if let Some(place) = &place {
            place.channel.shutdown();
            place.wake.notify_all();
        }
        place.is_some()
    }

    /// Wakes the thread that writes the flow's deliveries if there is one, unless another thread writes.
    pub(super) fn wake_delivery(&mut self, flow: u32) {
        if self.session.next_delivery(flow).is_none() {
            return;
        }
        let place = self.vmms.get_mut(&flow).filter(|place| place.is_waiting && !place.is_delivering);
        if let Some(place) = place {
            place.is_waiting = false;
            place.deliveries.notify_one();
        }
    }
}

impl Live {
    /// Wakes the threads of carriers that have something to send.
    pub(super) fn wake_carriers(&self, state: &mut State) {
        let now = self.now();
        let State { session, carriers, .. } = state;
        for (id, place) in carriers {
            let is_idle = place.is_waiting && !place.is_writing;
            if is_idle && (session.has_frame(*id, now) || session.holds(now)) {
                place.is_waiting = false;
                place.wake.notify_one();
            }
        }
    }

    /// Wakes the readers of flows that may take bytes again.
    pub(super) fn wake_for_room(&self, state: &mut State) {
        let now = self.now();
        let State { session, vmms, .. } = state;
        let are_many = vmms.values().filter(|place| place.waits_for_room).count() > MANY;
        for (flow, place) in vmms.iter_mut().filter(|(_, place)| place.waits_for_room) {
            let is_over = session.is_over() || session.progress(*flow).is_none();
            if are_many || is_over || session.room(*flow, now) > 0 {
                place.waits_for_room = false;
                place.room.notify_one();
            }
        }
    }
}
