//! Who has the guest of a RAM.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::{Acting, Custody, CustodyClaim};
use crate::guest::GuestRam;

impl GuestRam {
    /// Returns who has the guest now. Unless a migration has claimed it, the result may be outdated
    /// immediately.
    pub fn custody(&self) -> Custody {
        self.custody.lock().custody_of(self.generation)
    }

    /// Marks this RAM as replaced and returns the generation of the next RAM.
    ///
    /// # Errors
    /// The current custody, if it does not permit a change of the memory.
    pub(crate) fn next_generation(&self) -> Result<u64, Custody> {
        let mut holder =
            self.custody.lock_between_acts(|holder| match holder.custody_of(self.generation) {
                now if now.may_leave() || now.may_arrive() => Ok(()),
                now => Err(now),
            })?;
        holder.generation += 1;
        Ok(holder.generation)
    }

    /// Claims the guest for a migration, with `custody` as its first state.
    ///
    /// Waits for the end of an operator's action ([`GuestRam::while_free`]).
    ///
    /// # Errors The current custody, if `may` refuses it.
    pub fn claim_custody(
        &self,
        custody: Custody,
        may: impl Fn(Custody) -> bool,
    ) -> Result<CustodyClaim, Custody> {
        let mut holder =
            self.custody.lock_between_acts(|holder| match holder.custody_of(self.generation) {
                now if may(now) && now != Custody::Replaced => Ok(()),
                now => Err(now),
            })?;
        let before = (holder.claim, holder.custody_of(self.generation));
        if !matches!(custody, Custody::Arriving { .. }) {
            self.forget_fresh();
        }
        holder.claims += 1;
        holder.claim = holder.claims;
        holder.custody = custody;
        let number = holder.claim;
        drop(holder);
        Ok(CustodyClaim {
            slot: Arc::clone(&self.custody),
            number,
            before,
            has_spoken: AtomicBool::new(false),
        })
    }

    /// Runs `act`, an operator's `cont` or `stop`, if the guest may run ([`Custody::may_run`]).
    ///
    /// `act` runs under no lock of the engine. It may take as long as a vCPU needs to leave the guest, and may
    /// query any migration of the guest. Acts of several threads run one after the other. No migration stops or
    /// newly claims the guest before `act` has returned. Custody may change while `act` runs: a migration that
    /// takes the guest then waits for `act` to end, and no further act begins.
    ///
    /// # Errors
    /// The current custody, without running `act`, if the guest may not run. This error does not wait for
    /// another act that runs, because that act may wait for a page whose connection was lost.
    ///
    /// # Panics
    /// Inside `act` of another call, because the call would wait for itself.
    pub fn while_free<T>(&self, act: impl FnOnce() -> T) -> Result<T, Custody> {
        crate::engine_lock::assert_none_held("an operator's action (GuestRam::while_free)");
        let mut holder =
            self.custody.lock_between_acts(|holder| match holder.custody_of(self.generation) {
                now if now.may_run() => Ok(()),
                now => Err(now),
            })?;
        holder.acting = Some(std::thread::current().id());
        drop(holder);
        let _acting = Acting(&self.custody);
        Ok(act())
    }

    /// Records that the VMM itself created a new guest here: it booted or loaded one.
    ///
    /// # Errors
    /// The current custody, if a migration still needs the present guest.
    pub fn has_new_guest(&self) -> Result<(), Custody> {
        self.replace(Custody::Free)
    }

    /// Records that the VMM discarded the guest, so that a migration may receive another one.
    ///
    /// # Errors
    /// The current custody, if a migration still needs the present guest.
    pub fn has_no_guest(&self) -> Result<(), Custody> {
        self.replace(Custody::NoGuest)
    }

    /// Ends the statement that memory is fresh, because a guest is or was here.
    fn forget_fresh(&self) {
        for block in self.blocks() {
            block.take_fresh();
        }
    }

    fn replace(&self, now: Custody) -> Result<(), Custody> {
        let mut holder =
            self.custody.lock_between_acts(|holder| match holder.custody_of(self.generation) {
                now if now.may_arrive() || now == Custody::Arrived => Ok(()),
                now => Err(now),
            })?;
        self.forget_fresh();
        // Earlier claims refer to the previous guest and must not change the custody of the new one.
        (holder.custody, holder.claim) = (now, 0);
        Ok(())
    }
}
