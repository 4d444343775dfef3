//! What falls on a primary, and when; and faults that must be found.

use std::time::Duration;

use sterna::replica::{CheckpointMode, Terms};

use crate::colo::case::{Case, Rulings};
use crate::colo::trouble::{Moment, Trouble};

/// When it falls, counted from the moment at which the standby holds something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// So much later.
    After(Duration),
    /// Before the guest stops for such a checkpoint.
    Stopping(u64),
    /// In the pause of such a checkpoint.
    Saving(u64),
    /// Before the guest goes on after such a checkpoint, which nobody else has yet.
    Resuming(u64),
    /// In the middle of such a piece of output that leaves.
    Saying(u64),
    /// So long after an operator ordered a planned takeover.
    HandingOver(Duration),
}

/// What falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blow {
    /// SIGKILL.
    Kill,
    /// SIGSTOP for less than its lease, then SIGKILL.
    FreezeAndKill,
    /// SIGSTOP; SIGCONT when its guest runs elsewhere.
    FreezeAndWake,
}

/// A fault of a primary that a soak must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    /// The gate lets the output of a checkpoint go when it is taken, not when it is held.
    ReleasesOnTaken,
    /// The primary believes that it has won the claim, whatever the arbiter says.
    BelievesItWon,
}

impl Planted {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::ReleasesOnTaken, Self::BelievesItWon];

    /// On a command line.
    pub fn label(self) -> &'static str {
        match self {
            Self::ReleasesOnTaken => "releases-on-taken",
            Self::BelievesItWon => "believes-it-won",
        }
    }

    /// By its label.
    pub fn of_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|planted| planted.label() == label)
    }
}

/// A protection whose primary is to be killed.
#[derive(Debug, Clone)]
pub(super) struct Kill {
    pub(super) case: Case,
    pub(super) when: When,
    pub(super) blow: Blow,
}

impl Kill {
    /// `again`: how often it was played before on a host that gave the primary no time; its lease is longer each time.
    pub(super) fn new(seed: u64, number: u64, again: u64) -> Self {
        let mut case = Case::new(seed, number);
        let mut random =
            fastrand::Rng::with_seed(seed.wrapping_mul(1 << 20).wrapping_add(number) ^ 0x6b69_6c6c);
        // What a case of disturbances leaves to chance besides.
        (case.trouble, case.moment, case.rulings) =
            (Trouble::Nothing, Moment::After(Duration::ZERO), Rulings::default());
        (case.slow, case.delay) = (Duration::ZERO, Duration::from_millis(1 + random.u64(..12)));
        if matches!(case.mode, CheckpointMode::Load(_)) {
            case.mode = CheckpointMode::Interval;
        }
        let lease = Duration::from_millis(300 << (2 * again));
        case.terms = Terms { lease, margin: lease / 2, ..case.terms };
        let number = 1 + random.u64(..4);
        let soon = |random: &mut fastrand::Rng| Duration::from_micros(random.u64(..40_000));
        let when = match random.u8(..10) {
            0..=2 => When::After(soon(&mut random)),
            3 => When::Stopping(number),
            4 | 5 => When::Saving(number),
            6 | 7 => When::Resuming(number),
            8 => When::Saying(number),
            _ => When::HandingOver(soon(&mut random) / 2),
        };
        let blow = match random.u8(..10) {
            0..=6 => Blow::Kill,
            7 => Blow::FreezeAndKill,
            _ => Blow::FreezeAndWake,
        };
        Self { case, when, blow }
    }

    /// For tables.
    pub(super) fn label(&self) -> String {
        let when = match self.when {
            When::After(_) => "at any moment",
            When::Stopping(_) => "before a stop",
            When::Saving(_) => "in a pause",
            When::Resuming(_) => "before a resume",
            When::Saying(_) => "in output",
            When::HandingOver(_) => "in a planned takeover",
        };
        let blow = match self.blow {
            Blow::Kill => "SIGKILL",
            Blow::FreezeAndKill => "SIGSTOP, SIGKILL",
            Blow::FreezeAndWake => "SIGSTOP, SIGCONT",
        };
        format!("{blow:16}  {when}")
    }
}
