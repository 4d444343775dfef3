//! A schedule: who talks to whom, and what goes wrong where.
//!
//! Faults are *placed*: each waits for one side to enter one state and then
//! strikes after a delay that is often zero, so that rare states (the moment
//! around the commit) are hit as often as the common ones. Delays of messages
//! and local effects are drawn from the seed while the schedule runs.

use super::Planted;
use super::rng::Rng;
use crate::source::SwitchoverAck;
use crate::{destination, source};

/// Microseconds of simulated time.
pub type Micros = u64;

/// Who the two sides are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Two Sternas with return path.
    Sternas,
    /// Our source, a QEMU destination.
    ToQemu {
        /// With return path.
        return_path: bool,
    },
    /// A QEMU source, our destination.
    FromQemu {
        /// With return path.
        return_path: bool,
        /// `sterna migrate` holds both monitors.
        managed: bool,
    },
}

/// A state of one of our machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The source is in this state.
    Source(source::State),
    /// The destination is in this state.
    Destination(destination::State),
}

/// What strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Blow {
    /// Everything from source to destination is lost from now on, silently.
    CutForward,
    /// Everything from destination to source is lost from now on, silently.
    CutBack,
    /// Both directions are lost, silently.
    CutBoth,
    /// Both sides see a broken connection at once; what is under way is lost.
    Reset,
    /// New connections fail for a while.
    CutAsks,
    /// The source's process dies.
    CrashSource,
    /// The destination's process dies.
    CrashDestination,
    /// The same, and a new process listens on its address.
    RestartDestination,
    /// The operator cancels at the source.
    Cancel,
    /// The operator gives up at the destination.
    Abandon,
    /// The operator says `migrate-pause` at the source.
    PauseSource,
    /// The operator says `migrate-pause` at the destination.
    PauseDestination,
    /// Something local breaks at the source.
    LocalSource,
    /// Something local breaks at the destination.
    LocalDestination,
    /// The destination sends garbage.
    Garbage,
    /// The destination sends an acknowledgement too many.
    ExtraAck,
    /// The operator says `migrate-continue` and `cont` when nobody asked.
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
    /// Every effect.
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

/// One thing that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A blow after a state was entered for the first time.
    At {
        /// Where.
        place: Place,
        /// How long after it was entered.
        delay: Micros,
        /// What.
        blow: Blow,
    },
    /// The first so many attempts of an effect fail.
    Fail {
        /// Which.
        effect: Effect,
        /// How many; [`Fault::ALWAYS`] for all.
        times: u8,
    },
}

impl Fault {
    /// An effect that never works.
    pub const ALWAYS: u8 = u8::MAX;
}

/// Everything that one run follows from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Seed of this schedule, and of its delays.
    pub seed: u64,
    /// Who talks to whom.
    pub pairing: Pairing,
    /// The guest ran when the migration began.
    pub was_running: bool,
    /// The destination starts it.
    pub autostart: bool,
    /// There is a compatibility record.
    pub compatibility: bool,
    /// Capability `pause-before-switchover`.
    pub pause: bool,
    /// Capability `switchover-ack`.
    pub ack: SwitchoverAck,
    /// The guest goes on at the destination before its pages are there.
    pub postcopy: bool,
    /// An operator lets a paused postcopy go on.
    pub resumes: bool,
    /// How many devices of the source ask (`Modern`).
    pub asks: u8,
    /// Messages may take longer than limits.
    pub slow_network: bool,
    /// Local effects may take longer than limits.
    pub slow_local: bool,
    /// An operator decides an undecided migration after a while.
    pub operator_decides: bool,
    /// Hooks are exclusive, as a disk lock is; without, whoever asks gets them.
    pub locks: bool,
    /// The source connects again by itself when a connection is lost, before and after a switch to postcopy.
    pub reconnects: bool,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// A bug planted in one of the two sides.
    pub planted: Option<Planted>,
}

impl Schedule {
    /// The schedule that follows from a seed.
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
            resumes: false,
            asks: rng.below(3) as u8,
            slow_network: rng.percent(15),
            slow_local: rng.percent(15),
            operator_decides: rng.percent(50),
            locks: rng.percent(75),
            reconnects: false,
            faults: Vec::new(),
            planted: None,
        };
        if matches!(pairing, Pairing::ToQemu { return_path: false }) {
            schedule.ack = SwitchoverAck::Off;
        }
        let can_do_postcopy = matches!(pairing, Pairing::Sternas | Pairing::ToQemu { return_path: true });
        schedule.postcopy = can_do_postcopy && rng.percent(40);
        schedule.resumes = schedule.postcopy && rng.percent(60);
        schedule.reconnects = schedule.postcopy && rng.percent(30);
        let loses = pairing == Pairing::Sternas && rng.percent(50);
        schedule.reconnects |= loses;
        schedule.draw_faults(&mut rng);
        if loses {
            schedule.draw_losses(&mut rng);
        }
        schedule
    }

    /// Losses before the commit, and what befalls the states that follow them.
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
                // A source that connects again by itself does so as often as it loses a connection.
                times = times.min(2);
            }
            self.faults.push(Fault::Fail { effect, times });
        }
        // Only a managed QEMU source, or one without return path, gets us held.
        if matches!(self.pairing, Pairing::FromQemu { .. }) && rng.percent(30) {
            let held = Place::Destination(destination::State::Held);
            self.faults.push(strike(rng, held));
        }
        // States that only a failing undo reaches.
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
        // States that only a loss in postcopy reaches.
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
        // States that only a loss after the commit reaches.
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
