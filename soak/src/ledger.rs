//! Records the actions of both sides on the guest. At most one side may run it, and at most one may hold its
//! lease.

use parking_lot::Mutex;
use sterna::VmError;

use crate::stop::Side;

/// Watches two sides in one process. A side in another process has a ledger there, for itself.
#[derive(Default)]
pub struct Ledger {
    state: Mutex<State>,
    tell: Option<Tell>,
}

/// Called before a start and after a stop.
type Tell = Box<dyn Fn(Entry) + Send + Sync>;

/// An entry of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// The guest is about to run.
    Starts,
    /// The guest has stopped running.
    Stopped,
}

#[derive(Default)]
struct State {
    runs: Vec<Side>,
    /// Sides that have ever run the guest.
    have_run: Vec<Side>,
    holds: Option<Side>,
    violations: Vec<String>,
}

impl Entry {
    /// Name of the entry in lines of text.
    pub fn label(self) -> &'static str {
        match self {
            Self::Starts => "starts",
            Self::Stopped => "stopped",
        }
    }

    /// Finds the entry with this label.
    pub fn of_label(label: &str) -> Option<Self> {
        [Self::Starts, Self::Stopped].into_iter().find(|entry| entry.label() == label)
    }
}

impl Ledger {
    /// A ledger in which the guest runs at `side`, which holds its lease.
    pub fn with_owner(side: Side) -> Self {
        let (runs, have_run) = (vec![side], vec![side]);
        let state = State { runs, have_run, holds: Some(side), violations: Vec::new() };
        Self { state: Mutex::new(state), tell: None }
    }

    /// A ledger of a side in its own process. `tell` forwards its entries to the ledger of both sides.
    pub fn telling(side: Side, tell: impl Fn(Entry) + Send + Sync + 'static) -> Self {
        Self { tell: Some(Box::new(tell)), ..Self::with_owner(side) }
    }

    /// Adds an entry of a side in another process. Each process has its own lease then.
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

    /// Records that `side` is about to run the guest.
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

    /// Records that the guest does not run at `side` any more.
    pub fn stopped(&self, side: Side) {
        self.state.lock().runs.retain(|&runs| runs != side);
        self.tell(Entry::Stopped);
    }

    /// Gives `side` the lease, or fails if the other side holds it.
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

    /// Releases the lease of `side`.
    pub fn release(&self, side: Side) {
        let mut state = self.state.lock();
        if state.holds == Some(side) {
            state.holds = None;
        }
    }

    /// Whether the guest has ever run at `side`.
    pub fn has_run(&self, side: Side) -> bool {
        self.state.lock().have_run.contains(&side)
    }

    /// The side that holds the lease.
    pub fn holder(&self) -> Option<Side> {
        self.state.lock().holds
    }

    /// Descriptions of all violations so far.
    pub fn violations(&self) -> Vec<String> {
        self.state.lock().violations.clone()
    }
}
