//! Which state the device is in, as last heard, and the data descriptor that goes with it.

use rustix::io::Errno;

use crate::vfio::{MigState, PortError};

/// `D`: a data descriptor.
#[derive(Debug)]
pub(super) struct Session<D> {
    state: MigState,
    data: Option<D>,
}

impl<D> Session<D> {
    pub(super) fn at(state: MigState) -> Self {
        Self { state, data: None }
    }

    pub(super) fn state(&self) -> MigState {
        self.state
    }

    /// The device was found in `state`, to which nobody sent it just now.
    pub(super) fn found(&mut self, state: MigState) {
        if !goes_on(self.state, state) {
            self.data = None;
        }
        self.state = state;
    }

    /// The device went to `to`, and `data` came with the answer.
    ///
    /// # Errors
    /// What is wrong with there being a descriptor, or none. None is kept that should not be.
    pub(super) fn went(&mut self, to: MigState, data: Option<D>) -> Result<(), String> {
        self.found(to);
        match (data, moves_data(to)) {
            (Some(data), true) => self.data = Some(data),
            (None, true) if self.data.is_none() => {
                return Err(format!("no descriptor for its state came with {to}"));
            }
            (Some(_), false) => return Err(format!("a descriptor for its state came with {to}")),
            (None, _) => {}
        }
        Ok(())
    }

    pub(super) fn data(&self, request: &'static str) -> Result<&D, PortError> {
        let call = "the data descriptor";
        self.data.as_ref().ok_or_else(|| PortError::System { request, call, source: Errno::BADF.into() })
    }
}

/// Whether the session of the one state is that of the other, so that its descriptor serves on.
fn goes_on(from: MigState, to: MigState) -> bool {
    (from.saves() && to.saves()) || (from == to && moves_data(to))
}

fn moves_data(state: MigState) -> bool {
    state.saves() || state == MigState::Resuming
}
