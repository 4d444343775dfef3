//! Who keeps the guest from running while it is protected.
//!
//! The pause of a checkpoint that is staged is short: it is taken while operators wait ([`GuestRam::while_free`]). Two others are long, and
//! then the guest is withheld: by a checkpoint that does not fit the staging memory, until it is sent; and by the protection's own machine
//! (a lease that ended, a last checkpoint). The guest goes on when nobody withholds it any more.
//!
//! [`GuestRam::while_free`]: sterna_ram::GuestRam::while_free

use parking_lot::Mutex;

use crate::error::VmError;

/// Who withholds a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Withholder {
    /// A checkpoint that is not staged.
    Checkpoint,
    /// The machine that decides who may run it.
    Overseer,
}

/// Who withholds the guest now.
#[derive(Debug, Default)]
pub(crate) struct GuestSwitch(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    checkpoint: bool,
    overseer: bool,
    /// Whether it ran before the first of them.
    was_running: bool,
}

impl GuestSwitch {
    /// `who` withholds the guest. If nobody did before, `stop` stops it and says whether it ran.
    pub(crate) fn withhold(
        &self,
        who: Withholder,
        stop: impl FnOnce() -> Result<bool, VmError>,
    ) -> Result<(), VmError> {
        let mut state = self.0.lock();
        if !state.checkpoint && !state.overseer {
            state.was_running = stop()?;
        }
        *state.of(who) = true;
        Ok(())
    }

    /// `who` withholds it no longer. If nobody does, `go_on` lets it run, if it ran before. If that fails, `who` withholds it still.
    pub(crate) fn give_back(
        &self,
        who: Withholder,
        go_on: impl FnOnce(bool) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        let mut state = self.0.lock();
        if !std::mem::replace(state.of(who), false) || state.checkpoint || state.overseer {
            return Ok(());
        }
        go_on(state.was_running).inspect_err(|_| *state.of(who) = true)
    }
}

impl State {
    fn of(&mut self, who: Withholder) -> &mut bool {
        match who {
            Withholder::Checkpoint => &mut self.checkpoint,
            Withholder::Overseer => &mut self.overseer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_goes_on_when_nobody_withholds_it_any_more() {
        let switch = GuestSwitch::default();
        let goes_on = |who| {
            let mut went = false;
            let note = |ran| {
                went = ran;
                Ok(())
            };
            switch.give_back(who, note).unwrap();
            went
        };
        switch.withhold(Withholder::Checkpoint, || Ok(true)).unwrap();
        switch.withhold(Withholder::Overseer, || panic!("it stands already")).unwrap();

        assert!(!goes_on(Withholder::Checkpoint));
        assert!(goes_on(Withholder::Overseer));
        assert!(!goes_on(Withholder::Overseer), "once only");

        switch.withhold(Withholder::Overseer, || Ok(false)).unwrap();
        assert!(!goes_on(Withholder::Overseer), "its operator had paused it");
    }
}
