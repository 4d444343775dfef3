//! The blows against a primary, their times, and faults that the soak must find.

use std::time::Duration;

use sterna_standby::{CheckpointMode, Terms};

use crate::colo::case::{Case, Rulings};
use crate::colo::trouble::{Moment, Trouble};

/// Time of the blow, counted from the moment at which the standby holds a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// After this delay.
    After(Duration),
    /// Before the guest is stopped for the checkpoint of this number.
    Stopping(u64),
    /// In the pause of the checkpoint of this number.
    Saving(u64),
    /// Before the guest resumes after the checkpoint of this number. The standby does not have that
    /// checkpoint yet.
    Resuming(u64),
    /// In the middle of the piece of output of this number, while it is written.
    Saying(u64),
    /// This long after an operator requested a planned takeover.
    HandingOver(Duration),
}

/// The signals that are sent to the primary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blow {
    /// SIGKILL, without a warning.
    Kill,
    /// SIGSTOP for less than the lease, then SIGKILL.
    FreezeAndKill,
    /// SIGSTOP, then SIGCONT when the guest runs at the standby.
    FreezeAndWake,
}

/// A fault of a primary, planted so that the soak must find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    /// The console's gate releases output when its checkpoint is taken, not when it is held.
    ReleasesOnTaken,
    /// The same fault in the gate of the network cards.
    SendsOnTaken,
    /// The primary treats every answer of the arbiter as a won claim.
    BelievesItWon,
}

impl Planted {
    /// All faults that can be planted.
    pub const ALL: [Self; 3] = [Self::ReleasesOnTaken, Self::SendsOnTaken, Self::BelievesItWon];

    /// Name of the fault on a command line.
    pub fn label(self) -> &'static str {
        match self {
            Self::ReleasesOnTaken => "releases-on-taken",
            Self::SendsOnTaken => "sends-on-taken",
            Self::BelievesItWon => "believes-it-won",
        }
    }

    /// Finds the fault with this label.
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
    /// `again`: number of earlier plays in which the host did not schedule the primary in time. The lease is
    /// longer each time.
    pub(super) fn new(seed: u64, number: u64, again: u64) -> Self {
        let mut case = Case::new(seed, number);
        let mut random =
            fastrand::Rng::with_seed(seed.wrapping_mul(1 << 20).wrapping_add(number) ^ 0x6b69_6c6c);
        // The other random choices of a disturbed case do not apply.
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

    /// Name of the case in tables.
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
