//! The decision whether the guest starts when it has arrived.

use parking_lot::Mutex;

/// The operator's decision. It can be changed until a handover uses it.
#[derive(Default)]
pub(super) struct Autostart(Mutex<Decision>);

#[derive(Default)]
struct Decision {
    stay_paused: bool,
    /// True while a handover uses the decision: everything is loaded.
    is_used: bool,
}

impl Autostart {
    /// Decides, unless a handover uses the decision. Returns whether the guest will start as `on` requests.
    pub(super) fn set(&self, on: bool) -> bool {
        let mut decision = self.0.lock();
        if !decision.is_used {
            decision.stay_paused = !on;
        }
        decision.stay_paused != on
    }

    /// Fixes the decision for a handover. Returns whether the guest starts.
    pub(super) fn begin_use(&self) -> bool {
        let mut decision = self.0.lock();
        decision.is_used = true;
        !decision.stay_paused
    }

    /// Makes the decision changeable again: the connection was lost before the commit. The guest runs at the
    /// source, and the next handover uses the latest decision.
    pub(super) fn end_use(&self) {
        self.0.lock().is_used = false;
    }
}
