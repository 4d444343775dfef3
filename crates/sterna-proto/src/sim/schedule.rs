//! A schedule of the simulator: the pairing, the configuration, and the faults with their places.
//!
//! Faults are *placed*: each waits until one side enters one state, and then strikes after a delay
//! that is often zero. Therefore rare states (around the commit) are hit as often as common ones.
//! Delays of messages and local effects are drawn from the seed while the schedule runs.

use super::Planted;
use super::rng::Rng;
use crate::source::SwitchoverAck;
use crate::{destination, source};

/// Simulated time in microseconds.
pub type Micros = u64;

/// The kinds of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Two Sternas with return path.
    Sternas,
    /// Sterna's source with a QEMU destination.
    ToQemu {
        /// The migration has a return path.
        return_path: bool,
    },
    /// A QEMU source with Sterna's destination.
    FromQemu {
        /// The migration has a return path.
        return_path: bool,
        /// `sterna migrate` controls both monitors.
        managed: bool,
    },
}

/// A state of one of the two machines, where a fault can strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The source is in this state.
    Source(source::State),
    /// The destination is in this state.
    Destination(destination::State),
}

/// A fault from outside that strikes in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Blow {
    /// All data from source to destination is lost from now on, silently.
    CutForward,
    /// All data from destination to source is lost from now on, silently.
    CutBack,
    /// Both directions are lost, silently.
    CutBoth,
    /// Both sides see a broken connection at the same time; data under way is lost.
    Reset,
    /// New connections fail for a while.
    CutAsks,
    /// The source's process dies.
    CrashSource,
    /// The destination's process dies.
    CrashDestination,
    /// As [`Blow::CrashDestination`], and a new process listens on the same address.
    RestartDestination,
    /// The operator cancels at the source.
    Cancel,
    /// The operator abandons the migration at the destination.
    Abandon,
    /// The operator issues `migrate-pause` at the source.
    PauseSource,
    /// The operator issues `migrate-pause` at the destination.
    PauseDestination,
    /// A local part of the source fails.
    LocalSource,
    /// A local part of the destination fails.
    LocalDestination,
    /// The destination sends garbage.
    Garbage,
    /// The destination sends one acknowledgement more than due.
    ExtraAck,
    /// The operator issues `migrate-continue` and `cont` in a state that does not expect them.
    Stray,
}

/// A local effect that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Effect {
    Stop,
    Release,
    SendEof,
    Reacquire,
    Resume,
    Untrack,
    Load,
    Acquire,
    GiveBack,
    Start,
    Place,
    SendEnd,
}

impl Effect {
    /// Every effect, in the order of the type.
    pub const ALL: [Self; 12] = [
        Self::Stop,
        Self::Release,
        Self::SendEof,
        Self::Reacquire,
        Self::Resume,
        Self::Untrack,
        Self::Load,
        Self::Acquire,
        Self::GiveBack,
        Self::Start,
        Self::Place,
        Self::SendEnd,
    ];
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
        /// Number of failing attempts; [`Fault::ALWAYS`] for all.
        times: u8,
    },
}

impl Fault {
    /// Number of attempts with which an effect never succeeds.
    pub const ALWAYS: u8 = u8::MAX;
}

/// The complete input of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Seed of this schedule, and of its delays.
    pub seed: u64,
    /// The kinds of the two sides.
    pub pairing: Pairing,
    /// The guest ran when the migration began.
    pub was_running: bool,
    /// The destination starts a guest that ran.
    pub autostart: bool,
    /// The VM has a compatibility record.
    pub compatibility: bool,
    /// Capability `pause-before-switchover` is on.
    pub pause: bool,
    /// Form of the capability `switchover-ack`.
    pub ack: SwitchoverAck,
    /// The operator requests postcopy.
    pub postcopy: bool,
    /// Pages that the destination's start touches, as bits.
    pub start_needs: u8,
    /// Both processes share the memory, and the destination's devices write it before the guest's
    /// start.
    pub one_host: bool,
    /// An operator recovers a paused postcopy.
    pub resumes: bool,
    /// Number of the source's devices that require an acknowledgement (`Modern`).
    pub asks: u8,
    /// Messages may take longer than limits.
    pub slow_network: bool,
    /// Local effects may take longer than limits.
    pub slow_local: bool,
    /// An operator decides an undecided migration after a while.
    pub operator_decides: bool,
    /// Hooks are exclusive, as a disk lock is. If false, every side that asks acquires them.
    pub locks: bool,
    /// The source reconnects by itself after a loss, before and after a switch to postcopy.
    pub reconnects: bool,
    /// The destination makes its VM from the source's configuration.
    pub configures: bool,
    /// The source may ask, and the destination answers. If false, only the operator decides.
    pub questions: bool,
    /// The faults of this run.
    pub faults: Vec<Fault>,
    /// A bug planted in one of the two sides.
    pub planted: Option<Planted>,
}

impl Schedule {
    /// Draws a schedule from a seed.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5354_4e41_5045_5245);
        let pairing = match rng.below(100) {
            0..70 => Pairing::Sternas,
            70..80 => Pairing::ToQemu { return_path: true },
            80..85 => Pairing::ToQemu { return_path: false },
            _ => Pairing::FromQemu { return_path: rng.percent(75), managed: rng.percent(60) },
        };
        let mut schedule = Self {
            seed,
            pairing,
            was_running: rng.percent(85),
            autostart: rng.percent(85),
            compatibility: rng.percent(70),
            pause: rng.percent(40),
            ack: rng.pick(&[
                SwitchoverAck::Off,
                SwitchoverAck::Off,
                SwitchoverAck::Legacy,
                SwitchoverAck::Modern,
            ]),
            postcopy: false,
            start_needs: 0,
            one_host: false,
            resumes: false,
            asks: rng.below(3) as u8,
            slow_network: rng.percent(15),
            slow_local: rng.percent(15),
            operator_decides: rng.percent(50),
            locks: rng.percent(75),
            reconnects: false,
            configures: false,
            questions: true,
            faults: Vec::new(),
            planted: None,
        };
        if matches!(pairing, Pairing::ToQemu { return_path: false }) {
            schedule.ack = SwitchoverAck::Off;
        }
        let can_do_postcopy = matches!(pairing, Pairing::Sternas | Pairing::ToQemu { return_path: true });
        schedule.postcopy = can_do_postcopy && rng.percent(40);
        schedule.resumes = schedule.postcopy && rng.percent(60);
        if schedule.postcopy && rng.percent(50) {
            schedule.start_needs = rng.pick(&[0b0001, 0b0100, 0b1010]);
        }
        schedule.one_host = pairing == Pairing::Sternas && !schedule.postcopy && rng.percent(30);
        schedule.reconnects = schedule.postcopy && rng.percent(30);
        let loses = pairing == Pairing::Sternas && rng.percent(50);
        schedule.reconnects |= loses;
        schedule.draw_faults(&mut rng);
        if loses {
            schedule.draw_losses(&mut rng);
        }
        schedule.configures = pairing == Pairing::Sternas && rng.percent(30);
        let is_asked = pairing != Pairing::Sternas || !schedule.operator_decides || rng.percent(70);
        schedule.questions = is_asked;
        schedule
    }

    /// Draws losses before the commit, and blows in the states that follow a loss.
    fn draw_losses(&mut self, rng: &mut Rng) {
        use source::State as S;
        for _ in 0..rng.pick(&[0, 1, 1, 2, 3]) {
            let state = rng.pick(&[S::Active, S::Stopping, S::Releasing, S::Switchover, S::Preparing]);
            let blow = rng.pick(&[Blow::Reset, Blow::Reset, Blow::CutBoth, Blow::CutBack, Blow::CutForward]);
            self.faults.push(Fault::At { place: Place::Source(state), delay: rng.below(4_000), blow });
        }
        if rng.percent(30) {
            let prepared = Place::Destination(destination::State::Prepared);
            let blow = rng.pick(&[Blow::Reset, Blow::CutBack, Blow::CutBoth]);
            self.faults.push(Fault::At { place: prepared, delay: rng.below(200), blow });
        }
        if rng.percent(60) {
            let place = rng.pick(&[
                Place::Source(S::Suspending),
                Place::Source(S::Reconnecting),
                Place::Destination(destination::State::Suspending),
                Place::Destination(destination::State::Suspended),
            ]);
            self.faults.push(strike(rng, place));
        }
    }

    fn draw_faults(&mut self, rng: &mut Rng) {
        let blows = rng.pick(&[0, 1, 1, 1, 2, 2, 3]);
        for _ in 0..blows {
            self.faults.push(draw_blow(rng));
        }
        let failures = rng.pick(&[0, 0, 1, 1, 2]);
        for _ in 0..failures {
            let mut times = rng.pick(&[1, 1, 1, 2, Fault::ALWAYS]);
            let effect = rng.pick(&Effect::ALL);
            if effect == Effect::Place && self.reconnects {
                // A source that reconnects by itself repeats that for every lost connection, so the
                // failures are limited.
                times = times.min(2);
            }
            self.faults.push(Fault::Fail { effect, times });
        }
        // Sterna's destination is held only with a managed QEMU source, or one without return path.
        if matches!(self.pairing, Pairing::FromQemu { .. }) && rng.percent(30) {
            let held = Place::Destination(destination::State::Held);
            self.faults.push(strike(rng, held));
        }
        // After devices have written the memory, the start fails, some times or always.
        if self.one_host && rng.percent(30) {
            let times = rng.pick(&[1, 2, Fault::ALWAYS]);
            self.faults.push(Fault::Fail { effect: Effect::Start, times });
            let place = Place::Destination(destination::State::Committed);
            self.faults.push(Fault::At {
                place,
                delay: rng.below(5_000),
                blow: rng.pick(&[Blow::Reset, Blow::CutBack]),
            });
            let held = Place::Destination(destination::State::Held);
            self.faults.push(strike(rng, held));
        }
        // These states are reached only if the undoing fails.
        if rng.percent(6) {
            self.faults.push(Fault::Fail {
                effect: rng.pick(&[Effect::Reacquire, Effect::Resume]),
                times: Fault::ALWAYS,
            });
            self.faults.push(Fault::At {
                place: Place::Source(source::State::Switchover),
                delay: rng.below(2_000),
                blow: rng.pick(&[Blow::Cancel, Blow::Reset]),
            });
            let held = Place::Source(source::State::Held);
            self.faults.push(strike(rng, held));
        }
        // A start that blocks on a page and then fails.
        if self.start_needs != 0 && rng.percent(30) {
            self.faults.push(Fault::At {
                place: Place::Destination(destination::State::Committed),
                delay: rng.below(2_000),
                blow: rng.pick(&[Blow::Reset, Blow::CutBack, Blow::CutForward, Blow::PauseDestination]),
            });
            if rng.percent(50) {
                self.faults.push(Fault::Fail { effect: Effect::Start, times: 1 });
            }
        }
        // These states are reached only by a loss in postcopy.
        if self.postcopy && rng.percent(25) {
            self.faults.push(Fault::At {
                place: rng.pick(&[
                    Place::Source(source::State::Postcopy),
                    Place::Destination(destination::State::Postcopy),
                ]),
                delay: rng.below(2_000),
                blow: rng.pick(&[
                    Blow::Reset,
                    Blow::CutBack,
                    Blow::CutForward,
                    Blow::CutBoth,
                    Blow::PauseSource,
                    Blow::PauseDestination,
                ]),
            });
            for _ in 0..2 {
                let paused = rng.pick(&[
                    Place::Source(source::State::PostcopyPaused),
                    Place::Destination(destination::State::PostcopyPaused),
                    Place::Source(source::State::PostcopyRecover),
                    Place::Destination(destination::State::PostcopyRecover),
                ]);
                self.faults.push(strike(rng, paused));
            }
        }
        // These states are reached only by a loss after the commit.
        if rng.percent(8) {
            self.faults.push(Fault::At {
                place: Place::Source(source::State::AwaitingAck),
                delay: 0,
                blow: rng.pick(&[Blow::Reset, Blow::CutBack, Blow::CutBoth]),
            });
            let undecided = Place::Source(source::State::Undecided);
            self.faults.push(strike(rng, undecided));
        }
    }
}

fn draw_blow(rng: &mut Rng) -> Fault {
    let place = if rng.percent(60) {
        let of_handover = source::State::ALL.into_iter().filter(|state| !state.is_of_protection());
        Place::Source(rng.pick(&of_handover.collect::<Vec<_>>()))
    } else {
        Place::Destination(rng.pick(&destination::State::ALL))
    };
    strike(rng, place)
}

fn strike(rng: &mut Rng, place: Place) -> Fault {
    use Blow::{
        Abandon, Cancel, CrashDestination, CrashSource, CutAsks, CutBack, CutBoth, CutForward, ExtraAck,
        Garbage, LocalDestination, LocalSource, PauseDestination, PauseSource, Reset, RestartDestination,
        Stray,
    };
    let delay = match rng.below(10) {
        0..5 => 0,
        5..8 => rng.below(5_000),
        8 => rng.below(100_000),
        _ => rng.below(6_000_000),
    };
    let blow = rng.pick(&[
        CutForward,
        CutBack,
        CutBoth,
        Reset,
        CutAsks,
        CrashSource,
        CrashDestination,
        RestartDestination,
        Cancel,
        Cancel,
        Abandon,
        Abandon,
        PauseSource,
        PauseSource,
        PauseDestination,
        PauseDestination,
        LocalSource,
        LocalDestination,
        Garbage,
        ExtraAck,
        Stray,
    ]);
    Fault::At { place, delay, blow }
}
