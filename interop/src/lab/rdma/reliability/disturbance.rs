//! The disturbances of a migration between two processes.

use std::time::Duration;

/// The side of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Destination,
}

/// One disturbance of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disturbance {
    /// The migration is not disturbed, and the guest must arrive.
    Nothing,
    /// The source's operator cancels.
    Cancel,
    /// The destination's operator gives up.
    Abandon,
    /// SIGKILL for that side's process.
    Kill(Side),
    /// Every packet is lost until both sides have noticed.
    Cut,
    /// That side's interface is down for one second.
    LinkDown(Side),
}

impl Disturbance {
    const ALL: [Self; 9] = [
        Self::Nothing,
        Self::Cancel,
        Self::Cancel,
        Self::Abandon,
        Self::Kill(Side::Source),
        Self::Kill(Side::Destination),
        Self::Cut,
        Self::LinkDown(Side::Source),
        Self::LinkDown(Side::Destination),
    ];
    /// Approximate duration of a migration here, in ms.
    const DURATION_MS: u64 = 4_000;

    /// Draws the disturbance, and its time after the start.
    pub(super) fn draw(random: &mut fastrand::Rng) -> (Self, Duration) {
        let which = *random.choice(&Self::ALL).unwrap_or(&Self::Nothing);
        (which, Duration::from_millis(random.u64(..Self::DURATION_MS)))
    }
}
