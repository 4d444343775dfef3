//! A schedule of the simulator: the configuration of a protection, and the faults with their
//! places.
//!
//! Faults are *placed*: each waits until one side enters one state, and then strikes after a delay
//! that is often zero.

use super::planted::Planted;
use crate::replica::{primary, standby};
use crate::sim::{Micros, Rng};

pub(super) const SECOND: Micros = 1_000_000;

/// A state of one of the two machines, where a fault can strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The primary is in this state.
    Primary(primary::State),
    /// The standby is in this state.
    Standby(standby::State),
}

/// A fault from outside that strikes in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Blow {
    /// All data from primary to standby is lost from now on, silently.
    CutForward,
    /// All data from standby to primary is lost from now on, silently.
    CutBack,
    /// Both directions are lost, silently.
    CutBoth,
    /// Both sides see a broken connection at the same time.
    Reset,
    /// The primary's process dies. With a QEMU primary this is the guard's process, and the guest
    /// continues while the gate stays closed.
    CrashPrimary,
    /// The standby's process dies.
    CrashStandby,
    /// The primary's process freezes for this time.
    FreezePrimary(Micros),
    /// The standby's process freezes for this time.
    FreezeStandby(Micros),
    /// The primary does not reach the arbiter for a while.
    BlockPrimary,
    /// The standby does not reach the arbiter for a while.
    BlockStandby,
    /// The primary reads bytes that violate the format.
    GarbageToPrimary,
    /// The standby reads bytes that violate the format.
    GarbageToStandby,
    /// A local part of the primary fails.
    LocalPrimary,
    /// A local part of the standby fails.
    LocalStandby,
    /// Answers of the previous generation reach the primary for a while.
    OldAnswers,
    /// Answers of another session reach the primary for a while.
    OtherAnswers,
    /// The guest's process ends at the primary, and the primary's own process continues.
    GuestEnds,
    /// The operator ends the protection at the primary.
    Unprotect,
    /// The operator requests a planned takeover at the primary.
    HandOver,
    /// The operator requests a takeover at the standby.
    TakeOver {
        /// The takeover is planned.
        is_planned: bool,
    },
}

/// A local effect that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Effect {
    Prepare,
    Fence,
    Start,
}

/// One fault of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A blow after a state was entered for the first time.
    At {
        /// The state that is struck.
        place: Place,
        /// Delay after the state was entered.
        delay: Micros,
        /// The fault that strikes.
        blow: Blow,
    },
    /// The first `times` attempts of an effect fail.
    Fail {
        /// The effect that fails.
        effect: Effect,
        /// Number of failing attempts.
        times: u8,
    },
}

/// The configuration and the faults of one generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    /// The primary is an unmodified QEMU with a guard.
    pub is_qemu: bool,
    /// Number of checkpoints that may be unanswered.
    pub in_flight: u64,
    /// Interval between two checkpoints.
    pub interval: Micros,
    /// Messages may take longer than the lease.
    pub is_slow: bool,
    /// Local work may take long.
    pub is_loaded: bool,
    /// Deviation of the two clocks' rates from the true rate, in millionths.
    pub rates: [i64; 2],
    /// The side never reaches the arbiter.
    pub is_without_arbiter: [bool; 2],
    /// The faults of this generation.
    pub faults: Vec<Fault>,
}

/// The complete input of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Seed of this schedule, and of its delays.
    pub seed: u64,
    /// The generations, in order.
    pub phases: Vec<Phase>,
    /// A bug planted in one of the two sides.
    pub planted: Option<Planted>,
}

impl Schedule {
    /// Draws a schedule from a seed.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5354_414e_4442_5921);
        let phases = rng.pick(&[1, 2]);
        let phases = (0..phases).map(|_| Phase::draw(&mut rng)).collect();
        Self { seed, phases, planted: None }
    }
}

impl Phase {
    fn draw(rng: &mut Rng) -> Self {
        // The terms allow a difference of ten thousandths between the two clocks.
        let mut rate = || rng.below(10_001) as i64 - 5_000;
        let rates = [rate(), rate()];
        let is_without_any = rng.percent(3);
        Self {
            is_qemu: rng.percent(25),
            in_flight: 1 + rng.below(5),
            interval: rng.pick(&[10_000, 50_000, 200_000, 600_000]),
            is_slow: rng.percent(20),
            is_loaded: rng.percent(20),
            rates,
            is_without_arbiter: [(); 2].map(|()| rng.percent(4) || is_without_any),
            faults: draw_faults(rng),
        }
    }
}

fn draw_faults(rng: &mut Rng) -> Vec<Fault> {
    let mut faults = Vec::new();
    for _ in 0..rng.pick(&[0, 1, 1, 1, 2, 2, 3, 4]) {
        let place = match rng.percent(60) {
            true => Place::Primary(rng.pick(&primary::State::ALL)),
            false => Place::Standby(rng.pick(&standby::State::ALL)),
        };
        faults.push(strike(rng, place));
    }
    for _ in 0..rng.pick(&[0, 0, 0, 1, 2]) {
        let effect = rng.pick(&[Effect::Prepare, Effect::Fence, Effect::Start]);
        faults.push(Fault::Fail { effect, times: rng.pick(&[1, 1, 2]) });
    }
    // States that are reached only by an operator's request or by a loss.
    if rng.percent(60) {
        let blow = rng.pick(&[
            Blow::GuestEnds,
            Blow::Unprotect,
            Blow::HandOver,
            Blow::TakeOver { is_planned: true },
            Blow::TakeOver { is_planned: false },
            Blow::CrashPrimary,
            Blow::CutBoth,
            Blow::Reset,
        ]);
        let delay = rng.below(2 * SECOND);
        faults.push(Fault::At { place: Place::Standby(standby::State::Following), delay, blow });
    }
    faults
}

fn strike(rng: &mut Rng, place: Place) -> Fault {
    let delay = match rng.below(10) {
        0..4 => 0,
        4..7 => rng.below(5_000),
        7..9 => rng.below(500_000),
        _ => rng.below(6 * SECOND),
    };
    let freeze = match rng.below(4) {
        0 => rng.below(50_000),
        1 => rng.below(2 * SECOND),
        2 => SECOND + rng.below(4 * SECOND),
        _ => rng.below(60 * SECOND),
    };
    let blow = rng.pick(&[
        Blow::CutForward,
        Blow::CutBack,
        Blow::CutBoth,
        Blow::Reset,
        Blow::CrashPrimary,
        Blow::CrashStandby,
        Blow::FreezePrimary(freeze),
        Blow::FreezePrimary(freeze),
        Blow::FreezeStandby(freeze),
        Blow::BlockPrimary,
        Blow::BlockStandby,
        Blow::GarbageToPrimary,
        Blow::GarbageToStandby,
        Blow::LocalPrimary,
        Blow::LocalStandby,
        Blow::OldAnswers,
        Blow::OtherAnswers,
        Blow::GuestEnds,
        Blow::Unprotect,
        Blow::HandOver,
        Blow::TakeOver { is_planned: true },
        Blow::TakeOver { is_planned: false },
    ]);
    Fault::At { place, delay, blow }
}
