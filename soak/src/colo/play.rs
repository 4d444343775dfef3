//! Plays a case and applies the trouble. Two machines in this process have a proxy between them.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::SourceVm;
use sterna_guests::ProcessGuest;
use sterna_standby::machines::{primary, standby};
use sterna_standby::{EpochGate, Primary, Standby, StandbyContact, VmSurvivor};

use super::LONGEST;
use super::arbiter::{Arbiter, Side};
use super::case::Case;
use super::sampler::Sampler;
use super::trouble::{Moment, Order, Trouble};
use super::vm::{Callback, Deed, Plans, Troubled};
use super::voice::Voice;
use super::wire::{Awaited, Wire};

/// Time for which a protection continues if the trouble did not end it.
const AFTERWARDS: Duration = Duration::from_millis(150);

/// Time that is added to a pause in which the trouble occurs.
const MOMENT: Duration = Duration::from_millis(3);

/// Output that the survivor repeats, and its state at that time.
#[derive(Debug, Clone, Default)]
pub(super) struct Again {
    pub(super) position: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) steps: u64,
}

pub(super) struct Play {
    pub(super) here: Arc<ProcessGuest>,
    pub(super) there: Arc<ProcessGuest>,
    pub(super) here_says: Voice,
    pub(super) there_says: Voice,
    pub(super) again: Arc<Mutex<Vec<Again>>>,
    pub(super) arbiter: Arc<Arbiter>,
    pub(super) sampler: Sampler,
    pub(super) primary: Primary,
    /// `None` after the standby was dropped.
    pub(super) standby: Option<Standby>,
    pub(super) wire: Wire,
    moment: Receiver<()>,
}

/// Outcomes at primary and standby. `None` for the standby: it has no contact, or has lost it.
pub(super) type Ends = (primary::Outcome, Option<standby::Outcome>);

impl Case {
    /// Plays the case and returns a description of its end.
    pub(super) fn play(&self) -> Result<String, String> {
        let here = ProcessGuest::boot(self.guest.clone()).map_err(|error| error.to_string())?;
        here.cont().map_err(|error| error.to_string())?;
        let there = ProcessGuest::waiting(self.guest.clone()).map_err(|error| error.to_string())?;
        let mut play = self.protect(&here, &there)?;
        self.await_moment(&play)?;
        self.disturb(&mut play)?;
        let ends = self.settle(&play)?;
        let survivor = play.judge(self, ends)?;
        // The play owns references to the places, which must be free for the next migration.
        drop(play);
        if let Some(survivor) = survivor {
            let place = (survivor == Side::Primary && matches!(ends.1, Some(standby::Outcome::Discarded(_))))
                .then_some(&there);
            let guest = if survivor == Side::Primary { &here } else { &there };
            self.next(guest, place).map_err(|why| format!("after {ends:?} the guest cannot go on: {why}"))?;
        }
        Ok(format!("{:?}, {:?}", ends.0, ends.1))
    }

    pub(super) fn protect(
        &self,
        here: &Arc<ProcessGuest>,
        there: &Arc<ProcessGuest>,
    ) -> Result<Play, String> {
        let (arbiter, plans) = (Arc::<Arbiter>::default(), Arc::<Plans>::default());
        let (tell, moment) = channel();
        if let Moment::InPause(number) = self.moment {
            plans.add(Callback::Save, number, Deed::Tell(tell.clone(), MOMENT));
        }
        if let Trouble::Fails(callback, calls, panics) = self.trouble {
            plans.add(callback, calls, if panics { Deed::Panic } else { Deed::Fail });
        }
        if let Some(side) = self.rulings.favoured {
            arbiter.favour(side);
        }
        let (here_says, there_says) = (Voice::new(here, self.slow)?, Voice::new(there, self.slow)?);
        let again = Arc::<Mutex<Vec<Again>>>::default();
        let survivor =
            VmSurvivor::new(Troubled::new(there, &plans)).map_err(|error| error.to_string())?.saying_again({
                let (again, gate, there) =
                    (Arc::clone(&again), Arc::clone(&there_says.gate), Arc::clone(there));
                move |position, bytes| {
                    let steps = there.progress().total_steps();
                    again.lock().push(Again { position, bytes: bytes.to_vec(), steps });
                    gate.say_again(position, bytes);
                }
            });
        let standby = self.standby(survivor, arbiter.claims(Side::Standby))?;
        let wire = Wire::new(&standby.address())?;
        if let Moment::Piece(line, way, pieces) = self.moment {
            wire.await_piece(Awaited { line, way, pieces, tell });
        }
        let vm = Troubled::new(here, &plans) as Arc<dyn SourceVm>;
        let gate = Arc::clone(&here_says.gate) as Arc<dyn EpochGate>;
        let primary = self.primary(vm, &wire.address(), gate, arbiter.claims(Side::Primary))?;
        let sampler = Sampler::new(here, there);
        let (here, there, standby) = (Arc::clone(here), Arc::clone(there), Some(standby));
        Ok(Play {
            here,
            there,
            here_says,
            there_says,
            again,
            arbiter,
            sampler,
            primary,
            standby,
            wire,
            moment,
        })
    }

    /// Returns when the moment occurs, or when the protection has ended. A moment that does not occur has a
    /// time limit.
    fn await_moment(&self, play: &Play) -> Result<(), String> {
        let is_over = || play.primary.state().outcome.is_some();
        match self.moment {
            Moment::After(after) => std::thread::sleep(after),
            Moment::Taken(number) => {
                until(|| is_over() || play.primary.statistics().taken >= number)?;
            }
            Moment::InPause(_) | Moment::Piece(..) => {
                let begin = Instant::now();
                // The awaited number of pieces may never arrive.
                while !is_over() && begin.elapsed() < Duration::from_secs(3) {
                    if play.moment.recv_timeout(Duration::from_millis(5)).is_ok() {
                        break;
                    }
                }
            }
            Moment::HandingOver(after) | Moment::Ending(after) => {
                until(|| is_over() || play.primary.statistics().held >= 2)?;
                // The order is refused if the protection has ended.
                let _ = match self.moment {
                    Moment::HandingOver(_) => play.primary.hand_over(),
                    _ => play.primary.unprotect(),
                };
                std::thread::sleep(after);
            }
        }
        Ok(())
    }

    fn disturb(&self, play: &mut Play) -> Result<(), String> {
        for (side, hidden) in [Side::Primary, Side::Standby].into_iter().zip(self.rulings.hidden) {
            if let Some(lasting) = hidden {
                play.arbiter.hide(side, Instant::now() + lasting, self.rulings.hears);
            }
        }
        match &self.trouble {
            Trouble::Nothing | Trouble::Fails(..) => {}
            Trouble::Cut(which) => play.wire.cut(*which),
            Trouble::Silence(which, way, lasting) => {
                play.wire.hold(Some((*which, *way)));
                std::thread::sleep(*lasting);
                play.wire.hold(None);
            }
            Trouble::DropStandby => play.standby = None,
            Trouble::GiveUp => {
                if let Some(standby) = &play.standby {
                    // The order is refused after the seeding is held.
                    let _ = standby.cancel();
                }
            }
            Trouble::Orders(orders) => std::thread::scope(|scope| {
                for order in orders {
                    let (primary, contact) = (play.primary.clone(), play.contact());
                    scope.spawn(move || order.give(&primary, contact.as_ref()));
                }
            }),
        }
        Ok(())
    }

    /// Waits for the outcome of both sides. An operator ends a protection that the trouble has not ended.
    fn settle(&self, play: &Play) -> Result<Ends, String> {
        let begin = Instant::now();
        let mut is_ordered = false;
        until(|| {
            let state = play.primary.state();
            if !is_ordered && begin.elapsed() > AFTERWARDS {
                let order = if self.ends_by_takeover { Order::HandOver } else { Order::Unprotect };
                is_ordered = order.give(&play.primary, None);
            }
            play.retry();
            state.outcome.is_some() && play.primary.migration().outcome().is_some()
        })
        .map_err(|why| {
            let standby = play.contact().map(|contact| contact.state());
            format!("the primary: {why}: {:?}; the standby: {standby:?}", play.primary.state())
        })?;
        let here = play.primary.wait();
        let Some(contact) = play.contact() else { return Ok((here, None)) };
        until(|| {
            play.retry();
            contact.state().outcome.is_some()
        })
        .map_err(|why| format!("the standby: {why}: {:?}; the primary: {here:?}", contact.state()))?;
        Ok((here, contact.state().outcome))
    }
}

impl Order {
    /// Gives the order; true if it was accepted.
    fn give(self, primary: &Primary, standby: Option<&StandbyContact>) -> bool {
        match self {
            Self::Unprotect => primary.unprotect().is_ok(),
            Self::HandOver => primary.hand_over().is_ok(),
            Self::TakeOver { is_planned } => {
                standby.is_some_and(|contact| contact.take_over(is_planned).is_ok())
            }
        }
    }
}

impl Play {
    fn contact(&self) -> Option<StandbyContact> {
        self.standby.as_ref().and_then(Standby::contact)
    }

    /// The standby's operator retries the step that failed.
    fn retry(&self) {
        if let Some(contact) = self.contact()
            && matches!(contact.state().state, standby::State::Unready | standby::State::Held)
        {
            let _ = contact.retry();
        }
    }
}

pub(super) fn until(mut is_so: impl FnMut() -> bool) -> Result<(), String> {
    let begin = Instant::now();
    while !is_so() {
        if begin.elapsed() > LONGEST {
            return Err("it does not come to an end".to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
