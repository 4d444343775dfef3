//! The device's last known state and the data descriptor of its session.

use rustix::io::Errno;

use crate::vfio::{MigState, PortError};

/// A session. `D` is the type of the data descriptor.
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

    /// Records that the device was found in `state`, without a preceding request.
    pub(super) fn found(&mut self, state: MigState) {
        if !goes_on(self.state, state) {
            self.data = None;
        }
        self.state = state;
    }

    /// Records that the device changed to `to`, and that `data` arrived with the answer.
    ///
    /// # Errors
    /// If a descriptor is missing or unexpected. An unexpected one is closed.
    pub(super) fn went(&mut self, to: MigState, data: Option<D>) -> Result<(), String> {
        self.found(to);
        match (data, moves_data(to)) {
            (Some(data), true) => self.data = Some(data),
            (None, true) if self.data.is_none() => {
                return Err(format!("the driver returned no descriptor for its state with {to}"));
            }
            (Some(_), false) => {
                return Err(format!("the driver returned a descriptor for its state with {to}"));
            }
            (None, _) => {}
        }
        Ok(())
    }

    pub(super) fn data(&self, request: &'static str) -> Result<&D, PortError> {
        let call = "the data descriptor";
        self.data.as_ref().ok_or_else(|| PortError::System { request, call, source: Errno::BADF.into() })
    }
}

/// Whether both states belong to one session, so that its descriptor remains valid.
fn goes_on(from: MigState, to: MigState) -> bool {
    (from.saves() && to.saves()) || (from == to && moves_data(to))
}

fn moves_data(state: MigState) -> bool {
    state.saves() || state == MigState::Resuming
}
