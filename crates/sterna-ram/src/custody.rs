//! Records who has the guest in a [`GuestRam`]: its VMM, a migration, or another side.
//!
//! All parts of a VM identify the guest by its memory, so custody is stored with the memory. A VM has one
//! custody for all its migrations. A migration claims the guest and records its state; the last state remains
//! after the migration has ended.
//!
//! ```text
//! Free ─► Leaving ─► Free        undone: cancelled or failed
//!            │  └──► Held        the undo failed; a retry can continue it
//!            ├─────► Undecided ─► Gone, or undone
//!            ├─────► Gone        the destination has the guest
//!            └─────► Saved       saved to a file; the guest may be resumed
//! Free, Gone, Saved, NoGuest ─► Arriving ─► Arrived, or NoGuest after a failure
//! ```
//!
//! An operator's act (`cont`, `stop`) runs without a lock: [`GuestRam::while_free`](crate::GuestRam::while_free) marks that it runs. A
//! migration may take the guest during the act, by one assignment that does not wait. It waits for the end of
//! the act before it stops or changes the guest ([`CustodyClaim::wait_for_act`]). Pages that a vCPU needs can
//! therefore be received even while the act waits for that vCPU.
//!
//! Arrived permits the same as Free, and an undone migration returns to it, but no other guest may arrive. When
//! the guest's memory changes ([`GuestRam::with_blocks`](crate::GuestRam::with_blocks)), custody moves to the new RAM, and the old RAM
//! reports [`Custody::Replaced`].

mod of_guest;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use parking_lot::Condvar;

use crate::engine_lock::{EngineGuard, EngineLock};

/// The side or the migration that has a guest, and the state of the handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Custody {
    /// The VMM has the guest, and no migration restricts it.
    #[default]
    Free,
    /// The VMM has the guest, which arrived by a migration.
    ///
    /// It differs from [`Custody::Free`] in one point: no other guest may arrive until the VMM has discarded
    /// this one ([`GuestRam::has_no_guest`](crate::GuestRam::has_no_guest)).
    Arrived,
    /// A migration moves the guest away.
    Leaving {
        /// Whether the operator may still run and stop the guest.
        ///
        /// That is so before the switchover begins, and after it was undone.
        is_free: bool,
    },
    /// The guest was handed over. This side does not know whether the destination runs it, so the guest stays
    /// stopped.
    Undecided,
    /// A migration failed and could not return the guest. It stays stopped, possibly without its disks and
    /// locks.
    Held,
    /// The guest was saved to a file. It is stopped here, without its disks and locks.
    Saved,
    /// Another VM has the guest. It must not run here again.
    Gone,
    /// A migration receives the guest on this side.
    Arriving {
        /// Whether the guest is complete, so that the operator may run and stop it.
        is_free: bool,
    },
    /// This RAM has no guest: an incoming migration failed, or the VMM discarded the guest.
    NoGuest,
    /// The guest has new memory ([`GuestRam::with_blocks`](crate::GuestRam::with_blocks)). Query the custody of the new RAM.
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

    /// Whether a migration may receive a guest here.
    ///
    /// That is so if no other party has a claim to a guest. In [`Custody::Free`], only the VMM knows whether it
    /// has a guest.
    pub fn may_arrive(self) -> bool {
        matches!(self, Self::Free | Self::Saved | Self::Gone | Self::NoGuest)
    }
}

/// The custody state that all clones of one [`GuestRam`](crate::GuestRam) share.
#[derive(Debug)]
pub(crate) struct Slot {
    holder: EngineLock<Holder>,
    /// Notified when an act has ended.
    act_ended: Condvar,
}

impl Default for Slot {
    fn default() -> Self {
        Self { holder: EngineLock::new("custody", Holder::default()), act_ended: Condvar::new() }
    }
}

#[derive(Debug, Default)]
struct Holder {
    custody: Custody,
    /// Number of the latest claim. It is 0 if there was none, or if the VMM replaced the guest since.
    claim: u64,
    claims: u64,
    /// Generation of the RAM that has the guest now.
    generation: u64,
    /// The thread that runs an operator's act.
    acting: Option<ThreadId>,
}

impl Holder {
    /// Returns the custody from the view of the RAM of `generation`.
    fn custody_of(&self, generation: u64) -> Custody {
        if generation == self.generation { self.custody } else { Custody::Replaced }
    }
}

impl Slot {
    fn lock(&self) -> EngineGuard<'_, Holder> {
        // Each change is one assignment, so the state is consistent after a panic.
        self.holder.lock()
    }

    /// Locks the state while no operator's act runs. `check` is repeated after each act, because the state may
    /// have changed; its error ends the wait.
    fn lock_between_acts<E>(
        &self,
        mut check: impl FnMut(&Holder) -> Result<(), E>,
    ) -> Result<EngineGuard<'_, Holder>, E> {
        let mut holder = self.lock();
        loop {
            check(&holder)?;
            match holder.acting {
                None => return Ok(holder),
                Some(thread) => assert_ne!(
                    thread,
                    std::thread::current().id(),
                    "an act of GuestRam::while_free would wait for its own end"
                ),
            }
            holder.wait(&self.act_ended);
        }
    }
}

/// Marks that an operator's act runs, until it is dropped.
struct Acting<'a>(&'a Slot);

impl Drop for Acting<'_> {
    fn drop(&mut self) {
        self.0.lock().acting = None;
        self.0.act_ended.notify_all();
    }
}

/// A migration's claim to a guest. The last state that it recorded remains after it is dropped.
///
/// A claim that recorded no state restores the state before it.
#[derive(Debug)]
pub struct CustodyClaim {
    slot: Arc<Slot>,
    number: u64,
    /// Number and custody of the previous claim.
    before: (u64, Custody),
    has_spoken: AtomicBool,
}

impl CustodyClaim {
    /// Records who has the guest now. Returns `false` without an effect if another claim has followed.
    ///
    /// The call does not wait for an operator's act: see [`CustodyClaim::wait_for_act`].
    pub fn set(&self, custody: Custody) -> bool {
        self.has_spoken.store(true, Ordering::Relaxed);
        let mut holder = self.slot.lock();
        let is_mine = holder.claim == self.number;
        if is_mine {
            holder.custody = custody;
        }
        is_mine
    }

    /// Records `to` like [`CustodyClaim::set`], but only if the recorded custody is `from`.
    pub fn exchange(&self, from: Custody, to: Custody) -> bool {
        self.has_spoken.store(true, Ordering::Relaxed);
        let mut holder = self.slot.lock();
        let is_so = holder.claim == self.number && holder.custody == from;
        if is_so {
            holder.custody = to;
        }
        is_so
    }

    /// Returns the recorded custody; `None` if another claim has followed.
    pub fn now(&self) -> Option<Custody> {
        let holder = self.slot.lock();
        (holder.claim == self.number).then_some(holder.custody)
    }

    /// Waits until no operator's act ([`GuestRam::while_free`](crate::GuestRam::while_free)) runs.
    ///
    /// Once custody is no longer free, no further act begins, so only this claim controls the guest afterwards.
    /// The caller must not hold a lock that the guest's progress may need.
    ///
    /// # Panics
    /// On the thread that runs the act.
    pub fn wait_for_act(&self) {
        crate::engine_lock::assert_none_held("the end of an operator's action");
        let waited = self.slot.lock_between_acts(|_| Ok::<(), std::convert::Infallible>(()));
        drop(waited);
    }

    /// Returns the custody before this claim.
    pub fn before(&self) -> Custody {
        self.before.1
    }

    /// Restores the claim and the custody from before this claim.
    ///
    /// The state is as if the migration had not existed. Later calls on this claim have no effect.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuestRam;
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

    /// Runs an act on a new thread until the returned sender is used.
    fn acting(ram: &GuestRam) -> (std::sync::mpsc::Sender<()>, std::thread::JoinHandle<Result<(), Custody>>) {
        let (began, begins) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel();
        let ram = ram.clone();
        let thread = std::thread::spawn(move || {
            ram.while_free(|| {
                began.send(()).unwrap();
                ends.recv().unwrap();
            })
        });
        begins.recv().unwrap();
        (end, thread)
    }

    #[test]
    fn migration_takes_the_guest_while_an_act_runs_and_waits_for_its_end_afterwards() {
        let ram = guest();
        let claim = Arc::new(leave(&ram).unwrap());
        let (end, act) = acting(&ram);

        // None of these calls waits: the driver makes them under its own lock.
        let taken = Custody::Leaving { is_free: false };
        assert!(claim.set(taken));
        assert_eq!((ram.custody(), claim.now()), (taken, Some(taken)));
        assert_eq!(ram.while_free(|| ()), Err(taken), "refused at once, since this act could wait for long");

        let (tell, waited) = std::sync::mpsc::channel();
        let waits = Arc::clone(&claim);
        let waiting = std::thread::spawn(move || {
            waits.wait_for_act();
            tell.send(()).unwrap();
        });
        let early = waited.recv_timeout(std::time::Duration::from_millis(50));
        assert!(early.is_err(), "the act runs");
        end.send(()).unwrap();
        waited.recv().unwrap();
        waiting.join().unwrap();
        assert_eq!(act.join().unwrap(), Ok(()));
    }

    #[test]
    fn claim_and_new_memory_wait_for_an_act_of_the_guest_that_is_here() {
        type Waits = fn(&GuestRam);
        let arrives: Waits =
            |ram| drop(ram.claim_custody(Custody::Arriving { is_free: false }, Custody::may_arrive).unwrap());
        let leaves: Waits = |ram| drop(leave(ram).unwrap());
        let is_new: Waits = |ram| ram.has_new_guest().unwrap();
        let changes: Waits = |ram| drop(ram.with_blocks(ram.blocks().to_vec()).unwrap());
        for waits in [arrives, leaves, is_new, changes] {
            let ram = guest();
            let (end, act) = acting(&ram);
            let (tell, done) = std::sync::mpsc::channel();
            let theirs = ram.clone();
            let waiting = std::thread::spawn(move || {
                waits(&theirs);
                tell.send(()).unwrap();
            });
            assert!(done.recv_timeout(std::time::Duration::from_millis(50)).is_err(), "the act runs");
            end.send(()).unwrap();
            done.recv().unwrap();
            waiting.join().unwrap();
            act.join().unwrap().unwrap();
        }
    }

    #[test]
    fn acts_run_one_after_the_other_and_may_ask_who_has_the_guest() {
        let ram = guest();
        let running = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        ram.while_free(|| {
                            assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0);
                            assert_eq!(ram.custody(), Custody::Free);
                            running.fetch_sub(1, Ordering::SeqCst);
                        })
                        .unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn act_inside_an_act_panics_and_does_not_wait_for_itself() {
        let ram = guest();
        let at = ram.clone();
        let nested = std::thread::spawn(move || at.while_free(|| at.while_free(|| ()))).join();
        assert!(nested.is_err());
        assert_eq!(ram.while_free(|| 1), Ok(1), "the outer act has ended");
    }

    #[test]
    #[cfg(debug_assertions)]
    fn act_under_a_lock_of_the_engine_panics() {
        let ram = guest();
        let at = ram.clone();
        let under = std::thread::spawn(move || {
            let lock = EngineLock::new("driver", ());
            let _held = lock.lock();
            at.while_free(|| ())
        });
        assert!(under.join().is_err());
        assert_eq!(ram.while_free(|| 1), Ok(1));
    }
}
