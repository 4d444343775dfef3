//! What both sides do to the guest, in one place: at most one runs it, at most one holds its lease.

use parking_lot::Mutex;
use sterna::VmError;

use crate::stop::Side;

/// Watches two sides of one process. A side in a process of its own is watched there, alone.
#[derive(Default)]
pub struct Ledger {
    state: Mutex<State>,
    tell: Option<Tell>,
}

/// Hears of a start before it happens, and of a stop after.
type Tell = Box<dyn Fn(Entry) + Send + Sync>;

/// What is written into the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// The guest is about to run.
    Starts,
    /// It does not run any more.
    Stopped,
}

#[derive(Default)]
struct State {
    runs: Vec<Side>,
    /// Sides that have ever run it.
    have_run: Vec<Side>,
    holds: Option<Side>,
    violations: Vec<String>,
}

impl Entry {
    /// For lines of text.
    pub fn label(self) -> &'static str {
        match self {
            Self::Starts => "starts",
            Self::Stopped => "stopped",
        }
    }

    /// The entry with that label.
    pub fn of_label(label: &str) -> Option<Self> {
        [Self::Starts, Self::Stopped].into_iter().find(|entry| entry.label() == label)
    }
}

impl Ledger {
    /// The guest runs at `side`, which holds its lease.
    pub fn with_owner(side: Side) -> Self {
        let (runs, have_run) = (vec![side], vec![side]);
        let state = State { runs, have_run, holds: Some(side), violations: Vec::new() };
        Self { state: Mutex::new(state), tell: None }
    }

    /// The same, of a side in a process of its own: `tell` hands its entries on to the ledger of both.
    pub fn telling(side: Side, tell: impl Fn(Entry) + Send + Sync + 'static) -> Self {
        Self { tell: Some(Box::new(tell)), ..Self::with_owner(side) }
    }

    /// An entry that a side in another process has told. The lease is each process's own then.
    pub fn enter(&self, side: Side, entry: Entry) {
        match entry {
            Entry::Starts => {
                self.state.lock().holds = Some(side);
                self.starts(side);
            }
            Entry::Stopped => self.stopped(side),
        }
    }

    fn tell(&self, entry: Entry) {
        if let Some(tell) = &self.tell {
            tell(entry);
        }
    }

    /// `side` is about to let the guest run.
    pub fn starts(&self, side: Side) {
        self.tell(Entry::Starts);
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
        if !state.have_run.contains(&side) {
            state.have_run.push(side);
        }
    }

    /// The guest does not run at `side` any more.
    pub fn stopped(&self, side: Side) {
        self.state.lock().runs.retain(|&runs| runs != side);
        self.tell(Entry::Stopped);
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

    /// Whether the guest has ever been told to run at `side`.
    pub fn has_run(&self, side: Side) -> bool {
        self.state.lock().have_run.contains(&side)
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
