//! A lease that two sides pass to each other. It notices if both have it.

use std::sync::{Arc, Mutex};

use sterna::{Hook, VmError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Release,
    TakeBack,
    Acquire,
    GiveBack,
    Announce,
}

/// The side of a hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Source,
    Destination,
}

/// State of a lease, shared by the hooks of both sides.
#[derive(Default)]
pub struct Lease {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    holder: Option<Side>,
}

impl Lease {
    pub fn holder(&self) -> Option<Side> {
        self.state.lock().unwrap().holder
    }
}

/// Calls of all hooks, in order.
#[derive(Default)]
pub struct Journal(Mutex<Vec<(String, Call)>>);

impl Journal {
    pub fn calls(&self) -> Vec<(String, Call)> {
        self.0.lock().unwrap().clone()
    }

    pub fn of(&self, call: Call) -> Vec<String> {
        self.calls().into_iter().filter(|(_, made)| *made == call).map(|(name, _)| name).collect()
    }
}

/// The hook of one side.
pub struct LeaseHook {
    name: String,
    side: Side,
    lease: Arc<Lease>,
    journal: Arc<Journal>,
    /// The call that fails, and how many times.
    pub fails: Mutex<Option<(Call, u32)>>,
}

impl LeaseHook {
    /// The hooks of both sides; the source has the lease.
    pub fn pair(name: &str, journal: &Arc<Journal>) -> (Arc<Self>, Arc<Self>, Arc<Lease>) {
        let lease = Arc::new(Lease::default());
        lease.state.lock().unwrap().holder = Some(Side::Source);
        let end = |side| {
            Arc::new(Self {
                name: name.to_owned(),
                side,
                lease: Arc::clone(&lease),
                journal: Arc::clone(journal),
                fails: Mutex::new(None),
            })
        };
        (end(Side::Source), end(Side::Destination), lease)
    }

    fn call(&self, call: Call) -> Result<(), VmError> {
        self.journal.0.lock().unwrap().push((self.name.clone(), call));
        if let Some((at, left)) = &mut *self.fails.lock().unwrap()
            && *at == call
            && *left > 0
        {
            *left -= 1;
            return Err(VmError::new(format!("{} {call:?}", self.name), "told to fail"));
        }
        Ok(())
    }

    fn take(&self) -> Result<(), VmError> {
        let mut state = self.lease.state.lock().unwrap();
        match state.holder {
            Some(holder) if holder != self.side => {
                Err(VmError::new(self.name.clone(), "the other side holds it"))
            }
            _ => {
                state.holder = Some(self.side);
                Ok(())
            }
        }
    }

    fn drop_lease(&self) {
        let mut state = self.lease.state.lock().unwrap();
        if state.holder == Some(self.side) {
            state.holder = None;
        }
    }
}

impl Hook for LeaseHook {
    fn name(&self) -> String {
        self.name.clone()
    }
    fn release(&self) -> Result<(), VmError> {
        self.call(Call::Release)?;
        self.drop_lease();
        Ok(())
    }
    fn take_back(&self) -> Result<(), VmError> {
        self.call(Call::TakeBack)?;
        self.take()
    }
    fn acquire(&self) -> Result<(), VmError> {
        self.call(Call::Acquire)?;
        self.take()
    }
    fn give_back(&self) {
        let _ = self.call(Call::GiveBack);
        self.drop_lease();
    }
    fn announce(&self) -> Result<(), VmError> {
        self.call(Call::Announce)
    }
}
