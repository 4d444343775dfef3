//! Who has the guest that lives in a [`GuestRam`]: its VMM, a migration, or nobody here.
//!
//! A guest's memory is what identifies a VM to everybody who works on it, so the answer is kept with it. There is one
//! answer for a VM, whatever migrations were tried: a migration claims the guest, says where it stands, and what it
//! said last stays when it has ended.
//!
//! ```text
//! Free ─► Leaving ─► Free        undone: cancelled or failed
//!            │  └──► Held        the undoing failed; a retry goes on
//!            ├─────► Undecided ─► Gone, or undone
//!            ├─────► Gone        the destination has it
//!            └─────► Saved       to a file; it may be let run again
//! Free, Gone, Saved, NoGuest ─► Arriving ─► Arrived, or NoGuest when it failed
//! ```
//!
//! Arrived is as Free, and what is undone returns to it, but nothing arrives in its place. When the guest's memory changes
//! ([`GuestRam::with_blocks`]), its custody goes over to the new RAM, and the old one only says that it was replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::GuestRam;
use parking_lot::{Mutex, MutexGuard};

/// Who has a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Custody {
    /// Its VMM. No migration has anything to say.
    #[default]
    Free,
    /// Its VMM, since a migration has brought it. As [`Custody::Free`], except that no other guest arrives in its place
    /// until the VMM has discarded it ([`GuestRam::has_no_guest`]).
    Arrived,
    /// A migration moves it away.
    Leaving {
        /// It may still run and stop as its operator likes: the switchover has not begun, or is undone.
        is_free: bool,
    },
    /// It was handed over, and nobody here knows whether the destination runs it. It stays stopped.
    Undecided,
    /// A migration could not give it back: it stays stopped, perhaps without its disks and locks.
    Held,
    /// It was saved to a file and stands here, without its disks and locks.
    Saved,
    /// Another VM has it. Here it must not run again.
    Gone,
    /// A migration brings it.
    Arriving {
        /// It is here, and may run and stop as its operator likes.
        is_free: bool,
    },
    /// There is none: the migration that was to bring it has failed, or its VMM has discarded it.
    NoGuest,
    /// The guest has other memory now ([`GuestRam::with_blocks`]): ask that.
    Replaced,
}

impl Custody {
    /// Whether the VMM may let the guest run.
    pub fn may_run(self) -> bool {
        matches!(
            self,
            Self::Free | Self::Arrived | Self::Leaving { is_free: true } | Self::Arriving { is_free: true }
        )
    }

    /// Whether a migration may take the guest away.
    pub fn may_leave(self) -> bool {
        matches!(self, Self::Free | Self::Arrived)
    }

    /// Whether a migration may bring a guest: there is none that anybody else still has a claim to. Of a VM whose guest
    /// is its own ([`Custody::Free`]) only the VMM knows whether there is one.
    pub fn may_arrive(self) -> bool {
        matches!(self, Self::Free | Self::Saved | Self::Gone | Self::NoGuest)
    }
}

/// What clones of one [`GuestRam`] share.
#[derive(Debug, Default)]
pub(crate) struct Slot(Mutex<Holder>);

#[derive(Debug, Default)]
struct Holder {
    custody: Custody,
    /// Which claim is the last one; 0: none, or the VMM has spoken since.
    claim: u64,
    claims: u64,
    /// Which RAM is the guest's: that of this generation.
    generation: u64,
}

impl Holder {
    /// Who has the guest, to one who asks the RAM of `generation`.
    fn custody_of(&self, generation: u64) -> Custody {
        if generation == self.generation { self.custody } else { Custody::Replaced }
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Holder> {
        // Each change is one assignment, so what a panic leaves is whole.
        self.0.lock()
    }
}

/// A migration's claim to a guest. What it has said stays when it is dropped; one that has said nothing leaves the guest
/// as it found it.
#[derive(Debug)]
pub struct CustodyClaim {
    slot: Arc<Slot>,
    number: u64,
    /// Whose word counted before this claim, and what it was.
    before: (u64, Custody),
    has_spoken: AtomicBool,
}

impl CustodyClaim {
    /// Says who has the guest now. False, without an effect, where another claim has followed.
    pub fn set(&self, custody: Custody) -> bool {
        self.has_spoken.store(true, Ordering::Relaxed);
        let mut holder = self.slot.lock();
        let is_mine = holder.claim == self.number;
        if is_mine {
            holder.custody = custody;
        }
        is_mine
    }

    /// As [`CustodyClaim::set`], but only if the answer has been `from`.
    pub fn exchange(&self, from: Custody, to: Custody) -> bool {
        self.has_spoken.store(true, Ordering::Relaxed);
        let mut holder = self.slot.lock();
        let is_so = holder.claim == self.number && holder.custody == from;
        if is_so {
            holder.custody = to;
        }
        is_so
    }

    /// Who has the guest, as this claim's word; `None` where another claim has followed.
    pub fn now(&self) -> Option<Custody> {
        let holder = self.slot.lock();
        (holder.claim == self.number).then_some(holder.custody)
    }

    /// Who had the guest when it was claimed.
    pub fn before(&self) -> Custody {
        self.before.1
    }

    /// The migration never was: the guest is whose it was before, and whoever had a claim to it has it again. This one
    /// says nothing more.
    pub fn give_back(&self) {
        self.has_spoken.store(true, Ordering::Relaxed);
        let mut holder = self.slot.lock();
        if holder.claim == self.number {
            (holder.claim, holder.custody) = self.before;
        }
    }
}

impl Drop for CustodyClaim {
    fn drop(&mut self) {
        if !self.has_spoken.load(Ordering::Relaxed) {
            self.give_back();
        }
    }
}

impl GuestRam {
    /// Who has the guest now. Unless a migration has claimed it, it may change at once.
    pub fn custody(&self) -> Custody {
        self.custody.lock().custody_of(self.generation)
    }

    /// Makes this RAM one that was replaced; gives the generation of the next one.
    ///
    /// # Errors
    /// Who has the guest, where its memory cannot be changed.
    pub(crate) fn next_generation(&self) -> Result<u64, Custody> {
        let mut holder = self.custody.lock();
        let now = holder.custody_of(self.generation);
        if !now.may_leave() && !now.may_arrive() {
            return Err(now);
        }
        holder.generation += 1;
        Ok(holder.generation)
    }

    /// Claims the guest for a migration, which from now on says who has it, beginning with `custody`.
    ///
    /// # Errors
    /// Who has the guest, where `may` says that it cannot be claimed then.
    pub fn claim_custody(
        &self,
        custody: Custody,
        may: impl FnOnce(Custody) -> bool,
    ) -> Result<CustodyClaim, Custody> {
        let mut holder = self.custody.lock();
        let before = (holder.claim, holder.custody_of(self.generation));
        if !may(before.1) || before.1 == Custody::Replaced {
            return Err(before.1);
        }
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

    /// Runs `act`, an operator's `cont` or `stop`, if the guest may run ([`Custody::may_run`]). No migration takes it
    /// before `act` has returned, so `act` must be short and must not ask who has the guest.
    ///
    /// # Errors
    /// Who has the guest, without running `act`, where it may not.
    pub fn while_free<T>(&self, act: impl FnOnce() -> T) -> Result<T, Custody> {
        let holder = self.custody.lock();
        let now = holder.custody_of(self.generation);
        if now.may_run() { Ok(act()) } else { Err(now) }
    }

    /// The VMM has put a new guest here by itself: it booted one, or loaded one in a way of its own.
    ///
    /// # Errors
    /// Who has the guest that is here, where a migration still has to do with it.
    pub fn has_new_guest(&self) -> Result<(), Custody> {
        self.replace(Custody::Free)
    }

    /// The VMM has discarded the guest that was here: the VM is empty, and a migration may bring another.
    ///
    /// # Errors
    /// Who has the guest that is here, where a migration still has to do with it.
    pub fn has_no_guest(&self) -> Result<(), Custody> {
        self.replace(Custody::NoGuest)
    }

    /// There is a guest here, or was one.
    fn forget_fresh(&self) {
        for block in self.blocks() {
            block.take_fresh();
        }
    }

    fn replace(&self, now: Custody) -> Result<(), Custody> {
        let mut holder = self.custody.lock();
        let before = holder.custody_of(self.generation);
        if !before.may_arrive() && before != Custody::Arrived {
            return Err(before);
        }
        self.forget_fresh();
        // Whoever had a claim to the guest before has none to what is here now.
        (holder.custody, holder.claim) = (now, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, RamBlock};

    fn guest() -> GuestRam {
        GuestRam::new(vec![RamBlock::new("ram", 4096, Backing::Anonymous).unwrap()]).unwrap()
    }

    fn leave(ram: &GuestRam) -> Result<CustodyClaim, Custody> {
        ram.claim_custody(Custody::Leaving { is_free: true }, Custody::may_leave)
    }

    #[test]
    fn what_a_migration_said_last_stays_when_it_has_ended() {
        for last in [Custody::Held, Custody::Undecided, Custody::Saved, Custody::Gone] {
            let ram = guest();
            let claim = leave(&ram).unwrap();
            assert!(claim.set(last));
            drop(claim);
            assert_eq!((ram.custody(), leave(&ram.clone()).unwrap_err()), (last, last));
            assert_eq!(ram.while_free(|| ()), Err(last));
        }
    }

    #[test]
    fn claim_that_said_nothing_leaves_the_guest_as_it_was() {
        let ram = guest();
        drop(leave(&ram).unwrap());
        assert_eq!(ram.custody(), Custody::Free);
        leave(&ram).unwrap().set(Custody::Gone);
        let arriving = Custody::Arriving { is_free: false };
        drop(ram.claim_custody(arriving, Custody::may_arrive).unwrap());
        assert_eq!(ram.custody(), Custody::Gone);
    }

    #[test]
    fn claim_that_was_given_back_leaves_the_one_before_it_its_word() {
        for is_dropped in [false, true] {
            let ram = guest();
            let saved = leave(&ram).unwrap();
            saved.set(Custody::Saved);
            let arriving = Custody::Arriving { is_free: false };
            let in_vain = ram.claim_custody(arriving, Custody::may_arrive).unwrap();
            assert_eq!(saved.now(), None);
            if !is_dropped {
                in_vain.give_back();
                assert!(!in_vain.set(Custody::NoGuest), "it was given back");
            }
            drop(in_vain);
            assert_eq!(saved.now(), Some(Custody::Saved));
            assert!(saved.exchange(Custody::Saved, Custody::Free) && ram.custody() == Custody::Free);
        }
    }

    #[test]
    fn claim_that_another_followed_has_nothing_to_say() {
        let ram = guest();
        let first = leave(&ram).unwrap();
        first.set(Custody::Saved);
        let second = ram.claim_custody(Custody::Arriving { is_free: false }, Custody::may_arrive).unwrap();
        assert!(!first.exchange(Custody::Saved, Custody::Free) && !first.set(Custody::Free));
        assert_eq!((first.now(), second.now()), (None, Some(Custody::Arriving { is_free: false })));
        assert!(second.set(Custody::Free));
        assert!(ram.custody().may_run());
    }

    #[test]
    fn new_guest_of_the_vmm_is_free_unless_a_migration_has_the_old_one() {
        let ram = guest();
        let claim = leave(&ram).unwrap();
        for held in [Custody::Leaving { is_free: true }, Custody::Held, Custody::Undecided] {
            claim.set(held);
            assert_eq!(ram.has_new_guest(), Err(held));
        }
        claim.set(Custody::Gone);
        ram.has_new_guest().unwrap();
        assert_eq!(ram.custody(), Custody::Free);
        assert!(!claim.set(Custody::Gone), "its guest was another");
    }

    #[test]
    fn guest_that_has_arrived_is_its_vmms_and_keeps_its_place_until_it_is_discarded() {
        let arrive =
            |ram: &GuestRam| ram.claim_custody(Custody::Arriving { is_free: false }, Custody::may_arrive);
        let ram = guest();
        arrive(&ram).unwrap().set(Custody::Arrived);
        assert!(ram.custody().may_run());
        assert_eq!(arrive(&ram).unwrap_err(), Custody::Arrived);
        let leaving = leave(&ram).unwrap();
        assert_eq!(leaving.before(), Custody::Arrived);
        assert_eq!(ram.has_no_guest(), Err(Custody::Leaving { is_free: true }));
        leaving.set(leaving.before());
        ram.has_no_guest().unwrap();
        assert_eq!((ram.custody(), leave(&ram).unwrap_err()), (Custody::NoGuest, Custody::NoGuest));
        arrive(&ram).unwrap().set(Custody::Arrived);
        ram.has_new_guest().unwrap();
        assert_eq!(ram.custody(), Custody::Free);
    }

    #[test]
    fn panic_of_an_operators_act_leaves_the_answer_whole() {
        let ram = guest();
        let at = ram.clone();
        let panicked = std::thread::spawn(move || at.while_free(|| panic!("told to"))).join();
        assert!(panicked.is_err());
        assert_eq!(ram.while_free(|| 1), Ok(1));
    }
}
