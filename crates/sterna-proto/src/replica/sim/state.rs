//! Data types of the simulated world: guests, messages, both sides, and future events.

use super::schedule::{Blow, Effect, Phase};
use crate::replica::{Answer, Protection, Ruling, Terms, primary, standby};
use crate::sim::Micros;
use std::collections::VecDeque;
use std::time::Duration;

/// One of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Primary,
    Standby,
}

pub(super) const TERMS: Terms = Terms {
    heartbeat: Duration::from_millis(200),
    lease: Duration::from_secs(2),
    drift_per_mille: 10,
    margin: Duration::from_millis(500),
    claim_interval: Duration::from_secs(1),
};

/// State that continues from one generation to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lineage {
    /// The guest's state: the number that it output last, released or waiting in the gate.
    pub(super) state: u64,
    /// The highest number that the observer has received.
    pub(super) heard: u64,
}

/// A state of the guest that was taken, complete or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub(super) number: u64,
    pub(super) state: u64,
    /// The guest wrote memory while the snapshot was taken.
    pub(super) is_torn: bool,
}

/// The guest of one side.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Guest {
    pub(super) exists: bool,
    pub(super) is_running: bool,
    /// Paused while a checkpoint is taken.
    pub(super) is_paused: bool,
    pub(super) state: u64,
}

impl Guest {
    pub(super) fn runs(self) -> bool {
        self.exists && self.is_running && !self.is_paused
    }
}

/// Messages between the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    // From primary to standby.
    Pages(Snapshot),
    Checkpoint(Snapshot),
    Heartbeat(Protection, u64),
    Unprotect(Protection),
    Give(Protection),
    Gone(Protection),
    // From standby to primary.
    Answer(Answer),
    Never(Protection),
    Runs(Protection),
    HandOver(Protection),
}

/// Future events of the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Tick(Side),
    Performs(Side),
    GuestSteps(Side),
    Takes,
    Staged,
    Arrives(Side, Message, u32),
    Broken(Side),
    ClaimArrives(Side),
    ClaimAnswered(Side, Option<Ruling>),
    Effect(Effect, bool),
    Stray(Protection, u8),
    Retries,
    Strikes(Blow),
    EndOfLife,
}

/// Facts about the run that the checks compare with the machines.
#[derive(Debug, Default)]
pub(super) struct Facts {
    pub(super) heard: u64,
    /// The last number that the primary's side released.
    pub(super) said_by_primary: u64,
    pub(super) standby_started: bool,
    pub(super) blows: u32,
    pub(super) failed: [u8; 3],
}

/// A checkpoint that is being taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Staging {
    pub(super) snapshot: Snapshot,
    pub(super) is_last: bool,
}

pub(super) struct PrimarySide {
    pub(super) machine: primary::Primary,
    pub(super) is_alive: bool,
    pub(super) is_open: bool,
    pub(super) frozen_until: Micros,
    pub(super) tick_at: Option<Micros>,
    pub(super) guest: Guest,
    /// The guest ended by itself, without an action of a machine.
    pub(super) guest_has_ended: bool,
    /// The last checkpoint that was taken.
    pub(super) captured: u64,
    pub(super) last_beat: u64,
    pub(super) outcome: Option<primary::Outcome>,
    pub(super) staging: Option<Staging>,
    /// Epoch and number of each waiting piece of output.
    pub(super) gate: VecDeque<(u64, u64)>,
    pub(super) is_gate_open: bool,
    pub(super) actions: VecDeque<primary::Action>,
}

impl PrimarySide {
    pub(super) fn new(protection: Protection, phase: &Phase, lineage: Lineage) -> Self {
        let config = primary::Config { protection, terms: TERMS, in_flight: phase.in_flight };
        Self {
            machine: primary::Primary::new(config, Duration::ZERO),
            is_alive: true,
            is_open: true,
            frozen_until: 0,
            tick_at: None,
            guest: Guest { exists: true, is_running: true, is_paused: false, state: lineage.state },
            guest_has_ended: false,
            captured: 0,
            last_beat: 0,
            outcome: None,
            staging: None,
            gate: VecDeque::new(),
            is_gate_open: true,
            actions: VecDeque::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.actions.is_empty() && self.staging.is_none()
    }
}

pub(super) struct StandbySide {
    pub(super) machine: standby::Standby,
    pub(super) is_alive: bool,
    pub(super) is_open: bool,
    pub(super) frozen_until: Micros,
    pub(super) tick_at: Option<Micros>,
    pub(super) guest: Guest,
    pub(super) outcome: Option<standby::Outcome>,
    /// The last checkpoint that arrived complete.
    pub(super) whole: Option<Snapshot>,
    /// Parts of a later checkpoint are in the guest's memory.
    pub(super) is_mixed: bool,
    pub(super) actions: VecDeque<standby::Action>,
}

impl StandbySide {
    pub(super) fn new(protection: Protection, phase: &Phase) -> Self {
        let config = standby::Config { protection, terms: TERMS, needs_fence: phase.is_qemu };
        Self {
            machine: standby::Standby::new(config),
            is_alive: true,
            is_open: true,
            frozen_until: 0,
            tick_at: None,
            guest: Guest::default(),
            outcome: None,
            whole: None,
            is_mixed: false,
            actions: VecDeque::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.actions.is_empty()
    }
}

/// One direction of the connection.
#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) is_cut: bool,
    pub(super) generation: u32,
    pub(super) last_arrival: Micros,
}
