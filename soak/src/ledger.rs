//! What both sides do to the guest, in one place: at most one runs it, at most one holds its lease.

use parking_lot::Mutex;
use sterna::VmError;

use crate::stop::Side;

/// Watches two sides of one process. A side in a process of its own is watched there, alone.
#[derive(Default)]
pub struct Ledger {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    runs: Vec<Side>,
    holds: Option<Side>,
    violations: Vec<String>,
}

impl Ledger {
    /// The guest runs at `side`, which holds its lease.
    pub fn with_owner(side: Side) -> Self {
        let state = State { runs: vec![side], holds: Some(side), violations: Vec::new() };
        Self { state: Mutex::new(state) }
    }

    /// `side` is about to let the guest run.
    pub fn starts(&self, side: Side) {
        let mut state = self.state.lock();
        if state.runs.iter().any(|&runs| runs != side) {
            state.violations.push(format!("{side:?} starts the guest while the other side runs it"));
        }
        if state.holds != Some(side) {
            let holds = state.holds;
            state.violations.push(format!("{side:?} starts the guest while the lease is held by {holds:?}"));
        }
        if !state.runs.contains(&side) {
            state.runs.push(side);
        }
    }

    /// The guest does not run at `side` any more.
    pub fn stopped(&self, side: Side) {
        self.state.lock().runs.retain(|&runs| runs != side);
    }

    /// `side` wants the lease.
    pub fn acquire(&self, side: Side) -> Result<(), VmError> {
        let mut state = self.state.lock();
        match state.holds {
            Some(other) if other != side => {
                Err(VmError::new("acquire the lease", format!("{other:?} holds it")))
            }
            _ => {
                state.holds = Some(side);
                Ok(())
            }
        }
    }

    /// `side` lets the lease go.
    pub fn release(&self, side: Side) {
        let mut state = self.state.lock();
        if state.holds == Some(side) {
            state.holds = None;
        }
    }

    /// Who holds the lease.
    pub fn holder(&self) -> Option<Side> {
        self.state.lock().holds
    }

    /// What must never be.
    pub fn violations(&self) -> Vec<String> {
        self.state.lock().violations.clone()
    }
}
