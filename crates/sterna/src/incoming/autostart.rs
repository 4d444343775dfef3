//! Whether the guest starts when it is here.

use parking_lot::Mutex;

/// An operator's word whether the guest starts, until it is read.
#[derive(Default)]
pub(super) struct Autostart(Mutex<Word>);

#[derive(Default)]
struct Word {
    stay_paused: bool,
    was_read: bool,
}

impl Autostart {
    /// Whether it will be so.
    pub(super) fn set(&self, on: bool) -> bool {
        let mut word = self.0.lock();
        if !word.was_read {
            word.stay_paused = !on;
        }
        word.stay_paused != on
    }

    /// The last word.
    pub(super) fn read(&self) -> bool {
        let mut word = self.0.lock();
        word.was_read = true;
        !word.stay_paused
    }
}
