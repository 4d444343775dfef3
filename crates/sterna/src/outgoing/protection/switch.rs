//! Records which parts of the program keep a protected guest from running.
//!
//! The pause of a staged checkpoint is short, and operators wait during it ([`GuestRam::while_free`]). In two
//! other cases the pause is long, and the guest is *withheld*:
//!
//! * A checkpoint that does not fit the staging memory withholds the guest until the checkpoint is sent.
//! * The protection's own machine withholds the guest when a lease ends, or for the last checkpoint.
//!
//! The guest resumes when no part withholds it any more.
//!
//! [`GuestRam::while_free`]: sterna_ram::GuestRam::while_free

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::error::VmError;

/// The part of the program that withholds a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Withholder {
    /// A checkpoint that does not fit the staging memory.
    Checkpoint,
    /// The machine that decides who may run it.
    Overseer,
}

/// The parts that withhold the guest at present.
#[derive(Debug, Default)]
pub(crate) struct GuestSwitch {
    state: Mutex<State>,
    /// A short pause has not resumed a running guest, because its lease had ended.
    ///
    /// The next part that withholds the guest treats it as a running one.
    is_kept: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    checkpoint: bool,
    overseer: bool,
    /// Whether the guest ran before the first part withheld it.
    was_running: bool,
}

impl GuestSwitch {
    /// Records that a pause does not resume the guest, which ran before the pause.
    pub(crate) fn keep(&self) {
        self.is_kept.store(true, Ordering::Release);
    }

    /// Whether a pause has kept a guest that ran. The call clears this record.
    pub(crate) fn take_kept(&self) -> bool {
        self.is_kept.swap(false, Ordering::AcqRel)
    }

    /// `who` withholds the guest. If no other part did before, `stop` stops it and gives whether it ran.
    pub(crate) fn withhold(
        &self,
        who: Withholder,
        stop: impl FnOnce() -> Result<bool, VmError>,
    ) -> Result<(), VmError> {
        let mut state = self.state.lock();
        if !state.checkpoint && !state.overseer {
            state.was_running = stop()?;
        }
        *state.of(who) = true;
        Ok(())
    }

    /// The overseer withholds the guest, unless `may_run` gives true.
    ///
    /// `may_run` is called under this switch's lock. If the overseer gives the guest back because it may run
    /// again, that call comes after this one. Otherwise the guest could stay withheld after the overseer gave it
    /// back.
    pub(crate) fn keep_unless(
        &self,
        may_run: impl FnOnce() -> bool,
        stop: impl FnOnce() -> Result<bool, VmError>,
    ) -> Result<(), VmError> {
        let mut state = self.state.lock();
        if may_run() {
            return Ok(());
        }
        if !state.checkpoint && !state.overseer {
            state.was_running = stop()?;
        }
        state.overseer = true;
        Ok(())
    }

    /// `who` no longer withholds the guest. If no other part does, `go_on` resumes a guest that ran before.
    ///
    /// If `go_on` fails, `who` still withholds the guest.
    pub(crate) fn give_back(
        &self,
        who: Withholder,
        go_on: impl FnOnce(bool) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        let mut state = self.state.lock();
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

    #[test]
    fn guest_that_may_run_again_is_not_kept_after_it_was_given_back() {
        let switch = GuestSwitch::default();
        switch.withhold(Withholder::Checkpoint, || Ok(true)).unwrap();
        switch.withhold(Withholder::Overseer, || panic!("it stands already")).unwrap();
        // The claim is won before the pause ends.
        switch.give_back(Withholder::Overseer, |_| panic!("the checkpoint withholds it")).unwrap();

        switch.keep_unless(|| true, || panic!("it may run")).unwrap();

        let mut went = false;
        switch
            .give_back(Withholder::Checkpoint, |ran| {
                went = ran;
                Ok(())
            })
            .unwrap();
        assert!(went);
        // The lease has ended: the overseer's own order follows.
        switch.keep_unless(|| false, || Ok(true)).unwrap();
        switch.withhold(Withholder::Overseer, || panic!("it stands already")).unwrap();
    }

    #[test]
    fn overseer_gives_nothing_back_between_the_question_and_the_keeping() {
        let switch = GuestSwitch::default();
        let asks = || {
            assert!(switch.state.try_lock().is_none(), "whoever gives back waits");
            false
        };

        switch.keep_unless(asks, || Ok(true)).unwrap();
    }
}
